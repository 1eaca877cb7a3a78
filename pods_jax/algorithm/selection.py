"""Which m of a prompt's n rollouts are trained: between the rewards and the advantages of a step.

A rule sees one group, ``rule(rewards_N, valid_N, key, *, m, ties) -> index_M``; ``select`` lifts it over the groups of a step.
What holds for every rule of ``RULES``:

- A rollout is eligible when it is valid and its reward is finite: NaN and infinities are never kept.
- Indices are distinct. With fewer than m eligible rollouts all are kept, and the remaining slots, at the end, hold -1.
- Order among equal rewards is random under the key (``ties="random"``), so that the order in which completions end never
  biases the choice, or by rollout index (``ties="index"``).
- ``m``, ``ties`` and ``sort`` are static. There is no host loop and no ``[N, M]`` array in memory.
- Rewards are compared as float32. The choice is the same on every backend and with every ``sort``, which says how the pairs of
  a reward and a tie-break are put in order: what is fast is slow elsewhere.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped, UInt32

from pods_jax.algorithm.masked import masked_variance, usable
from pods_jax.types import Selection

Rule = Callable[..., Int[Array, "M"]]
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


def max_variance(
    rewards_N: Float[Array, "N"],
    valid_N: Bool[Array, "N"],
    key: PRNGKeyArray,
    *,
    m: int,
    ties: str = "random",
    sort: Sort = sort_by_backend,
) -> Int[Array, "M"]:
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
        rewards_N: Rewards, in any unit.
        valid_N: False for a rollout without a score.
        key: Breaks ties.
        m: Rollouts to keep, 1 to n.
        ties: "random" or "index".
        sort: Sorts pairs of integers.

    Returns:
        Distinct int32 indices in ascending order of reward, -1 in empty slots.

    Raises:
        ValueError: m is not in 1..n, or ``ties`` is unknown.

    Reference:
        Max-variance down-sampling in "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning",
        arXiv 2504.13818, where the form of the optimal set is proved.
    """
    eligible_N = usable(rewards_N, valid_N)
    count = jnp.sum(eligible_N)
    reward_N, index_N = _ascending(rewards_N, eligible_N, key, m=m, ties=ties, sort=sort)
    above_N = jnp.where(_slots(reward_N.size) < count, reward_N - reward_N[:1], 0)
    first_high = jnp.maximum(count - m, 0)
    low_M, high_M = above_N[:m], _window(above_N, first_high, m)
    chosen_M = jnp.where(_slots(m) < m - high_slots(low_M, high_M), index_N[:m], _window(index_N, first_high, m))
    return _empty_beyond(chosen_M, count)


def high_slots(low_M: Float[Array, "M"], high_M: Float[Array, "M"]) -> Int[Array, ""]:
    """How many of the m slots take the high reward for the largest variance; see ``max_variance``."""
    # S of every slot: low up to the slot, high beyond it.
    sum_M = jnp.sum(high_M) + jax.lax.associative_scan(jnp.add, low_M - high_M)
    gain_M = low_M.size * (low_M + high_M) - (2 * sum_M + high_M - low_M)
    return jnp.sum(gain_M > 0)


def percentile(
    rewards_N: Float[Array, "N"],
    valid_N: Bool[Array, "N"],
    key: PRNGKeyArray,
    *,
    m: int,
    ties: str = "random",
    sort: Sort = sort_by_backend,
) -> Int[Array, "M"]:
    """Rollouts spread evenly over the ranks: slot j holds the quantile (j + 1/2) / m of the eligible rewards.

    That is rank ``floor((j + 1/2) * count / m)`` in ascending order, which is the median for m=1. Arguments, result and errors
    as in ``max_variance``.
    """
    eligible_N = usable(rewards_N, valid_N)
    count = jnp.sum(eligible_N)
    _, index_N = _ascending(rewards_N, eligible_N, key, m=m, ties=ties, sort=sort)
    parts = jnp.clip(count, 1, m)
    rank_M = (2 * _slots(m) + 1) * count // (2 * parts)
    return _empty_beyond(take_by_backend(index_N, jnp.minimum(rank_M, index_N.size - 1)), count)


def max_reward(
    rewards_N: Float[Array, "N"],
    valid_N: Bool[Array, "N"],
    key: PRNGKeyArray,
    *,
    m: int,
    ties: str = "random",
    sort: Sort = sort_by_backend,
) -> Int[Array, "M"]:
    """The m highest rewards, best first. Arguments, result and errors as in ``max_variance``."""
    eligible_N = usable(rewards_N, valid_N)
    _, index_N = _ascending(-rewards_N, eligible_N, key, m=m, ties=ties, sort=sort)
    return _empty_beyond(index_N[:m], jnp.sum(eligible_N))


