"""How the kept rewards of a group become advantages: between the selection and the loss of a step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pods_jax.algorithm.masked import masked_centre, masked_variance, usable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Advantages:
    """One advantage per kept rollout, and whether a group teaches anything at all.

    ``advantage_PM`` is 0 in empty slots and throughout groups without signal; ``signal_P`` is false for those groups.
    """

    advantage_PM: Float[Array, "P M"]
    signal_P: Bool[Array, "P"]


def over_kept(
    rewards_N: Float[Array, "N"], eligible_N: Bool[Array, "N"], index_M: Int[Array, "M"]
) -> tuple[Float[Array, "M"], Float[Array, ""]]:
    """Deviations from the mean of the kept rewards, and their sample standard deviation: the choice of the PODS paper."""
    kept_M, filled_M = rewards_N[jnp.maximum(index_M, 0)], index_M >= 0
    return masked_centre(kept_M, filled_M), jnp.sqrt(masked_variance(kept_M, filled_M, ddof=1))


def over_all(
    rewards_N: Float[Array, "N"], eligible_N: Bool[Array, "N"], index_M: Int[Array, "M"]
) -> tuple[Float[Array, "M"], Float[Array, ""]]:
    """Deviations from the mean of all eligible rewards of the group, and their sample standard deviation."""
    deviation_N = masked_centre(rewards_N, eligible_N)
    return deviation_N[jnp.maximum(index_M, 0)], jnp.sqrt(masked_variance(rewards_N, eligible_N, ddof=1))


ADVANTAGES: dict[str, Callable[..., tuple[Array, Array]]] = {"kept": over_kept, "all": over_all}


def lookup_advantage(name: str) -> Callable[..., tuple[Array, Array]]:
    """The entry of ``ADVANTAGES``; raises ValueError with the valid names."""
    if name not in ADVANTAGES:
        raise ValueError(f"unknown advantage statistics {name!r}: the valid names are {', '.join(ADVANTAGES)}")
    return ADVANTAGES[name]


def group_advantage(
    rewards_N: Float[Array, "N"],
    valid_N: Bool[Array, "N"],
    index_M: Int[Array, "M"],
    *,
    over: str = "kept",
    eps: float = 1e-4,
) -> tuple[Float[Array, "M"], Bool[Array, ""]]:
    """Advantages of one group's kept rollouts, and whether the group has signal.

        A_i = (r_i - mean(r)) / (std(r) + eps)

    The standard deviation is the sample's (divisor: count - 1). A group has no signal when its kept rewards are exactly equal,
    as a single one always is: its advantages are exactly 0. Signal is judged on the kept rewards whatever ``over`` says.

    Args:
        rewards_N: Rewards of the group.
        valid_N: False for a rollout without a score.
        index_M: Kept rollouts, -1 in empty slots.
        over: Entry of ``ADVANTAGES``: mean and deviation over the "kept" or over "all" eligible rollouts.
        eps: Added to the standard deviation.

    Returns:
        Advantages, 0 in empty slots, and a scalar bool.

    Raises:
        ValueError: ``over`` is unknown.

    Reference:
        "DeepSeekMath", arXiv 2402.03300, section 4.1.2 (outcome supervision); over the kept rollouts: PODS, arXiv 2504.13818.
    """
    filled_M = index_M >= 0
    kept_M = rewards_N[jnp.maximum(index_M, 0)]
    highest = jnp.max(kept_M, where=filled_M, initial=-jnp.inf)
    lowest = jnp.min(kept_M, where=filled_M, initial=jnp.inf)
    signal = highest > lowest
    deviation_M, std = lookup_advantage(over)(rewards_N, usable(rewards_N, valid_N), index_M)
    scale = jnp.where(signal, std + eps, 1)
    return jnp.where(filled_M & signal, deviation_M / scale, 0), signal


def normalise(
    rewards_PN: Float[Array, "P N"],
    valid_PN: Bool[Array, "P N"],
    index_PM: Int[Array, "P M"],
    *,
    over: str = "kept",
    eps: float = 1e-4,
) -> Advantages:
    """``group_advantage`` for every group of a step. Arguments and errors as there."""
    advantage_PM, signal_P = jax.vmap(partial(group_advantage, over=over, eps=eps))(rewards_PN, valid_PN, index_PM)
    return Advantages(advantage_PM=advantage_PM, signal_P=signal_P)
