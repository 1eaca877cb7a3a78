from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pods_jax.algorithm.advantages import ADVANTAGES
from pods_jax.algorithm.keeping import keep, make_keep
from pods_jax.algorithm.selection import RULES
from pods_jax.types import PromptBatch, Rollouts


def rollouts_of(prompts, n, steps, seed=0):
    rng = np.random.default_rng(seed)
    return Rollouts(
        tokens_PNC=jnp.asarray(rng.integers(0, 99, (prompts, n, steps)), jnp.int32),
        logp_PNC=jnp.asarray(-rng.random((prompts, n, steps)), jnp.float32),
        length_PN=jnp.asarray(rng.integers(1, steps + 1, (prompts, n)), jnp.int32),
        finished_PN=jnp.asarray(rng.random((prompts, n)) < 0.6),
        decoded_rows=jnp.float32(2 * prompts * n * steps),
    )


def kept_of(rewards, valid, *, m=3, length=11, over="kept", ties="index", rule="max_variance"):
    rewards_PN, valid_PN = np.asarray(rewards, np.float32), np.asarray(valid, bool)
    prompts, n = rewards_PN.shape
    rollouts = rollouts_of(prompts, n, 11)
    parts = {"correct": rewards_PN, "format": 2 * rewards_PN}
    batch = PromptBatch(jnp.arange(prompts * 7, dtype=jnp.int32).reshape(prompts, 7), jnp.full(prompts, 5, jnp.int32))
    keep = make_keep(rule=RULES[rule], m=m, ties=ties, advantage=ADVANTAGES[over], eps=1e-4)
    arguments = (batch, rollouts, rewards_PN, parts, valid_PN, jax.random.key(0))
    kept, metrics = keep(*arguments, completion_length=length)
    return batch, rollouts, kept, metrics


REWARDS = [[0, 1, 2, 5, 9], [3, 3, 3, 3, 3], [1, 0, 1, 7, 2]]
VALID = [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 1, 0, 0]]


def test_keeping_gathers_each_kept_rollout_whole():
    batch, rollouts, kept, _ = kept_of(REWARDS, VALID)
    index = np.asarray(kept.index_PM)
    assert set(index[0]) == {0, 1, 4}
    assert list(index[2]) in ([0, 2, -1], [2, 0, -1])
    for p, m in zip(*np.nonzero(index >= 0), strict=True):
        np.testing.assert_array_equal(kept.tokens_PMC[p, m], rollouts.tokens_PNC[p, index[p, m]])
        np.testing.assert_array_equal(kept.logp_old_PMC[p, m], rollouts.logp_PNC[p, index[p, m]])
        assert kept.length_PM[p, m] == rollouts.length_PN[p, index[p, m]]
    np.testing.assert_array_equal(kept.prompt_PL, batch.tokens_PL)
    np.testing.assert_array_equal(kept.prompt_length_P, batch.length_P)