def random(
    rewards_N: Float[Array, "N"],
    valid_N: Bool[Array, "N"],
    key: PRNGKeyArray,
    *,
    m: int,
    ties: str = "random",
    sort: Sort = sort_by_backend,
) -> Int[Array, "M"]:
    """A uniformly random subset of the eligible rollouts, in random order, whatever ``ties`` says.

    Arguments, result and errors as in ``max_variance``.
    """
    _lookup(TIES, ties, "ties")
    eligible_N = usable(rewards_N, valid_N)
    _, index_N = _ascending(jnp.zeros_like(rewards_N), eligible_N, key, m=m, ties="random", sort=sort)
    return _empty_beyond(index_N[:m], jnp.sum(eligible_N))


def every(
    rewards_N: Float[Array, "N"],
    valid_N: Bool[Array, "N"],
    key: PRNGKeyArray,
    *,
    m: int,
    ties: str = "random",
    sort: Sort = sort_by_backend,
) -> Int[Array, "N"]:
    """All eligible rollouts by index, whatever m says: plain GRPO. The result has n slots; the empty ones are at the end."""
    _lookup(TIES, ties, "ties")
    eligible_N = usable(rewards_N, valid_N)
    n = rewards_N.size
    _, index_N = _ascending(jnp.zeros_like(rewards_N), eligible_N, key, m=n, ties="index", sort=sort)
    return _empty_beyond(index_N, jnp.sum(eligible_N))


RULES: dict[str, Rule] = {
    "max_variance": max_variance,
    "random": random,
    "percentile": percentile,
    "max_reward": max_reward,
    "all": every,
}

# Each gives distinct uint32 with the index in the low bits.
TIES: dict[str, Callable[[PRNGKeyArray, int], UInt32[Array, "N"]]] = {
    "random": lambda key, n: _random_ties(key, n),
    "index": lambda key, n: _slots(n).astype(jnp.uint32),
}


def lookup_rule(name: str) -> Rule:
    """The entry of ``RULES``; raises ValueError with the valid names."""
    return _lookup(RULES, name, "selection rule")


def select(
    rewards_PN: Float[Array, "P N"],
    valid_PN: Bool[Array, "P N"],
    key: PRNGKeyArray,
    *,
    rule: str,
    m: int,
    ties: str = "random",
    sort: Sort = sort_by_backend,
) -> Selection:
    """Applies a rule to every group, each under its own key (``key`` folded with the group's number).

    Args:
        rewards_PN: Rewards.
        valid_PN: False for a rollout without a score.
        key: Folded from the run's seed and the step.
        rule: Entry of ``RULES``.
        m: Rollouts to keep of each group; the rule "all" keeps n.
        ties: "random" or "index".
        sort: Sorts pairs of integers.

    Returns:
        The indices, and the population variance (divisor: count) of each group's eligible and kept rewards.

    Raises:
        ValueError: Unknown rule or ``ties``, or m not in 1..n.
    """
    choose = partial(lookup_rule(rule), m=m, ties=ties, sort=sort)
    key_P = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(rewards_PN.shape[0]))
    index_PM = jax.vmap(choose)(rewards_PN, valid_PN, key_P)
    return Selection(
        index_PM=index_PM,
        variance_all_P=masked_variance(rewards_PN, usable(rewards_PN, valid_PN)),
        variance_kept_P=masked_variance(take_kept(rewards_PN, index_PM), index_PM >= 0),
    )


def take_kept(values_PN: Shaped[Array, "P N *rest"], index_PM: Int[Array, "P M"]) -> Shaped[Array, "P M *rest"]:
    """Gathers along N within each group; an empty slot reads rollout 0, so mask by ``index_PM >= 0`` or give it weight 0."""
    take = take_by_backend if values_PN.ndim == 2 else take_by_gather
    return jax.vmap(take)(values_PN, jnp.maximum(index_PM, 0))


def _ascending(
    value_N: Float[Array, "N"], eligible_N: Bool[Array, "N"], key: PRNGKeyArray, *, m: int, ties: str, sort: Sort
) -> tuple[Float[Array, "N"], Int[Array, "N"]]:
    """Values as float32 and their int32 indices in ascending order, ineligible ones last, where the values mean nothing.

    A value becomes the integer of the same order, its index the low bits of a second integer that breaks ties: no two pairs
    are equal, so every way of sorting them gives the same answer on every backend, and the index needs no third operand.
    """
    n = value_N.size
    if not 1 <= m <= n:
        raise ValueError(f"n={n} rollouts cannot supply m={m}: m must be between 1 and n")
    tie_N = _lookup(TIES, ties, "ties")(key, n)
    rank_N = jnp.where(eligible_N, _ordered_bits(value_N.astype(jnp.float32)), LAST)
    rank_N, tie_N = sort(rank_N, tie_N)
    return _float_of(rank_N), (tie_N & _index_mask(n)).astype(jnp.int32)


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


def _empty_beyond(index_M: Int[Array, "M"], count: Int[Array, ""]) -> Int[Array, "M"]:
    return jnp.where(_slots(index_M.size) < count, index_M, -1)


def _slots(size: int) -> Int[Array, "size"]:
    return jnp.arange(size, dtype=jnp.int32)


def _lookup(table: dict, name: str, what: str):
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}: the valid names are {', '.join(table)}")
    return table[name]
