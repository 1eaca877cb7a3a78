"""From the rewards of a step to the batch that is trained: selection, then advantages, then a gather."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from pods_jax.algorithm.advantages import Advantage, normalise
from pods_jax.algorithm.masked import length_mask, masked_mean, masked_variance, safe_divide, usable
from pods_jax.algorithm.selection import Rule, select, take_kept
from pods_jax.types import Group, KeptBatch, PromptBatch, Rollouts


def make_keep(*, rule: Rule, m: int, ties: str, advantage: Advantage, eps: float, skip_no_signal: bool = True):
    """Compiles ``keep`` with its plain numbers; the arrays and ``completion_length`` are left to the call."""
    numbers = {"rule": rule, "m": m, "ties": ties, "advantage": advantage, "eps": eps, "skip_no_signal": skip_no_signal}
    return jax.jit(partial(keep, **numbers), static_argnames="completion_length")


def keep(
    prompts: PromptBatch,
    rollouts: Rollouts,
    rewards_PN: Float[Array, "P N"],
    parts: dict[str, Float[Array, "P N"]],
    valid_PN: Bool[Array, "P N"],
    key: Key[Array, ""],
    *,
    completion_length: int,
    rule: Rule,
    m: int,
    ties: str,
    advantage: Advantage,
    eps: float,
    skip_no_signal: bool,
) -> tuple[KeptBatch, dict[str, Float[Array, ""]]]:
    """Keeps m rollouts of every group.

    Args:
        prompts: Prompts of the step.
        rollouts: What was generated for them.
        rewards_PN: Total rewards.
        parts: Each reward's own unweighted scores by name.
        valid_PN: False for a rollout without a score.
        key: Breaks ties.
        completion_length: Padded length (C) of the kept completions, at least that of the longest; static.
        rule: Entry of ``RULES``, or an own one.
        m: Rollouts to keep of each group.
        ties: Entry of ``TIES``.
        advantage: Entry of ``ADVANTAGES``, or an own one.
        eps: Added to the standard deviation of the rewards.
        skip_no_signal: Give the rollouts of a group without signal weight 0.

    Returns:
        The kept batch, and the metrics of rewards, selection and completions; variances are means over groups.
    """
    groups = _groups(rollouts, rewards_PN, parts, valid_PN)
    index_PM = select(groups, key, rule=rule, m=m, ties=ties)
    advantage_PM, signal_P = normalise(rewards_PN, valid_PN, index_PM, advantage=advantage, eps=eps)
    kept = KeptBatch(
        prompt_PL=prompts.tokens_PL,
        prompt_length_P=prompts.length_P,
        tokens_PMC=take_kept(rollouts.tokens_PNC[:, :, :completion_length], index_PM),
        length_PM=take_kept(rollouts.length_PN, index_PM),
        logp_old_PMC=take_kept(rollouts.logp_PNC[:, :, :completion_length], index_PM),
        advantage_PM=advantage_PM,
        weight_PM=((index_PM >= 0) & (signal_P[:, None] | (not skip_no_signal))).astype(jnp.float32),
        index_PM=index_PM,
    )
    metrics = reward_metrics(groups, index_PM) | completion_metrics(rollouts)
    return kept, metrics | {"selection/no_signal_fraction": 1.0 - signal_P.mean()}


def reward_metrics(groups: Group, index_PM: Int[Array, "P M"]) -> dict[str, Float[Array, ""]]:
    """Metrics of the rewards of all groups (``[P, N]``) and of those that are kept."""
    rewards_PN, valid_PN = groups.rewards_N, groups.valid_N
    kept_PM, filled_PM = take_kept(rewards_PN, index_PM), index_PM >= 0
    return {
        "reward/mean": masked_mean(rewards_PN, valid_PN),
        "reward/std": jnp.sqrt(masked_variance(rewards_PN.reshape(-1), valid_PN.reshape(-1), ddof=1)),
        "reward/kept_mean": masked_mean(kept_PM, filled_PM),
        "reward/invalid_fraction": 1.0 - valid_PN.mean(),
        **{f"reward/{name}/mean": masked_mean(part_PN, valid_PN) for name, part_PN in groups.parts.items()},
        "selection/variance_all": masked_variance(rewards_PN, usable(rewards_PN, valid_PN)).mean(),
        "selection/variance_kept": masked_variance(kept_PM, filled_PM).mean(),
        "selection/empty_fraction": 1.0 - filled_PM.mean(),
    }


def completion_metrics(rollouts: Rollouts) -> dict[str, Float[Array, ""]]:
    """Metrics of what was generated."""
    length_PN = rollouts.length_PN.astype(jnp.float32)
    # A rollout's first token comes from its prompt; each further one takes a row of one decode step.
    decoded = length_PN.sum() - length_PN.size
    return {
        "completions/mean_length": length_PN.mean(),
        "completions/truncated_fraction": 1.0 - rollouts.finished_PN.mean(),
        "tokens/generated": length_PN.sum(),
        "rollout/padding_fraction": safe_divide(rollouts.decoded_rows - decoded, rollouts.decoded_rows),
    }


def _groups(rollouts: Rollouts, rewards_PN: Array, parts: dict[str, Array], valid_PN: Array) -> Group:
    """The record that rules see; what a rule does not read is not computed."""
    logp_PNC = rollouts.logp_PNC
    return Group(
        rewards_N=rewards_PN,
        valid_N=valid_PN,
        parts=parts,
        length_N=rollouts.length_PN,
        finished_N=rollouts.finished_PN,
        logp_N=masked_mean(logp_PNC, length_mask(rollouts.length_PN, logp_PNC.shape[-1]), axis=-1),
        entropy_N=rollouts.entropy_PN,
    )
