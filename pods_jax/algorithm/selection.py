"""Which m of a prompt's n rollouts are trained: between the rewards and the advantages of a step.

A rule sees one group, ``rule(rewards_N, valid_N, key, *, m, ties) -> index_M``; ``select`` lifts it over the groups of a step.
What holds for every rule of ``RULES``:

- A rollout is eligible when it is valid and its reward is finite: NaN and infinities are never kept.
- Indices are distinct. With fewer than m eligible rollouts all are kept, and the remaining slots, at the end, hold -1.
- Order among equal rewards is random under the key (``ties="random"``), so that the order in which completions end never
  biases the choice, or by rollout index (``ties="index"``).
- ``m`` and ``ties`` are static. There is no host loop and no ``[N, M]`` intermediate.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from pods_jax.algorithm.masked import masked_variance, usable
from pods_jax.types import Selection

Rule = Callable[..., Int[Array, "M"]]


def max_variance(
    rewards_N: Float[Array, "N"], valid_N: Bool[Array, "N"], key: PRNGKeyArray, *, m: int, ties: str = "random"
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
    reward_N, index_N = _ascending(rewards_N, eligible_N, key, m=m, ties=ties)
    above_N = jnp.where(_slots(reward_N.size) < count, reward_N - reward_N[:1], 0)
    first_high = jnp.maximum(count - m, 0)
    low_M, high_M = above_N[:m], _window(above_N, first_high, m)
    sum_M = jnp.cumsum(low_M) + jax.lax.cumsum(high_M, reverse=True) - high_M
    gain_M = m * (low_M + high_M) - (2 * sum_M + high_M - low_M)
    high_slots = jnp.sum(gain_M > 0)
    chosen_M = jnp.where(_slots(m) < m - high_slots, index_N[:m], _window(index_N, first_high, m))
    return _empty_beyond(chosen_M, count)


def percentile(
    rewards_N: Float[Array, "N"], valid_N: Bool[Array, "N"], key: PRNGKeyArray, *, m: int, ties: str = "random"
) -> Int[Array, "M"]:
    """Rollouts spread evenly over the ranks: slot j holds the quantile (j + 1/2) / m of the eligible rewards.

    That is rank ``floor((j + 1/2) * count / m)`` in ascending order, which is the median for m=1. Arguments, result and errors
    as in ``max_variance``.
    """
    eligible_N = usable(rewards_N, valid_N)
    count = jnp.sum(eligible_N)
    _, index_N = _ascending(rewards_N, eligible_N, key, m=m, ties=ties)
    parts = jnp.clip(count, 1, m)
    rank_M = (2 * _slots(m) + 1) * count // (2 * parts)
    return _empty_beyond(index_N[jnp.minimum(rank_M, index_N.size - 1)], count)


def max_reward(
    rewards_N: Float[Array, "N"], valid_N: Bool[Array, "N"], key: PRNGKeyArray, *, m: int, ties: str = "random"
) -> Int[Array, "M"]:
    """The m highest rewards, best first. Arguments, result and errors as in ``max_variance``."""
    eligible_N = usable(rewards_N, valid_N)
    _, index_N = _ascending(-rewards_N, eligible_N, key, m=m, ties=ties)
    return _empty_beyond(index_N[:m], jnp.sum(eligible_N))


def random(
    rewards_N: Float[Array, "N"], valid_N: Bool[Array, "N"], key: PRNGKeyArray, *, m: int, ties: str = "random"
) -> Int[Array, "M"]:
    """A uniformly random subset of the eligible rollouts, in random order, whatever ``ties`` says.

    Arguments, result and errors as in ``max_variance``.
    """
    _lookup(TIES, ties, "ties")
    eligible_N = usable(rewards_N, valid_N)
    _, index_N = _ascending(jnp.zeros_like(rewards_N), eligible_N, key, m=m, ties="random")
    return _empty_beyond(index_N[:m], jnp.sum(eligible_N))


def every(
    rewards_N: Float[Array, "N"], valid_N: Bool[Array, "N"], key: PRNGKeyArray, *, m: int, ties: str = "random"
) -> Int[Array, "N"]:
    """All eligible rollouts by index, whatever m says: plain GRPO. The result has n slots; the empty ones are at the end."""
    _lookup(TIES, ties, "ties")
    eligible_N = usable(rewards_N, valid_N)
    n = rewards_N.size
    _, index_N = _ascending(jnp.zeros_like(rewards_N), eligible_N, key, m=n, ties="index")
    return _empty_beyond(index_N, jnp.sum(eligible_N))


RULES: dict[str, Rule] = {
    "max_variance": max_variance,
    "random": random,
    "percentile": percentile,
    "max_reward": max_reward,
    "all": every,
}

TIES: dict[str, Callable[[PRNGKeyArray, int], Array]] = {
    "random": lambda key, n: jax.random.bits(key, (n,)),
    "index": lambda key, n: _slots(n),
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
) -> Selection:
    """Applies a rule to every group, each under its own key (``key`` folded with the group's number).

    Args:
        rewards_PN: Rewards.
        valid_PN: False for a rollout without a score.
        key: Folded from the run's seed and the step.
        rule: Entry of ``RULES``.
        m: Rollouts to keep of each group; the rule "all" keeps n.
        ties: "random" or "index".

    Returns:
        The indices, and the population variance (divisor: count) of each group's eligible and kept rewards.

    Raises:
        ValueError: Unknown rule or ``ties``, or m not in 1..n.
    """
    choose = partial(lookup_rule(rule), m=m, ties=ties)
    key_P = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(rewards_PN.shape[0]))
    index_PM = jax.vmap(choose)(rewards_PN, valid_PN, key_P)
    return Selection(
        index_PM=index_PM,
        variance_all_P=masked_variance(rewards_PN, usable(rewards_PN, valid_PN)),
        variance_kept_P=masked_variance(take_kept(rewards_PN, index_PM), index_PM >= 0),
    )


def take_kept(values_PN: Shaped[Array, "P N *rest"], index_PM: Int[Array, "P M"]) -> Shaped[Array, "P M *rest"]:
    """Gathers along N within each group; an empty slot reads rollout 0, so mask by ``index_PM >= 0`` or give it weight 0."""
    return jax.vmap(lambda values_N, index_M: values_N[jnp.maximum(index_M, 0)])(values_PN, index_PM)


def _ascending(
    value_N: Float[Array, "N"], eligible_N: Bool[Array, "N"], key: PRNGKeyArray, *, m: int, ties: str
) -> tuple[Float[Array, "N"], Int[Array, "N"]]:
    """Values and their int32 indices in ascending order, ineligible ones last, as +inf."""
    n = value_N.size
    if not 1 <= m <= n:
        raise ValueError(f"n={n} rollouts cannot supply m={m}: m must be between 1 and n")
    tie_N = _lookup(TIES, ties, "ties")(key, n)
    at_least_float32_N = value_N.astype(jnp.promote_types(value_N.dtype, jnp.float32))
    operands = (jnp.where(eligible_N, at_least_float32_N, jnp.inf), tie_N, _slots(n))
    value_N, _, index_N = jax.lax.sort(operands, num_keys=2)
    return value_N, index_N


def _window(value_N: Shaped[Array, "N"], start: Int[Array, ""], size: int) -> Shaped[Array, "M"]:
    """``value_N[start : start + size]`` by shifts of powers of two.

    Under vmap a dynamic slice turns into a gather; these stay slices and selects.
    """
    for bit in range((value_N.size - size).bit_length()):
        value_N = jnp.where((start >> bit) & 1 == 1, jnp.roll(value_N, -(1 << bit)), value_N)
    return value_N[:size]


def _empty_beyond(index_M: Int[Array, "M"], count: Int[Array, ""]) -> Int[Array, "M"]:
    return jnp.where(_slots(index_M.size) < count, index_M, -1)


def _slots(size: int) -> Int[Array, "size"]:
    return jnp.arange(size, dtype=jnp.int32)


def _lookup(table: dict, name: str, what: str):
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}: the valid names are {', '.join(table)}")
    return table[name]
