"""Low-rank adapters: which projections can have one, their shapes, and how they are told from the frozen weights.

An adapted projection computes ``x W + (alpha / rank) x A B``. In the parameter tree the adapters of all layers are stacked and
stand next to their weights: ``layers.q_lora_a`` and ``layers.q_lora_b`` next to ``layers.q``. B starts at zero, so the adapted
model starts equal to its base.

Reference: LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685, equation 3.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pods_jax.models.spec import DecoderSpec

A, B = "_lora_a", "_lora_b"


@dataclass(frozen=True)
class Projection:
    """The dimensions of one projection.

    Attributes:
        inputs: Input dimensions as einsum letters: d width, n heads, h head, f feed-forward.
        outputs: Output dimensions in the same letters.
        input_axes: Logical names of the input dimensions.
        output_axes: Logical names of the output dimensions.
    """

    inputs: str
    outputs: str
    input_axes: tuple[str, ...]
    output_axes: tuple[str, ...]


PROJECTIONS: dict[str, Projection] = {
    "q": Projection("d", "nh", ("embed",), ("q_heads", "head")),
    "k": Projection("d", "nh", ("embed",), ("kv_heads", "head")),
    "v": Projection("d", "nh", ("embed",), ("kv_heads", "head")),
    "o": Projection("nh", "d", ("q_heads", "head"), ("embed",)),
    "gate": Projection("d", "f", ("embed",), ("mlp",)),
    "up": Projection("d", "f", ("embed",), ("mlp",)),
    "down": Projection("f", "d", ("mlp",), ("embed",)),
}


@dataclass(frozen=True)
class LoraSpec:
    """The adapters' rank, scale and projections.

    Attributes:
        rank: Columns of A and rows of B.
        alpha: The adapter's output is scaled by ``alpha / rank``.
        targets: Entries of ``PROJECTIONS`` that have an adapter.

    Raises:
        ValueError: The rank is below 1, or a target is unknown or named twice, or there is none.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(PROJECTIONS)

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank} must be at least 1")
        if not self.targets or len(set(self.targets)) < len(self.targets) or not set(self.targets) <= set(PROJECTIONS):
            raise ValueError(f"lora.targets={list(self.targets)} must name some of {', '.join(PROJECTIONS)}, each once")

    @property
    def scale(self) -> float:
        """The factor of the adapters' output, ``alpha / rank``."""
        return self.alpha / self.rank


def sizes(spec: DecoderSpec, axes: Sequence[str]) -> tuple[int, ...]:
    """Returns the sizes of logical axes in a decoder of this shape."""
    of = {
        "embed": spec.width,
        "q_heads": spec.q_heads,
        "kv_heads": spec.kv_heads,
        "head": spec.head_size,
        "mlp": spec.feed_forward,
    }
    return tuple(of[axis] for axis in axes)


def project(x: Array, w: Mapping[str, Array], name: str, scale: float) -> Array:
    """Returns ``x W`` of one layer, plus ``scale x A B`` where ``w`` holds an adapter of that projection."""
    i, o = PROJECTIONS[name].inputs, PROJECTIONS[name].outputs
    out = jnp.einsum(f"...{i},{i}{o}->...{o}", x, w[name])
    if name + A not in w:
        return out
    low = jnp.einsum(f"...{i},{i}r->...r", x, w[name + A])
    return out + scale * jnp.einsum(f"...r,r{o}->...{o}", low, w[name + B])


def split_adapters(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the trained and the frozen part of a parameter tree.

    These are the adapters and the rest; without adapters everything is trained and nothing frozen.
    """
    layers = params["layers"]
    adapters = {name: value for name, value in layers.items() if name.endswith((A, B))}
    if not adapters:
        return dict(params), {}
    rest = {name: value for name, value in layers.items() if name not in adapters}
    return {"layers": adapters}, {**params, "layers": rest}


def join(trained: Mapping[str, Any], frozen: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the whole tree of the two parts that ``split_adapters`` returned."""
    if not frozen:
        return dict(trained)
    return {**frozen, "layers": {**frozen["layers"], **trained["layers"]}}


def merge(params: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Returns the tree without adapters, each added into its weight: ``W + scale A B``, summed in float32."""
    adapted, base = split_adapters(params)
    if not base:
        return dict(params)
    layers = dict(base["layers"])
    for name in layers:
        if name + A in adapted["layers"]:
            i, o = PROJECTIONS[name].inputs, PROJECTIONS[name].outputs
            a, b = (adapted["layers"][name + suffix].astype(jnp.float32) for suffix in (A, B))
            delta = scale * jnp.einsum(f"l{i}r,lr{o}->l{i}{o}", a, b)
            layers[name] = (layers[name].astype(jnp.float32) + delta).astype(layers[name].dtype)
    return {**base, "layers": layers}


def initial_adapters(spec: DecoderSpec, lora: LoraSpec, key: Array) -> dict[str, tuple[tuple[str, ...], Array]]:
    """Returns new float32 adapters of all layers, each with the names of its axes.

    A is uniform within ``1/sqrt(inputs)``, as PEFT draws it, and B is zero.
    """
    adapters: dict[str, tuple[tuple[str, ...], Array]] = {}
    for name in lora.targets:
        here = PROJECTIONS[name]
        inputs, outputs = sizes(spec, here.input_axes), sizes(spec, here.output_axes)
        bound = math.prod(inputs) ** -0.5
        drawn = jax.random.fold_in(key, list(PROJECTIONS).index(name))
        a = jax.random.uniform(drawn, (spec.layers, *inputs, lora.rank), minval=-bound, maxval=bound)
        adapters[name + A] = ("layers", *here.input_axes, "rank"), a
        adapters[name + B] = ("layers", "rank", *here.output_axes), jnp.zeros((spec.layers, lora.rank, *outputs))
    return adapters
