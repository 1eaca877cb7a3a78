"""Which kept rollouts an update trains together: none without signal, micro-batches of about equal tokens, little padding.

The deal is made on the host from the lengths of a step's kept rollouts. Groups that have nothing to train are left out, so the
update shrinks with them; the others are dealt to micro-batches, long and short ones alike to each, so that a micro-batch's
packed tokens (``models/packing.py``) fill the places it has. The arrays of a deal keep their shapes whatever is left out; only
the number of groups of a single micro-batch and ``places`` are compiled, and take few values.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pods_jax.config.entries import micro_batch_sizes
from pods_jax.devices.ladder import ladder, ladder_length
from pods_jax.devices.sharding import constrain, replicate, spread, take_by_shard
from pods_jax.types import KeptBatch


def default_multiple(platform: str) -> int:
    """Returns the multiple to which the places of packed tokens are rounded up: what the backend multiplies at once."""
    return 8 if platform == "cpu" else 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Deal:
    """The micro-batches of one update: I at most, of G groups of each of S shards, of W rollouts of each group.

    Attributes:
        group_ISG: Group among its shard's; -1 is an empty one.
        rollout_ISGW: Kept rollout among its group's; -1 is an empty slot.
        count: Micro-batches that hold anything.
        places: Places for the packed completions of one shard (static); 0 leaves them as they lie, with their padding.
    """

    group_ISG: Int[Array, "I S G"]
    rollout_ISGW: Int[Array, "I S G W"]
    count: Int[Array, ""]
    places: int = field(metadata={"static": True})


def deal_rollouts(
    length_PM: Int[np.ndarray, "P M"],
    weight_PM: Float[np.ndarray, "P M"],
    *,
    completion_length: int,
    prompt_length: int,
    shape: tuple[int, int],
    shards: int,
    multiple: int,
    rungs: int,
) -> Deal:
    """Deals the kept rollouts of one update to micro-batches.

    Args:
        length_PM: Tokens of each kept rollout.
        weight_PM: 0 for what is not trained.
        completion_length: Padded length of the batch's completions (C).
        prompt_length: Padded length of its prompts (L).
        shape: Groups of each shard and rollouts of each group in one micro-batch.
        shards: Shards over which groups are spread.
        multiple: Places are a multiple of this many.
        rungs: Sizes of a micro-batch from one half to the next, each a compiled program; 0 is one size, with all padding.

    Returns:
        The deal, with NumPy arrays.
    """
    prompts, kept = length_PM.shape
    tokens_SGM = np.where(weight_PM > 0, length_PM, 0).reshape(shards, prompts // shards, kept)
    dealt = [list(_deal(tokens_GM, *shape)) for tokens_GM in tokens_SGM]
    count = max(map(len, dealt))
    most = prompts // shards * kept // math.prod(shape)  # micro-batches when nothing is left out
    groups = shape[0]
    # With few sizes, leaving groups out of attention and prompts is worth one only where prompts weigh beside completions.
    if rungs and most == 1 and (rungs > 1 or 10 * prompt_length > shape[1] * completion_length):
        groups = _fitting(max((len(micro) for micros in dealt for micro in micros), default=1), ladder(groups, 1, 1))
    group_ISG = np.full((most, shards, groups), -1, np.int32)
    rollout_ISGW = np.full((most, shards, groups, shape[1]), -1, np.int32)
    places = 1
    for s, micros in enumerate(dealt):
        for i, micro in enumerate(micros):
            for g, (group, rollouts) in enumerate(micro):
                group_ISG[i, s, g], rollout_ISGW[i, s, g, : len(rollouts)] = group, rollouts
            places = max(places, sum(int(tokens_SGM[s, group, rollouts].sum()) for group, rollouts in micro))
    padded = groups * shape[1] * completion_length
    places = _fitting(places, ladder(padded, multiple, rungs))
    # Packed to their full size they would only be copied.
    places = 0 if places == padded else places
    return Deal(group_ISG, rollout_ISGW, np.int32(count), places)  # type: ignore[arg-type]


def _fitting(needed: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if size >= needed)


def _deal(tokens_GM: Int[np.ndarray, "G M"], groups: int, rollouts: int) -> Iterator[list[tuple[int, Sequence[int]]]]:
    """Micro-batches of one shard, each a list of groups with the rollouts that it trains of them."""
    active = [int(group) for group in np.argsort(-tokens_GM.sum(axis=1), kind="stable") if tokens_GM[group].any()]
    if rollouts == tokens_GM.shape[1]:
        for hand in _hands(active, math.ceil(len(active) / groups)):
            yield [(group, range(rollouts)) for group in hand]
        return
    for group in active:
        longest_first = np.argsort(-tokens_GM[group], kind="stable").tolist()
        for hand in _hands(longest_first, len(longest_first) // rollouts):
            yield [(group, hand)]


def _hands(cards: Sequence[int], hands: int) -> list[list[int]]:
    """Cards in descending order dealt there and back again, so that the hands' sums are close."""
    dealt: list[list[int]] = [[] for _ in range(hands)]
    for place, card in enumerate(cards):
        turn, seat = divmod(place, hands)
        dealt[seat if turn % 2 == 0 else hands - 1 - seat].append(card)
    return dealt


