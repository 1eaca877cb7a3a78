"""The policy-gradient objective of a step, in a form that micro-batches add up to exactly.

A loss is a sum over tokens divided by a number that depends on the whole step. The caller asks the entry's ``normaliser`` once,
over every sequence of the step, and passes it to ``value`` for each micro-batch: the values, gradients and statistics of the
micro-batches then add up to those of the whole, however the sequences were cut.

Every entry of ``LOSSES`` has the same signature. Tokens beyond a sequence's length, and sequences of weight 0, touch no value,
gradient or statistic, whatever they hold; a step without tokens has loss 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pods_jax.algorithm.masked import length_mask, safe_divide


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossStats:
    """Sums over the trained tokens, which ``+`` joins over micro-batches; divide by ``tokens`` for means.

    Attributes:
        tokens: Trained tokens.
        clipped_low: Tokens whose gradient the lower bound stops: negative advantage, ratio below 1 - clip_low.
        clipped_high: Tokens whose gradient the upper bound stops: positive advantage, ratio above 1 + clip_high.
        ratio_deviation: Sum of |ratio - 1|.
        logp_gap: Sum of |logp - logp_old|, in nats: in the first update the gap between the rollout engine and the learner.
        logp_gap_max: Largest |logp - logp_old|, joined by the maximum.
        kl: Sum of the k3 estimates towards the reference policy, in nats; 0 when beta is 0.
    """

    tokens: Float[Array, ""]
    clipped_low: Float[Array, ""]
    clipped_high: Float[Array, ""]
    ratio_deviation: Float[Array, ""]
    logp_gap: Float[Array, ""]
    logp_gap_max: Float[Array, ""]
    kl: Float[Array, ""]

    @classmethod
    def zero(cls) -> "LossStats":
        """The statistics of no tokens: where adding up starts."""
        return cls(**{field.name: jnp.zeros((), jnp.float32) for field in fields(cls)})

    def __add__(self, other: "LossStats") -> "LossStats":
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return LossStats(**{**sums, "logp_gap_max": jnp.maximum(self.logp_gap_max, other.logp_gap_max)})


@dataclass(frozen=True)
class Loss:
    """One objective.

    Attributes:
        normaliser: ``(length_PM, weight_PM) -> scalar`` over all sequences of the step.
        value: ``(logp_PMC, logp_old_PMC, advantage_PM, length_PM, weight_PM, *, normaliser, clip_low, clip_high, beta,
            logp_ref_PMC=None) -> (scalar, LossStats)`` over any part of the step; see ``clipped_policy_loss``.
    """

    normaliser: Callable[[Int[Array, "P M"], Float[Array, "P M"]], Float[Array, ""]]
    value: Callable[..., tuple[Float[Array, ""], LossStats]]


def count_sequences(length_PM: Int[Array, "P M"], weight_PM: Float[Array, "P M"]) -> Float[Array, ""]:
    """Weights of the sequences that have tokens, summed."""
    return jnp.sum(jnp.where(length_PM > 0, weight_PM, 0))


def count_tokens(length_PM: Int[Array, "P M"], weight_PM: Float[Array, "P M"]) -> Float[Array, ""]:
    """Weights of the tokens, summed."""
    return jnp.sum(weight_PM * length_PM)


def clipped_policy_loss(
    logp_PMC: Float[Array, "P M C"],
    logp_old_PMC: Float[Array, "P M C"],
    advantage_PM: Float[Array, "P M"],
    length_PM: Int[Array, "P M"],
    weight_PM: Float[Array, "P M"],
    *,
    normaliser: Float[Array, ""],
    clip_low: float,
    clip_high: float,
    beta: float,
    logp_ref_PMC: Float[Array, "P M C"] | None = None,
    mean_over_sequence: bool,
) -> tuple[Float[Array, ""], LossStats]:
    """Clipped policy-gradient loss with an optional KL penalty.

        loss = -1/Z sum_i w_i/|o_i| sum_t [ min(rho A_i, clip(rho, 1 - clip_low, 1 + clip_high) A_i) - beta k3 ]
        rho  = exp(logp - logp_old),    k3 = exp(logp_ref - logp) - (logp_ref - logp) - 1

    over sequences i and their tokens t, with Z the ``normaliser``; without ``mean_over_sequence`` the 1/|o_i| is dropped.

    Args:
        logp_PMC: Log-probabilities of the sampled tokens under the policy being trained, in nats; the gradient flows here.
        logp_old_PMC: The same as recorded while generating.
        advantage_PM: One advantage per sequence.
        length_PM: Completion tokens, EOS included.
        weight_PM: 1 for a sequence that is trained, 0 for an empty slot or a group without signal.
        normaliser: The entry's ``normaliser`` over the whole step; 0 gives loss 0.
        clip_low: The ratio is clipped below at 1 - clip_low.
        clip_high: The ratio is clipped above at 1 + clip_high.
        beta: Weight of the KL penalty, a Python number; at 0 the term is not computed.
        logp_ref_PMC: Log-probabilities under the reference policy; needed when beta is positive.
        mean_over_sequence: Average within a sequence first, or weigh all tokens alike.

    Returns:
        This part's share of the loss, and its statistics.

    Raises:
        ValueError: beta is positive and ``logp_ref_PMC`` is missing.

    Reference:
        GRPO: "DeepSeekMath", arXiv 2402.03300, equations 3 and 4. k3: J. Schulman, "Approximating KL Divergence",
        http://joschu.net/blog/kl-approx.html. Two clip bounds and the mean over tokens:
        "DAPO", arXiv 2503.14476, sections 3.1 and 3.3.
    """
    mask_PMC = length_mask(length_PM, logp_PMC.shape[-1]) & (weight_PM > 0)[..., None]
    # Masked before anything is exponentiated: masking the result would leave NaN in the gradient.
    logp_PMC, logp_old_PMC = jnp.where(mask_PMC, logp_PMC, 0), jnp.where(mask_PMC, logp_old_PMC, 0)
    advantage_PM1 = jnp.where(weight_PM > 0, advantage_PM, 0)[..., None]
    ratio_PMC = jnp.exp(logp_PMC - logp_old_PMC)
    bounded_PMC = jnp.clip(ratio_PMC, 1 - clip_low, 1 + clip_high)
    objective_PMC = jnp.minimum(ratio_PMC * advantage_PM1, bounded_PMC * advantage_PM1)
    kl_PMC = _k3(logp_PMC, logp_ref_PMC, mask_PMC, beta)
    if kl_PMC is not None:
        objective_PMC -= beta * kl_PMC
    sequence_PM = jnp.sum(jnp.where(mask_PMC, objective_PMC, 0), axis=-1)
    if mean_over_sequence:
        sequence_PM = safe_divide(sequence_PM, length_PM)
    loss = -safe_divide(jnp.sum(weight_PM * sequence_PM), normaliser)
    clipped_low_PMC = (advantage_PM1 < 0) & (ratio_PMC < 1 - clip_low)
    clipped_high_PMC = (advantage_PM1 > 0) & (ratio_PMC > 1 + clip_high)
    gap_PMC = jnp.abs(logp_PMC - logp_old_PMC)
    stats = LossStats(
        tokens=_total(mask_PMC),
        clipped_low=_total(clipped_low_PMC),
        clipped_high=_total(clipped_high_PMC),
        ratio_deviation=_total(jnp.abs(ratio_PMC - 1)),
        logp_gap=_total(gap_PMC),
        logp_gap_max=jnp.max(gap_PMC, initial=0),
        kl=jnp.zeros((), jnp.float32) if kl_PMC is None else _total(kl_PMC),
    )
    return loss, jax.lax.stop_gradient(stats)


LOSSES: dict[str, Loss] = {
    "grpo": Loss(count_sequences, partial(clipped_policy_loss, mean_over_sequence=True)),
    "dapo": Loss(count_tokens, partial(clipped_policy_loss, mean_over_sequence=False)),
}


def lookup_loss(name: str) -> Loss:
    """The entry of ``LOSSES``; raises ValueError with the valid names."""
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}: the valid names are {', '.join(LOSSES)}")
    return LOSSES[name]


def _k3(
    logp_PMC: Float[Array, "P M C"],
    logp_ref_PMC: Float[Array, "P M C"] | None,
    mask_PMC: Bool[Array, "P M C"],
    beta: float,
) -> Float[Array, "P M C"] | None:
    if beta == 0:
        return None
    if logp_ref_PMC is None:
        raise ValueError(f"beta={beta} needs the reference policy's log-probabilities, and logp_ref_PMC is None")
    difference_PMC = jnp.where(mask_PMC, logp_ref_PMC, 0) - logp_PMC
    return jnp.expm1(difference_PMC) - difference_PMC


def _total(x: Array) -> Float[Array, ""]:
    return jnp.sum(x, dtype=jnp.float32)