def test_only_kept_rollouts_of_groups_with_signal_have_weight_and_advantage():
    _, _, kept, metrics = kept_of(REWARDS, VALID)
    # Group 1 is all equal, and the two valid rollouts of group 2 are equal too.
    np.testing.assert_array_equal(kept.weight_PM, [[1, 1, 1], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(kept.advantage_PM[1:], 0)
    chosen = np.asarray(REWARDS[0], np.float64)[np.asarray(kept.index_PM[0])]
    np.testing.assert_allclose(kept.advantage_PM[0], (chosen - chosen.mean()) / (chosen.std(ddof=1) + 1e-4), rtol=1e-5)
    np.testing.assert_allclose(metrics["selection/no_signal_fraction"], 2 / 3, rtol=1e-6)


def test_an_empty_slot_has_no_weight_beside_kept_rollouts():
    _, _, kept, _ = kept_of([[4, 1, 2, 3, 0]], [[1, 0, 1, 0, 0]])
    assert list(kept.index_PM[0]) == [2, 0, -1]
    np.testing.assert_array_equal(kept.weight_PM, [[1, 1, 0]])
    assert kept.advantage_PM[0, 2] == 0


def test_completions_are_cut_to_the_bucket_that_is_asked():
    _, rollouts, kept, _ = kept_of(REWARDS, VALID, length=8)
    assert kept.tokens_PMC.shape == kept.logp_old_PMC.shape == (3, 3, 8)
    np.testing.assert_array_equal(kept.tokens_PMC[0, 0], rollouts.tokens_PNC[0, kept.index_PM[0, 0], :8])


def test_group_metrics_equal_numpy_over_valid_rollouts():
    _, rollouts, kept, metrics = kept_of(REWARDS, VALID)
    rewards, valid = np.asarray(REWARDS, np.float64), np.asarray(VALID, bool)
    scored = rewards[valid]
    chosen = [rewards[p][[i for i in kept.index_PM[p].tolist() if i >= 0]] for p in range(3)]
    expected = {
        "reward/mean": scored.mean(),
        "reward/std": scored.std(ddof=1),
        "reward/correct/mean": scored.mean(),
        "reward/format/mean": 2 * scored.mean(),
        "selection/empty_fraction": 1 / 9,
        "selection/variance_all": np.mean([rewards[p][valid[p]].var() for p in range(3)]),
        "selection/variance_kept": np.mean([of_group.var() for of_group in chosen]),
        "reward/invalid_fraction": 3 / 15,
        "reward/kept_mean": np.concatenate(chosen).mean(),
        "completions/mean_length": np.mean(rollouts.length_PN),
        "completions/truncated_fraction": 1 - np.mean(rollouts.finished_PN),
        "tokens/generated": np.sum(rollouts.length_PN),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    assert metrics["selection/variance_kept"] > metrics["selection/variance_all"]


def test_the_rule_all_keeps_every_valid_rollout():
    _, _, kept, _ = kept_of(REWARDS, VALID, rule="all", m=5)
    np.testing.assert_array_equal(kept.index_PM[0], np.arange(5))
    np.testing.assert_array_equal(kept.index_PM[2], [0, 2, -1, -1, -1])
    assert kept.tokens_PMC.shape == (3, 5, 11)


def test_a_rule_sees_rewards_parts_lengths_ends_and_what_the_engine_knows_of_each_rollout():
    seen = {}

    def watching(group, key, *, m):
        seen.update(logp=group.logp_N, entropy=group.entropy_N, length=group.length_N, finished=group.finished_N)
        seen.update(valid=group.valid_N, **group.parts)
        return jnp.argsort(group.logp_N)[:m]

    rewards, valid = jnp.asarray(REWARDS, jnp.float32), jnp.asarray(VALID, bool)
    rollouts = replace(rollouts_of(3, 5, 11), entropy_PN=jnp.arange(15.0).reshape(3, 5))
    batch = PromptBatch(jnp.zeros((3, 7), jnp.int32), jnp.full(3, 5, jnp.int32))
    numbers = {"rule": watching, "m": 3, "ties": "index", "advantage": ADVANTAGES["kept"], "eps": 1e-4}
    kept = []
    with jax.disable_jit():
        for p in range(3):
            one = jax.tree.map(lambda x, p=p: x[p : p + 1] if x.ndim else x, (batch, rollouts, rewards, valid))
            parts = {"correct": 2 * one[2]}
            arguments = (one[0], one[1], one[2], parts, one[3], jax.random.key(0))
            kept.append(keep(*arguments, **numbers, skip_no_signal=True, completion_length=11)[0])
    length = np.asarray(rollouts.length_PN)
    inside = np.arange(11) < length[..., None]
    mean_logp = np.where(inside, rollouts.logp_PNC, 0).sum(-1) / length
    for p in range(3):
        lowest = np.argsort(mean_logp[p])[:3]
        np.testing.assert_array_equal(kept[p].index_PM[0], np.where(np.asarray(VALID)[p][lowest], lowest, -1))
    assert {name: x.shape for name, x in seen.items()} == dict.fromkeys(
        ("logp", "entropy", "length", "finished", "valid", "correct"), (5,)
    )
