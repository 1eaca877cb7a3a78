"""How the kept rewards of a group become advantages: between the selection and the loss of a step.

An advantage sees one group, ``advantage(rewards_N, valid_N, index_M, *, eps) -> (advantage_M, signal)``: one number for each
kept rollout, and whether the group teaches anything at all. ``group_advantage`` makes sure that what every entry must hold
does hold: advantages are exactly 0 in empty slots and throughout a group without signal.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pods_jax.algorithm.masked import masked_centre, masked_variance, usable
from pods_jax.lookup import bind, lookup

Advantage = Callable[..., tuple[Float[Array, "M"], Bool[Array, ""]]]


def over_kept(
    rewards_N: Float[Array, "N"], valid_N: Bool[Array, "N"], index_M: Int[Array, "M"], *, eps: float = 1e-4
) -> tuple[Float[Array, "M"], Bool[Array, ""]]:
    """Standardises over the kept rollouts, which is the choice of the PODS paper.

        A_i = (r_i - mean(r)) / (std(r) + eps)

    The standard deviation is the sample's (divisor: count - 1).

    Args:
        rewards_N: Rewards of the group.
        valid_N: False for a rollout without a score.
        index_M: Kept rollouts, -1 in empty slots.
        eps: Added to the standard deviation.

    Returns:
        Advantages, and whether the group has signal: whether its kept rewards differ.

    Reference:
        "DeepSeekMath", arXiv 2402.03300, section 4.1.2 (outcome supervision); over the kept rollouts: PODS, arXiv 2504.13818.
    """
    kept_M, filled_M = rewards_N[jnp.maximum(index_M, 0)], index_M >= 0
    signal, std = rewards_differ(rewards_N, index_M), jnp.sqrt(masked_variance(kept_M, filled_M, ddof=1))
    return masked_centre(kept_M, filled_M) / jnp.where(signal, std + eps, 1), signal


def over_all(
    rewards_N: Float[Array, "N"], valid_N: Bool[Array, "N"], index_M: Int[Array, "M"], *, eps: float = 1e-4
) -> tuple[Float[Array, "M"], Bool[Array, ""]]:
    """Standardises over all rollouts of the group that have a score; signal is judged on the kept, as in ``over_kept``."""
    eligible_N = usable(rewards_N, valid_N)
    signal, std = rewards_differ(rewards_N, index_M), jnp.sqrt(masked_variance(rewards_N, eligible_N, ddof=1))
    deviation_N = masked_centre(rewards_N, eligible_N)
    return deviation_N[jnp.maximum(index_M, 0)] / jnp.where(signal, std + eps, 1), signal


ADVANTAGES: dict[str, Advantage] = {"kept": over_kept, "all": over_all}
"""Advantages by what their mean and standard deviation are taken over."""


def find_advantage(name: str, options: Sequence[str] = ()) -> Advantage:
    """The entry of ``ADVANTAGES``, or an own ``module:function``, with the numbers of ``advantage.options``.

    Raises:
        ValueError: There is no such advantage, or it has no such number.
    """
    takes = ("rewards_N", "valid_N", "index_M", "eps=")
    return bind(lookup(ADVANTAGES, name, "advantage.over", own=(), takes=takes), options, "advantage.options", passed=("eps",))


def rewards_differ(rewards_N: Float[Array, "N"], index_M: Int[Array, "M"]) -> Bool[Array, ""]:
    """Whether the kept rewards are not all exactly equal, as a single one always is."""
    kept_M, filled_M = rewards_N[jnp.maximum(index_M, 0)], index_M >= 0
    highest = jnp.max(kept_M, where=filled_M, initial=-jnp.inf)
    return highest > jnp.min(kept_M, where=filled_M, initial=jnp.inf)


def group_advantage(
    rewards_N: Float[Array, "N"], valid_N: Bool[Array, "N"], index_M: Int[Array, "M"], *, advantage: Advantage, eps: float
) -> tuple[Float[Array, "M"], Bool[Array, ""]]:
    """Advantages of one group, exactly 0 in empty slots and without signal; the arguments are those of ``over_kept``."""
    advantage_M, signal = advantage(rewards_N, valid_N, index_M, eps=eps)
    return jnp.where((index_M >= 0) & signal, advantage_M, 0), signal


def normalise(
    rewards_PN: Float[Array, "P N"],
    valid_PN: Bool[Array, "P N"],
    index_PM: Int[Array, "P M"],
    *,
    advantage: Advantage,
    eps: float,
) -> tuple[Float[Array, "P M"], Bool[Array, "P"]]:
    """``group_advantage`` of every group of a step."""
    return jax.vmap(partial(group_advantage, advantage=advantage, eps=eps))(rewards_PN, valid_PN, index_PM)