def most_sizes(groups: int, single: bool, rungs: int) -> int:
    """Most values of (groups, places) that deals have for batches of one padded length; ``single``: one micro-batch is all."""
    if not rungs:
        return 1
    return (len(ladder(groups, 1, 1)) if single else 1) * ladder_length(rungs)


def place(deal: Deal) -> Deal:
    """The deal on the devices of the mesh set by ``jax.set_mesh``, each shard's part with its groups."""
    group_ISG, rollout_ISGW = spread((deal.group_ISG, deal.rollout_ISGW), (None, "prompts"))
    return Deal(group_ISG, rollout_ISGW, replicate(deal.count), deal.places)


def take_micro_batch(kept: KeptBatch, group_SG: Int[Array, "S G"], rollout_SGW: Int[Array, "S G W"]) -> KeptBatch:
    """The kept rollouts of one micro-batch, ``S * G`` groups of W; empty slots have weight and length 0."""
    shards = group_SG.shape[0]
    rollout_PW = rollout_SGW.reshape(-1, rollout_SGW.shape[2])

    def groups(x: Array) -> Array:
        taken = take_by_shard(x.reshape(shards, -1, *x.shape[1:]), jnp.maximum(group_SG, 0))
        taken = taken.reshape(-1, *x.shape[1:])
        return constrain(taken, ("prompts", *[None] * (x.ndim - 1)))

    def rollouts(x: Array) -> Array:
        return take_by_shard(groups(x), jnp.maximum(rollout_PW, 0))

    names = [f.name for f in fields(kept)]
    part = replace(kept, **{n: (groups if n.startswith("prompt_") else rollouts)(getattr(kept, n)) for n in names})
    there = rollout_PW >= 0
    return replace(part, length_PM=jnp.where(there, part.length_PM, 0), weight_PM=jnp.where(there, part.weight_PM, 0))


def padding_fraction(
    deal: Deal, prompt_length_P: Int[np.ndarray, "P"], tokens: int, *, prompt_length: int, completion_length: int
) -> float:
    """Share of what an update computes that is padding.

    Args:
        deal: The deal, with NumPy arrays.
        prompt_length_P: Lengths of the prompts.
        tokens: Tokens of the completions that are trained.
        prompt_length: Padded length of the prompts.
        completion_length: Padded length of the completions.
    """
    group_ISG = np.asarray(deal.group_ISG)
    shards, groups, rollouts = deal.rollout_ISGW.shape[1:]
    places = deal.places or groups * rollouts * completion_length
    computed = int(deal.count) * shards * (groups * prompt_length + places)
    _, shard, _ = np.nonzero(group_ISG >= 0)
    prompts = prompt_length_P.reshape(shards, -1)[shard, group_ISG[group_ISG >= 0]].sum()
    return 1.0 - (tokens + int(prompts)) / computed if computed else 0.0


def micro_batch_shape(prompts: int, kept: int, micro_batch: int, shards: int) -> tuple[int, int]:
    """Groups of each shard and rollouts of each group in one micro-batch of ``micro_batch`` rollouts; 0 is all at once.

    Raises:
        ValueError: The batch cannot be cut so.
    """
    if micro_batch == 0:
        return prompts // shards, kept
    if micro_batch not in (sizes := micro_batch_sizes(prompts, kept, shards)):
        raise ValueError(
            f"update.micro_batch={micro_batch} cannot cut {prompts} groups of {kept} kept rollouts over {shards} devices: "
            f"possible are {', '.join(map(str, sizes))}"
        )
    each = micro_batch // shards
    return (each // kept, kept) if each >= kept else (1, each)
