"""The policy-gradient objective of a step, in a form that micro-batches add up to exactly.

A loss says what each token contributes, ``objective(tokens, numbers) -> (objective_PMC, {metric name: number of each token})``,
and how tokens are averaged. ``evaluate_loss`` does the rest, for every entry alike: tokens beyond a sequence's length, and
sequences of weight 0, touch no value, gradient or metric, whatever they hold; a step without tokens has loss 0; and the sum is
divided by a number of the whole step, so that values, gradients and metrics of micro-batches add up to those of the whole,
however the sequences were cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pods_jax.algorithm.masked import length_mask, safe_divide
from pods_jax.lookup import bind, lookup


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """What a loss sees of a part of the step: 0 wherever nothing is trained.

    Attributes:
        logp_PMC: Log-probabilities of the sampled tokens under the policy that is trained, in nats; with gradient.
        logp_old_PMC: The same as recorded while generating.
        entropy_PMC: Entropy of the policy at each token, in nats; with gradient where the loss asks for it.
        advantage_PM1: One advantage for each sequence.
        mask_PMC: True for a token that is trained.
        logp_ref_PMC: Log-probabilities under the reference policy; None when beta is 0.
    """

    logp_PMC: Float[Array, "P M C"]
    logp_old_PMC: Float[Array, "P M C"]
    entropy_PMC: Float[Array, "P M C"]
    advantage_PM1: Float[Array, "P M 1"]
    mask_PMC: Bool[Array, "P M C"]
    logp_ref_PMC: Float[Array, "P M C"] | None = None


@dataclass(frozen=True)
class Numbers:
    """Plain numbers of a loss, static in the compiled program.

    Attributes:
        clip_low: The probability ratio is clipped below at 1 - clip_low.
        clip_high: The probability ratio is clipped above at 1 + clip_high.
        beta: Weight of the KL penalty; at 0 there is no reference policy.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0


PerToken = dict[str, Float[Array, "P M C"]]
Objective = Callable[..., tuple[Float[Array, "P M C"], PerToken]]


@dataclass(frozen=True)
class Averaging:
    """How the tokens of a step are averaged.

    Attributes:
        over_sequence: ``(sum_PM, length_PM) -> [P, M]``: what a sequence counts for, from the sum over its tokens.
        normaliser: ``(length_PM, weight_PM) -> scalar``: what the weighted sum is divided by, over the whole step.
    """

    over_sequence: Callable[[Float[Array, "P M"], Int[Array, "P M"]], Float[Array, "P M"]]
    normaliser: Callable[[Int[Array, "P M"], Float[Array, "P M"]], Float[Array, ""]]


def count_sequences(length_PM: Int[Array, "P M"], weight_PM: Float[Array, "P M"]) -> Float[Array, ""]:
    """Weights of the sequences that have tokens, summed."""
    return jnp.sum(jnp.where(length_PM > 0, weight_PM, 0))


def count_tokens(length_PM: Int[Array, "P M"], weight_PM: Float[Array, "P M"]) -> Float[Array, ""]:
    """Weights of the tokens, summed."""
    return jnp.sum(weight_PM * length_PM)


OVER_SEQUENCES = Averaging(safe_divide, count_sequences)
"""Over each sequence's tokens, then over sequences."""
OVER_TOKENS = Averaging(lambda sum_PM, length_PM: sum_PM, count_tokens)
"""Over all tokens alike."""


@dataclass(frozen=True)
class Loss:
    """One objective; a bare function of the user's own becomes one with the defaults.

    Attributes:
        objective: ``(tokens, numbers, *, own=0.1, ...) -> (objective_PMC, {metric name: number})``, to be maximised. The
            metrics are logged as their mean over the trained tokens; one whose name ends in ``_max`` as the largest. Numbers
            of its own are keyword-only, and ``loss.options`` sets them.
        averaging: How its tokens are averaged.
        entropy_gradient: Whether the gradient flows through ``entropy_PMC``. False spares computing it.
    """

    objective: Objective
    averaging: Averaging = OVER_SEQUENCES
    entropy_gradient: bool = True


