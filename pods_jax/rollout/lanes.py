"""Parts of the prompts that one device generates side by side."""

import math
import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pods_jax.models.spec import DecoderSpec
from pods_jax.types import Rollouts

LANE_FLOPS = 6e6


LANE_WEIGHTS = 16e6


@dataclass(frozen=True)
class Lanes:
    """Parts of the prompts that one device generates side by side, each on a thread of its own.

    Attributes:
        most: Lanes at most.
        rows: Rollouts that each has at least.
    """

    most: int = 1
    rows: int = 1


def default_lanes(devices: int, platform: str, spec: DecoderSpec) -> Lanes:
    """One lane for each core of a CPU, for the programs of a small model leave all but one idle most of the time.

    Not where a lane's token would take less than the threads' taking turns (some million operations), nor where the weights
    outgrow the cores' common cache, since every lane reads them.
    """
    if platform != "cpu" or devices > 1 or spec.matrix_weights > LANE_WEIGHTS:
        return Lanes()
    return Lanes(os.cpu_count() or 1, math.ceil(LANE_FLOPS / (2 * spec.matrix_weights)))


def cut(lanes: int, tree: Any) -> list[Any]:
    """Trees of arrays ``[P, ...]`` in equal parts of the prompts."""
    leaves, structure = jax.tree.flatten(tree)
    return [jax.tree.unflatten(structure, part) for part in zip(*(jnp.split(leaf, lanes) for leaf in leaves), strict=True)]


def join(parts: list[Rollouts]) -> Rollouts:
    """The rollouts of all lanes, in the order of the prompts."""
    return Rollouts(
        tokens_PNC=jnp.concatenate([part.tokens_PNC for part in parts]),
        logp_PNC=jnp.concatenate([part.logp_PNC for part in parts]),
        length_PN=jnp.concatenate([part.length_PN for part in parts]),
        finished_PN=jnp.concatenate([part.finished_PN for part in parts]),
        decoded_rows=sum(part.decoded_rows for part in parts),  # type: ignore[arg-type]
    )
