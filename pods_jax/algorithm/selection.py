"""Which m of a prompt's n rollouts are trained: between the rewards and the advantages of a step.

A rule sees one group. It is either a function ``rule(group, key, *, m) -> index_M`` of the group's record (``types.Group``), or
``Ranked``: then the group is sorted once, and the rule fills its slots from the ranks. ``select`` lifts both over the groups
of a step. What holds for every rule:

- A rollout is eligible when it is valid and its reward is finite: NaN and infinities are never kept.
- Indices are distinct. Slots that a rule leaves empty hold -1; a ranked rule with fewer than m eligible rollouts keeps them
  all, and its empty slots are at the end.
- The order among equal rewards is random under the key (``ties="random"``), so that the order in which completions end never
  biases the choice, or by rollout index (``ties="index"``).
- ``m``, ``ties`` and ``sort`` are static. There is no host loop and no ``[N, M]`` array in memory.
- Rewards are compared as float32. The choice is the same on every backend and with every ``sort``, which says how the pairs of
  a reward and a tie-break are put in order: what is fast on one is slow on another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped, UInt32

from pods_jax.algorithm.masked import usable
from pods_jax.lookup import bind, lookup
from pods_jax.types import Group

Pairs = tuple[Int[Array, "N"], UInt32[Array, "N"]]
Sort = Callable[[Int[Array, "N"], UInt32[Array, "N"]], Pairs]
# The int32 above those of every float32, +inf included, and the mask of all bits but the sign.
LAST = 0x7FFFFFFF


def sort_pairs(high_N: Int[Array, "N"], low_N: UInt32[Array, "N"]) -> Pairs:
    """Sorts pairs of an int32 and a uint32, no two of them equal, by one sort of two operands."""
    high_N, low_N = jax.lax.sort((high_N, low_N), num_keys=2, is_stable=False)
    return high_N, low_N


def sort_joined(high_N: Int[Array, "N"], low_N: UInt32[Array, "N"]) -> Pairs:
    """The same by one 64-bit integer a pair.

    XLA's CPU backend sorts one array of integers by native code, which is several times faster than its sorts that call a
    comparison, and its stable sort is faster than its unstable one.
    """
    with jax.enable_x64(True):
        joined_N = (high_N.astype(jnp.int64) << 32) | low_N.astype(jnp.int64)
        joined_N = jax.lax.sort(joined_N, is_stable=True)
        return (joined_N >> 32).astype(jnp.int32), joined_N.astype(jnp.uint32)


def sort_by_backend(high_N: Int[Array, "N"], low_N: UInt32[Array, "N"]) -> Pairs:
    """The same by what is fastest on the backend that the program is compiled for."""
    return jax.lax.platform_dependent(high_N, low_N, cpu=sort_joined, default=sort_pairs)


def take_by_gather(value_N: Shaped[Array, "N *rest"], index_M: Int[Array, "M"]) -> Shaped[Array, "M *rest"]:
    """``value_N[index_M]``."""
    return value_N[index_M]


def take_by_comparison(value_N: Shaped[Array, "N"], index_M: Int[Array, "M"]) -> Shaped[Array, "M"]:
    """The same by a comparison of every slot with every index, summed at once: a TPU gathers numbers one at a time."""
    chosen_MN = index_M[:, None] == _slots(value_N.size)[None, :]
    return jnp.sum(jnp.where(chosen_MN, value_N[None, :], 0), axis=1, dtype=value_N.dtype)


def take_by_backend(value_N: Shaped[Array, "N"], index_M: Int[Array, "M"]) -> Shaped[Array, "M"]:
    """The same by what is fastest on the backend that the program is compiled for."""
    return jax.lax.platform_dependent(value_N, index_M, tpu=take_by_comparison, default=take_by_gather)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ranks:
    """One group in ascending order of a value.

    Attributes:
        value_N: The values as float32; those of ineligible rollouts come last, and mean nothing.
        index_N: The rollout at each rank, int32.
        count: Number of eligible rollouts.
    """

    value_N: Float[Array, "N"]
    index_N: Int[Array, "N"]
    count: Int[Array, ""]


@dataclass(frozen=True)
class Ranked:
    """A rule on a sorted group.

    Attributes:
        slots: ``slots(ranks, *, m) -> index_M``; slots beyond the number of eligible rollouts are emptied afterwards.
        value: What the group is sorted by.
        ties: Entry of ``TIES`` that the rule needs, whatever the caller asks for; None takes the caller's.
        whole: The rule has n slots whatever m is.
    """

    slots: Callable[..., Int[Array, "M"]]
    value: Callable[[Group], Float[Array, "N"]] = lambda group: group.rewards_N
    ties: str | None = None
    whole: bool = False


Rule = Ranked | Callable[..., Int[Array, "M"]]


def max_variance(ranks: Ranks, *, m: int) -> Int[Array, "M"]:
    """The m rollouts whose rewards have the largest variance: the rule of PODS.

    An optimal set consists of the k highest and the m-k lowest rewards for some k. Let slot j hold either the j-th of the m
    lowest (``low_j``) or the j-th of the m highest (``high_j``), both ascending; split k takes ``high`` in the last k slots.
    Moving slot j from low to high, with S the sum of the m rewards before the move, changes m times the variance by

        (high_j - low_j) * gain_j / m,    gain_j = m (low_j + high_j) - (2 S + high_j - low_j).

    ``gain`` never rises from one split to the next: the variance climbs and then falls with k, so the best split has as many
    high slots as there are positive gains. That scores all m+1 splits from prefix sums of the rewards alone. No square is
    taken, and the lowest reward is subtracted first, so no offset cancels digits: a group at 1e4 ± 1e-3 and any group of small
    integers are solved exactly in float32.

    For binary rewards with c correct, floor(m/2) are kept correct, or as near as c and n-c allow. Groups with equal rewards
    yield a uniformly random subset under ``ties="random"``. Under ``ties="index"``, rollouts of equal reward count as
    ascending in their index: the low end takes the first of them and the high end the last.

    Args:
        ranks: The group in ascending order of reward.
        m: Rollouts to keep.

    Returns:
        Distinct int32 indices in ascending order of reward.

    Reference:
        Max-variance down-sampling in "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning",
        arXiv 2504.13818, where the form of the optimal set is proved.
    """
    above_N = jnp.where(_slots(ranks.value_N.size) < ranks.count, ranks.value_N - ranks.value_N[:1], 0)
    first_high = jnp.maximum(ranks.count - m, 0)
    low_M, high_M = above_N[:m], _window(above_N, first_high, m)
    split = m - high_slots(low_M, high_M)
    return jnp.where(_slots(m) < split, ranks.index_N[:m], _window(ranks.index_N, first_high, m))


def high_slots(low_M: Float[Array, "M"], high_M: Float[Array, "M"]) -> Int[Array, ""]:
    """How many of the m slots take the high reward for the largest variance; see ``max_variance``."""
    # S of every slot: low up to the slot, high beyond it.
    sum_M = jnp.sum(high_M) + jax.lax.associative_scan(jnp.add, low_M - high_M)
    gain_M = low_M.size * (low_M + high_M) - (2 * sum_M + high_M - low_M)
    return jnp.sum(gain_M > 0)


def percentile(ranks: Ranks, *, m: int) -> Int[Array, "M"]:
    """Rollouts spread evenly over the ranks: slot j holds the quantile (j + 1/2) / m of the eligible rewards.

    That is rank ``floor((j + 1/2) * count / m)`` in ascending order, which is the median for m=1.
    """
    parts = jnp.clip(ranks.count, 1, m)
    rank_M = (2 * _slots(m) + 1) * ranks.count // (2 * parts)
    return take_by_backend(ranks.index_N, jnp.minimum(rank_M, ranks.index_N.size - 1))


def first_ranks(ranks: Ranks, *, m: int) -> Int[Array, "M"]:
    """The m lowest of what the group is sorted by."""
    return ranks.index_N[:m]


def every_rank(ranks: Ranks, *, m: int) -> Int[Array, "N"]:
    """All eligible rollouts, whatever m says; the result has n slots."""
    del m
    return ranks.index_N


def _nothing(group: Group) -> Float[Array, "N"]:
    return jnp.zeros_like(group.rewards_N)


RULES: dict[str, Rule] = {
    "max_variance": Ranked(max_variance),
    "random": Ranked(first_ranks, value=_nothing, ties="random"),
    "percentile": Ranked(percentile),
    "max_reward": Ranked(first_ranks, value=lambda group: -group.rewards_N),
    "all": Ranked(every_rank, value=_nothing, ties="index", whole=True),
}
"""Rules by name: PODS, a uniformly random subset, evenly spaced ranks, the best first, and plain GRPO, which keeps all."""

# Each gives distinct uint32 with the index in the low bits.
TIES: dict[str, Callable[[PRNGKeyArray, int], UInt32[Array, "N"]]] = {
    "random": lambda key, n: _random_ties(key, n),
    "index": lambda key, n: _slots(n).astype(jnp.uint32),
}


def find_rule(name: str, options: Sequence[str] = ()) -> Rule:
    """The entry of ``RULES``, or an own ``module:function``, with the numbers of ``selection.options``.

    Raises:
        ValueError: There is no such rule, or it has no such number.
    """
    rule = lookup(RULES, name, "selection.rule", own=(Ranked,), takes=("group", "key", "m="))
    numbers = partial(bind, options=options, key="selection.options", passed=("m",))
    return replace(rule, slots=numbers(rule.slots)) if isinstance(rule, Ranked) else numbers(rule)


def select(
    groups: Group,
    key: PRNGKeyArray,
    *,
    rule: Rule,
    m: int,
    ties: str = "random",
    sort: Sort = sort_by_backend,
) -> Int[Array, "P M"]:
    """Applies a rule to every group, each under its own key (``key`` folded with the group's number).

    Args:
        groups: The groups of a step, with a leading axis P.
        key: Folded from the run's seed and the step.
        rule: Entry of ``RULES``, or an own one.
        m: Rollouts to keep of each group; the rule "all" keeps n.
        ties: Entry of ``TIES``.
        sort: Sorts pairs of integers.

    Returns:
        The rollouts to keep, int32, -1 in empty slots.

    Raises:
        ValueError: ``ties`` is unknown, m is not in 1..n, or an own rule returns no m integers.
    """
    key_P = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(groups.rewards_N.shape[0]))
    return jax.vmap(partial(choose, rule=rule, m=m, ties=ties, sort=sort))(groups, key_P)


def choose(
    group: Group,
    key: PRNGKeyArray,
    *,
    rule: Rule,
    m: int,
    ties: str = "random",
    sort: Sort = sort_by_backend,
) -> Int[Array, "M"]:
    """Applies a rule to one group. Arguments, result and errors as in ``select``."""
    tie = lookup(TIES, ties, "selection.ties")
    n, eligible_N = group.rewards_N.size, usable(group.rewards_N, group.valid_N)
    m = n if isinstance(rule, Ranked) and rule.whole else m
    if not 1 <= m <= n:
        raise ValueError(f"n={n} rollouts cannot supply m={m}: m must be between 1 and n")
    if isinstance(rule, Ranked):
        tie_N = (tie if rule.ties is None else TIES[rule.ties])(key, n)
        ranks = _ascending(rule.value(group), eligible_N, tie_N, sort)
        index_M = rule.slots(ranks, m=m)
        return jnp.where(_slots(index_M.size) < ranks.count, index_M, -1)
    index_M = jnp.asarray(rule(replace(group, valid_N=eligible_N), key, m=m))
    if index_M.shape != (m,) or not jnp.issubdtype(index_M.dtype, jnp.integer):
        raise ValueError(f"the selection rule returned {index_M.dtype} of shape {index_M.shape}; expected {m} integers")
    return _only_eligible(index_M.astype(jnp.int32), eligible_N)


def take_kept(values_PN: Shaped[Array, "P N *rest"], index_PM: Int[Array, "P M"]) -> Shaped[Array, "P M *rest"]:
    """Gathers along N within each group; an empty slot reads rollout 0, so mask by ``index_PM >= 0`` or give it weight 0."""
    take = take_by_backend if values_PN.ndim == 2 else take_by_gather
    return jax.vmap(take)(values_PN, jnp.maximum(index_PM, 0))


def _ascending(value_N: Float[Array, "N"], eligible_N: Bool[Array, "N"], tie_N: UInt32[Array, "N"], sort: Sort) -> Ranks:
    """The ranks of a group.

    A value becomes the integer of the same order, its index the low bits of a second integer that breaks ties: no two pairs
    are equal, so every way of sorting them gives the same answer on every backend, and the index needs no third operand.
    """
    rank_N = jnp.where(eligible_N, _ordered_bits(value_N.astype(jnp.float32)), LAST)
    rank_N, tie_N = sort(rank_N, tie_N)
    index_N = (tie_N & _index_mask(value_N.size)).astype(jnp.int32)
    return Ranks(_float_of(rank_N), index_N, jnp.sum(eligible_N))


def _only_eligible(index_M: Int[Array, "M"], eligible_N: Bool[Array, "N"]) -> Int[Array, "M"]:
    """Empties the slots of an own rule that hold no eligible rollout, or one that an earlier slot holds."""
    n = eligible_N.size
    inside_M = (index_M >= 0) & (index_M < n) & eligible_N[jnp.clip(index_M, 0, n - 1)]
    earlier_MM = (index_M[:, None] == index_M[None, :]) & (_slots(index_M.size)[:, None] > _slots(index_M.size)[None, :])
    return jnp.where(inside_M & ~earlier_MM.any(axis=1), index_M, -1)


def _ordered_bits(x: Float[Array, "N"]) -> Int[Array, "N"]:
    """The int32 that compare as the float32 do; -0.0 is 0.0. ``_float_of`` is the inverse."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.int32)
    return bits ^ ((bits >> 31) & LAST)


def _float_of(ordered: Int[Array, "N"]) -> Float[Array, "N"]:
    return jax.lax.bitcast_convert_type(ordered ^ ((ordered >> 31) & LAST), jnp.float32)


def _index_mask(n: int) -> int:
    """The low bits that hold an index below n."""
    return (1 << (n - 1).bit_length()) - 1


def _random_ties(key: PRNGKeyArray, n: int) -> UInt32[Array, "n"]:
    """Random bits above the index. Two of them are equal, and the index decides, with a chance of n / 2**31 at most.

    Two random words a group, spread over its indices by the finaliser of MurmurHash3, in which every bit of the input flips
    each bit of the output in half of the cases. A generator's number for each rollout would cost as much as the sort.
    """
    start, flip = jax.random.bits(key, (2,))
    x = start + _slots(n).astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    x = x ^ (x >> 16) ^ flip
    return (x & jnp.uint32(0xFFFFFFFF - _index_mask(n))) | _slots(n).astype(jnp.uint32)


def _window(value_N: Shaped[Array, "N"], start: Int[Array, ""], size: int) -> Shaped[Array, "M"]:
    """``value_N[start : start + size]`` by moves of falling powers of two, each leaving what the smaller ones can still reach.

    Under vmap a dynamic slice turns into a gather; these stay slices and selects.
    """
    bits = (value_N.size - size).bit_length()
    value_N = jnp.pad(value_N, (0, (1 << bits) - 1 + size - value_N.size))
    for step in (1 << bit for bit in reversed(range(bits))):
        value_N = jnp.where((start & step) > 0, value_N[step:], value_N[:-step])
    return value_N


def _slots(size: int) -> Int[Array, "size"]:
    return jnp.arange(size, dtype=jnp.int32)
