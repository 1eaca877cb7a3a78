"""From the rewards of a step to the batch that is trained: selection, advantages, and what the groups look like."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from pods_jax.algorithm.advantages import normalise
from pods_jax.algorithm.masked import masked_mean, masked_variance, safe_divide
from pods_jax.algorithm.selection import select, take_kept
from pods_jax.types import KeptBatch, PromptBatch, Rollouts, Selection


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupMetrics:
    """What the rewards of a step look like, on the device, over all groups.

    ``parts_mean`` has one entry per reward part. Variances are means over groups.
    """

    reward_mean: Float[Array, ""]
    reward_std: Float[Array, ""]
    parts_mean: Float[Array, "parts"]
    variance_all: Float[Array, ""]
    variance_kept: Float[Array, ""]
    no_signal_fraction: Float[Array, ""]
    invalid_fraction: Float[Array, ""]
    kept_reward_mean: Float[Array, ""]
    mean_length: Float[Array, ""]
    truncated_fraction: Float[Array, ""]
    tokens_generated: Float[Array, ""]
    decode_padding_fraction: Float[Array, ""]


def make_keep(*, rule: str, m: int, ties: str, over: str, eps: float, skip_no_signal: bool = True):
    """Builds the jitted selection: ``keep(prompts, rollouts, rewards_PN, valid_PN, parts, key, steps=...)``.

    ``steps`` (static) cuts completions to a bucket that holds the longest of them. Returns the kept batch, the selection and
    ``GroupMetrics``. ``skip_no_signal`` gives the rollouts of a group whose kept rewards are equal weight 0.
    """
    keep = partial(_keep, rule=rule, m=m, ties=ties, over=over, eps=eps, skip_no_signal=skip_no_signal)
    return jax.jit(keep, static_argnames="steps")


def _keep(
    prompts: PromptBatch,
    rollouts: Rollouts,
    rewards_PN: Float[Array, "P N"],
    valid_PN: Bool[Array, "P N"],
    parts_PNR: Float[Array, "P N parts"],
    key: Key[Array, ""],
    *,
    steps: int,
    rule: str,
    m: int,
    ties: str,
    over: str,
    eps: float,
    skip_no_signal: bool,
) -> tuple[KeptBatch, Selection, GroupMetrics]:
    selection = select(rewards_PN, valid_PN, key, rule=rule, m=m, ties=ties)
    index_PM = selection.index_PM
    result = normalise(rewards_PN, valid_PN, index_PM, over=over, eps=eps)
    kept = KeptBatch(
        prompt_PL=prompts.tokens_PL,
        prompt_length_P=prompts.length_P,
        tokens_PMC=take_kept(rollouts.tokens_PNC[:, :, :steps], index_PM),
        length_PM=take_kept(rollouts.length_PN, index_PM),
        logp_old_PMC=take_kept(rollouts.logp_PNC[:, :, :steps], index_PM),
        advantage_PM=result.advantage_PM,
        weight_PM=((index_PM >= 0) & (result.signal_P[:, None] | (not skip_no_signal))).astype(jnp.float32),
    )
    return kept, selection, _group_metrics(rollouts, rewards_PN, valid_PN, parts_PNR, selection, result.signal_P)


def _group_metrics(
    rollouts: Rollouts,
    rewards_PN: Array,
    valid_PN: Array,
    parts_PNR: Array,
    selection: Selection,
    signal_P: Array,
) -> GroupMetrics:
    index_PM = selection.index_PM
    parts = parts_PNR.shape[-1]
    tokens = rollouts.length_PN.astype(jnp.float32).sum()
    valid_PNR = jnp.broadcast_to(valid_PN[..., None], parts_PNR.shape)
    return GroupMetrics(
        reward_mean=masked_mean(rewards_PN, valid_PN),
        reward_std=jnp.sqrt(masked_variance(rewards_PN.reshape(-1), valid_PN.reshape(-1), ddof=1)),
        parts_mean=masked_mean(parts_PNR.reshape(-1, parts), valid_PNR.reshape(-1, parts), axis=0),
        variance_all=selection.variance_all_P.mean(),
        variance_kept=selection.variance_kept_P.mean(),
        no_signal_fraction=1.0 - signal_P.mean(),
        invalid_fraction=1.0 - valid_PN.mean(),
        kept_reward_mean=masked_mean(take_kept(rewards_PN, index_PM), index_PM >= 0),
        mean_length=rollouts.length_PN.astype(jnp.float32).mean(),
        truncated_fraction=1.0 - rollouts.finished_PN.mean(),
        tokens_generated=tokens,
        # A rollout's first token comes from its prompt; each further one takes a row of one decode step.
        decode_padding_fraction=safe_divide(rollouts.decoded_rows - (tokens - rollouts.length_PN.size), rollouts.decoded_rows),
    )