def clipped(tokens: Tokens, numbers: Numbers) -> tuple[Float[Array, "P M C"], PerToken]:
    """The clipped policy-gradient objective with an optional KL penalty.

        min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) - beta k3
        rho = exp(logp - logp_old),    k3 = exp(logp_ref - logp) - (logp_ref - logp) - 1

    Args:
        tokens: The tokens.
        numbers: Clip bounds, and beta; at beta 0 the KL term is not computed.

    Returns:
        The objective of each token, and whether the lower bound (negative advantage, ratio below 1 - clip_low) or the upper
        one (positive advantage, ratio above 1 + clip_high) stops its gradient; with a KL term also its k3, in nats.

    Raises:
        ValueError: beta is positive and there is no reference.

    Reference:
        GRPO: "DeepSeekMath", arXiv 2402.03300, equations 3 and 4. k3: J. Schulman, "Approximating KL Divergence",
        http://joschu.net/blog/kl-approx.html. Two clip bounds: "DAPO", arXiv 2503.14476, section 3.1.
    """
    ratio_PMC, advantage_PM1 = jnp.exp(tokens.logp_PMC - tokens.logp_old_PMC), tokens.advantage_PM1
    bounded_PMC = jnp.clip(ratio_PMC, 1 - numbers.clip_low, 1 + numbers.clip_high)
    objective_PMC = jnp.minimum(ratio_PMC * advantage_PM1, bounded_PMC * advantage_PM1)
    low_PMC = (advantage_PM1 < 0) & (ratio_PMC < 1 - numbers.clip_low)
    high_PMC = (advantage_PM1 > 0) & (ratio_PMC > 1 + numbers.clip_high)
    metrics = {
        "policy/clip_fraction": low_PMC | high_PMC,
        "policy/clip_low_fraction": low_PMC,
        "policy/clip_high_fraction": high_PMC,
    }
    if numbers.beta == 0:
        return objective_PMC, metrics
    if tokens.logp_ref_PMC is None:
        raise ValueError(f"beta={numbers.beta} needs the reference policy's log-probabilities, and logp_ref_PMC is None")
    difference_PMC = tokens.logp_ref_PMC - tokens.logp_PMC
    kl_PMC = jnp.expm1(difference_PMC) - difference_PMC
    return objective_PMC - numbers.beta * kl_PMC, metrics | {"policy/kl": kl_PMC}


def clipped_with_entropy(
    tokens: Tokens, numbers: Numbers, *, entropy_bonus: float = 0.01
) -> tuple[Float[Array, "P M C"], PerToken]:
    """The objective of ``clipped``, plus ``entropy_bonus`` times the policy's entropy at each token.

    Reference:
        "Asynchronous Methods for Deep Reinforcement Learning", arXiv 1602.01783, section 4 (A3C).
    """
    objective_PMC, metrics = clipped(tokens, numbers)
    return objective_PMC + entropy_bonus * tokens.entropy_PMC, metrics


LOSSES: dict[str, Loss] = {
    "grpo": Loss(clipped, OVER_SEQUENCES, entropy_gradient=False),
    "dapo": Loss(clipped, OVER_TOKENS, entropy_gradient=False),
    "grpo_entropy": Loss(clipped_with_entropy, OVER_SEQUENCES),
}
"""Losses by name: averaged over sequences as GRPO was published, over tokens ("DAPO", arXiv 2503.14476, section 3.3), and the
first with an entropy bonus."""


def find_loss(name: str, options: Sequence[str] = ()) -> Loss:
    """The entry of ``LOSSES``, or an own ``module:function``, with the numbers of ``loss.options``.

    Raises:
        ValueError: There is no such loss, or it has no such number.
    """
    found = lookup(LOSSES, name, "loss.name", own=(Loss,), takes=("tokens", "numbers"))
    loss = found if isinstance(found, Loss) else Loss(found)
    return replace(loss, objective=bind(loss.objective, options, "loss.options"))


def evaluate_loss(
    loss: Loss,
    numbers: Numbers,
    *,
    logp_PMC: Float[Array, "P M C"],
    logp_old_PMC: Float[Array, "P M C"],
    entropy_PMC: Float[Array, "P M C"],
    advantage_PM: Float[Array, "P M"],
    length_PM: Int[Array, "P M"],
    weight_PM: Float[Array, "P M"],
    normaliser: Float[Array, ""],
    logp_ref_PMC: Float[Array, "P M C"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of any part of a step, and its token metrics.

        loss = -1/Z sum_i w_i/|o_i| sum_t objective_it

    over sequences i and their tokens t, with w the weight and Z the ``normaliser``; averaged over tokens, without the 1/|o_i|.

    Args:
        loss: The entry.
        numbers: Its plain numbers.
        logp_PMC: Log-probabilities under the policy that is trained, in nats; the gradient flows here.
        logp_old_PMC: The same as recorded while generating.
        entropy_PMC: Entropy of the policy at each token, in nats.
        advantage_PM: One advantage for each sequence.
        length_PM: Completion tokens, the EOS token included.
        weight_PM: 1 for a sequence that is trained, 0 for an empty slot or a group without signal.
        normaliser: The averaging's ``normaliser`` over the whole step; 0 gives loss 0.
        logp_ref_PMC: Log-probabilities under the reference policy; needed when beta is positive.

    Returns:
        This part's share of the loss, and sums over the trained tokens by metric name, which ``join_sums`` adds up over parts
        and ``token_means`` divides. In the first update ``policy/logp_gap`` is the gap between rollout engine and learner.
    """
    mask_PMC = length_mask(length_PM, logp_PMC.shape[-1]) & (weight_PM > 0)[..., None]

    def only(x: Array) -> Array:
        # Masked before anything is exponentiated: masking the result would leave NaN in the gradient.
        return jnp.where(mask_PMC, x, 0)

    tokens = Tokens(
        logp_PMC=only(logp_PMC),
        logp_old_PMC=only(logp_old_PMC),
        entropy_PMC=only(entropy_PMC if loss.entropy_gradient else jax.lax.stop_gradient(entropy_PMC)),
        advantage_PM1=jnp.where(weight_PM > 0, advantage_PM, 0)[..., None],
        mask_PMC=mask_PMC,
        logp_ref_PMC=None if numbers.beta == 0 or logp_ref_PMC is None else only(logp_ref_PMC),
    )
    objective_PMC, per_token = loss.objective(tokens, numbers)
    sequence_PM = loss.averaging.over_sequence(jnp.sum(only(objective_PMC), axis=-1), length_PM)
    value = -safe_divide(jnp.sum(weight_PM * sequence_PM), normaliser)
    gap_PMC = tokens.logp_PMC - tokens.logp_old_PMC
    common = {
        "policy/entropy": tokens.entropy_PMC,
        "policy/ratio_deviation": jnp.abs(jnp.exp(gap_PMC) - 1),
        "policy/logp_gap": jnp.abs(gap_PMC),
        "policy/logp_gap_max": jnp.abs(gap_PMC),
        "tokens/trained": mask_PMC,
    }
    if clash := common.keys() & per_token.keys():
        raise ValueError(f"the loss returns the metric {min(clash)}, which every loss has")
    return value, jax.lax.stop_gradient({name: _reduce(name, x, mask_PMC) for name, x in (common | per_token).items()})


def join_sums(a: dict[str, Array], b: dict[str, Array]) -> dict[str, Array]:
    """The token sums of two parts of a step together."""
    return {name: jnp.maximum(a[name], b[name]) if _is_max(name) else a[name] + b[name] for name in a}


def zero_sums(loss: Loss, numbers: Numbers) -> dict[str, Array]:
    """The token sums of no tokens, where adding up starts."""
    one = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)
    tokens = dict.fromkeys(("logp_PMC", "logp_old_PMC", "entropy_PMC", "logp_ref_PMC"), one)
    sequences = dict.fromkeys(("advantage_PM", "weight_PM"), jax.ShapeDtypeStruct((1, 1), jnp.float32))
    length_PM, normaliser = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    arrays = {**tokens, **sequences, "length_PM": length_PM, "normaliser": normaliser}
    _, sums = jax.eval_shape(partial(evaluate_loss, loss, numbers), **arrays)
    return {name: jnp.float32(-jnp.inf if _is_max(name) else 0) for name in sums}


def token_means(sums: dict[str, Array]) -> dict[str, Array]:
    """Metrics from the token sums of the whole step: means over its tokens, but for their number and for maxima."""
    count = sums["tokens/trained"]
    whole = {name: x if name == "tokens/trained" or _is_max(name) else safe_divide(x, count) for name, x in sums.items()}
    return {name: jnp.where(count > 0, x, 0) for name, x in whole.items()}


def _reduce(name: str, x: Array, mask_PMC: Bool[Array, "P M C"]) -> Float[Array, ""]:
    x = jnp.where(mask_PMC, x, 0).astype(jnp.float32)
    return jnp.max(x, initial=-jnp.inf, where=mask_PMC) if _is_max(name) else jnp.sum(x)


def _is_max(name: str) -> bool:
    return name.endswith("_max")
