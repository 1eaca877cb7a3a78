import math
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from pods_jax.algorithm.keeping import make_keep
from pods_jax.algorithm.losses import LOSSES
from pods_jax.config.entries import micro_batch_sizes
from pods_jax.devices.sharding import make_mesh, replicate
from pods_jax.models.decoder import Decoder
from pods_jax.models.spec import DecoderSpec
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.sampling import sampling_params
from pods_jax.types import KeptBatch, PromptBatch, Rollouts
from pods_jax.update.learner import Learner, UpdateSettings, init_state, join_micro_batches, split_micro_batches
from pods_jax.update.microbatches import plan_update

SPEC = DecoderSpec(vocab_size=13, width=12, layers=2, q_heads=4, kv_heads=2, head_size=6, feed_forward=10, qkv_bias=True)
P, M, L, C = 4, 6, 7, 5

# Moves nothing and keeps the gradient as its state: what an optimiser would have been given.
RECORD = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),  # type: ignore[arg-type]
)
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))


@pytest.fixture(autouse=True, scope="module")
def mesh():
    with jax.set_mesh(make_mesh((1, 1, 1), jax.devices()[:1])):
        yield


@cache
def decoder(remat=False):
    module = Decoder(SPEC, rngs=nnx.Rngs(0), remat=remat)
    return nnx.split(module)


def parameters():
    """Random parameters of a size that makes logits, norms and biases all matter."""
    _, state = decoder()
    shapes = nnx.to_pure_dict(state)
    leaves, structure = jax.tree.flatten(shapes)
    rng = np.random.default_rng(1)
    values = [rng.normal(0.4, 0.4, x.shape).astype(np.float32) for x in leaves]
    return replicate(jax.tree.unflatten(structure, values))


def batch(seed=0, *, prompts=P, beta=False):
    """A kept batch with every length, an empty slot, and tokens and numbers beyond the lengths that must not matter."""
    rng = np.random.default_rng(seed)
    length_PM = rng.integers(1, C + 1, (prompts, M))
    length_PM[0, 0], length_PM[0, 1] = 1, C
    weight_PM = np.ones((prompts, M), np.float32)
    weight_PM[-1, -1] = 0
    logp = rng.normal(-2.5, 0.6, (2, prompts, M, C)).astype(np.float32)
    return KeptBatch(
        prompt_PL=jnp.asarray(rng.integers(0, SPEC.vocab_size, (prompts, L)), jnp.int32),
        prompt_length_P=jnp.asarray(rng.integers(2, L + 1, prompts), jnp.int32),
        tokens_PMC=jnp.asarray(rng.integers(0, SPEC.vocab_size, (prompts, M, C)), jnp.int32),
        length_PM=jnp.asarray(length_PM, jnp.int32),
        logp_old_PMC=jnp.asarray(logp[0]),
        advantage_PM=jnp.asarray(rng.normal(0, 1, (prompts, M)), jnp.float32),
        weight_PM=jnp.asarray(weight_PM),
        logp_ref_PMC=jnp.asarray(logp[1]) if beta else None,
    )


@cache
def learner(optimizer=RECORD, loss="grpo", remat=False, **numbers):
    graph, _ = decoder(remat)
    return Learner(graph, optimizer, LOSSES[loss], UpdateSettings(**numbers))


def updated(kept, params=None, *, optimizer=RECORD, **choices):
    """The state and metrics after one update; with ``RECORD`` the optimiser state is the gradient."""
    state = init_state(jax.tree.map(jnp.copy, parameters() if params is None else params), optimizer=optimizer)
    return learner(optimizer, **choices).update(state, kept)


def assert_trees_close(actual, expected, **tolerance):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, err_msg=jax.tree_util.keystr(path), **tolerance)


def assert_trees_identical(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


# --- a reference in NumPy, float64: one sequence at a time, prompt and completion joined --------------------------------------


def reference_logits(params, tokens):
    """Logits at every position of one sequence without padding."""
    steps, group = len(tokens), SPEC.q_heads // SPEC.kv_heads
    half = SPEC.head_size // 2
    angles = np.arange(steps)[:, None] * SPEC.rope_theta ** (-np.arange(half) / half)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + SPEC.norm_eps) * scale

    def rotated(x):
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x = params["embed"][tokens]
    for i in range(SPEC.layers):
        w = {name: value[i] for name, value in params["layers"].items()}
        h = norm(x, w["input_norm"])
        q, k, v = (np.einsum("td,dnh->tnh", h, w[name]) + w[f"{name}_bias"] for name in "qkv")
        q, k, v = rotated(q), np.repeat(rotated(k), group, 1), np.repeat(v, group, 1)
        scores = np.einsum("tnh,snh->nts", q, k) / math.sqrt(SPEC.head_size)
        scores = np.where(np.tril(np.ones((steps, steps), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("nts,snh,nhd->td", weights, v, w["o"])
        h = norm(x, w["post_norm"])
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    return norm(x, params["final_norm"]) @ params["embed"].T


def reference_logp(params, kept, temperature):
    """Log-probability of each completion token and the entropy there; 0 beyond the length."""
    logp, entropy = np.zeros(kept.tokens_PMC.shape), np.zeros(kept.tokens_PMC.shape)
    for p, m in np.ndindex(*kept.length_PM.shape):
        prompt = np.asarray(kept.prompt_PL[p, : kept.prompt_length_P[p]])
        own = np.asarray(kept.tokens_PMC[p, m, : kept.length_PM[p, m]])
        logits = reference_logits(params, np.concatenate([prompt, own]))[len(prompt) - 1 : -1] / temperature
        logits -= logits.max(-1, keepdims=True)
        row = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        logp[p, m, : len(own)] = row[np.arange(len(own)), own]
        entropy[p, m, : len(own)] = -(np.exp(row) * row).sum(-1)
    return logp, entropy


def reference_loss(params, kept, *, name, temperature, clip_low, clip_high, beta):
    logp, _ = reference_logp(params, kept, temperature)
    total = count = 0.0
    for p, m in np.ndindex(*kept.length_PM.shape):
        if kept.weight_PM[p, m] == 0:
            continue
        length = int(kept.length_PM[p, m])
        new, old = logp[p, m, :length], np.asarray(kept.logp_old_PMC[p, m, :length], np.float64)
        ratio, advantage = np.exp(new - old), float(kept.advantage_PM[p, m])
        tokens = np.minimum(ratio * advantage, np.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)
        if beta:
            difference = np.asarray(kept.logp_ref_PMC[p, m, :length], np.float64) - new
            tokens = tokens - beta * (np.exp(difference) - difference - 1)
        total += tokens.mean() if name == "grpo" else tokens.sum()
        count += 1 if name == "grpo" else length
    return -total / count


@pytest.mark.parametrize(("loss", "beta", "temperature"), [("grpo", 0.0, 1.0), ("grpo", 0.3, 0.7), ("dapo", 0.0, 0.7)])
def test_loss_and_gradient_equal_a_float64_reference(loss, beta, temperature):
    kept, params = batch(beta=beta > 0), parameters()
    numbers = {"temperature": temperature, "beta": beta, "clip_low": 0.2, "clip_high": 0.3}
    state, metrics = updated(kept, loss=loss, **numbers)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def value(params):
        return reference_loss(params, kept, name=loss, **numbers)

    np.testing.assert_allclose(metrics.loss, value(exact), rtol=2e-5, atol=2e-6)
    assert metrics.clip_low_fraction > 0
    assert metrics.clip_high_fraction > 0
    leaves, structure = jax.tree.flatten(exact)
    rng = np.random.default_rng(2)
    for i, (path, gradient) in enumerate(jax.tree_util.tree_leaves_with_path(state.opt_state)):
        direction = rng.normal(size=gradient.shape)
        sides = []
        for step in (1e-6, -1e-6):
            moved = [leaf + step * direction if i == j else leaf for j, leaf in enumerate(leaves)]
            sides.append(value(jax.tree.unflatten(structure, moved)))
        slope = (sides[0] - sides[1]) / 2e-6
        along = np.sum(np.asarray(gradient, np.float64) * direction)
        scale = np.linalg.norm(gradient) * np.linalg.norm(direction) / math.sqrt(direction.size)
        assert abs(along - slope) < 1e-4 * scale, jax.tree_util.keystr(path)


def test_logged_means_equal_the_reference():
    kept = batch(beta=True)
    _, metrics = updated(kept, beta=0.3, temperature=0.7, clip_low=0.2, clip_high=0.3)
    logp, entropy = reference_logp(jax.tree.map(lambda x: np.asarray(x, np.float64), parameters()), kept, 0.7)
    trained = (np.arange(C) < np.asarray(kept.length_PM)[..., None]) & (np.asarray(kept.weight_PM) > 0)[..., None]
    gap = np.abs(logp - kept.logp_old_PMC)[trained]
    difference = (np.asarray(kept.logp_ref_PMC, np.float64) - logp)[trained]
    assert metrics.tokens == trained.sum()
    np.testing.assert_allclose(metrics.entropy, entropy[trained].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics.logp_gap, gap.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics.logp_gap_max, gap.max(), rtol=1e-5)
    np.testing.assert_allclose(metrics.kl, (np.expm1(difference) - difference).mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics.ratio_deviation, np.abs(np.expm1((logp - kept.logp_old_PMC)[trained])).mean(), rtol=1e-4)


# --- what must not change the gradient ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    return updated(batch(beta=True), beta=0.3)


@pytest.mark.parametrize(
    "choice",
    [
        {"micro_batch": 1},
        {"micro_batch": 4, "data_shards": 2, "chunk_logits": 1},
        {"micro_batch": 12, "chunk_logits": 2 * P * M * SPEC.vocab_size},
        {"remat": True},
    ],
    ids=lambda choice: " ".join(f"{name}={value}" for name, value in choice.items()),
)
def test_no_way_of_cutting_changes_loss_gradient_or_statistics(whole, choice):
    state, metrics = updated(batch(beta=True), beta=0.3, **choice)
    assert_trees_close(state.opt_state, whole[0].opt_state, rtol=1e-5, atol=2e-6)
    assert_trees_close(metrics, whole[1], rtol=1e-5, atol=1e-6)


def test_padding_and_what_lies_beyond_a_length_change_nothing(whole):
    kept, rng = batch(beta=True), np.random.default_rng(9)
    tokens = np.asarray(kept.tokens_PMC).copy()
    beyond = np.arange(C) >= np.asarray(kept.length_PM)[..., None]
    tokens[beyond] = rng.integers(0, SPEC.vocab_size, beyond.sum())
    prompt = np.where(np.arange(L) < np.asarray(kept.prompt_length_P)[:, None], kept.prompt_PL, 3)
    wide = ((0, 0), (0, 0), (0, 3))
    padded = replace(
        kept,
        prompt_PL=jnp.pad(jnp.asarray(prompt), ((0, 0), (0, 9)), constant_values=5),
        tokens_PMC=jnp.pad(jnp.asarray(tokens), wide, constant_values=7),
        logp_old_PMC=jnp.pad(jnp.where(beyond, jnp.nan, kept.logp_old_PMC), wide, constant_values=jnp.inf),
        logp_ref_PMC=jnp.pad(jnp.where(beyond, -jnp.inf, jnp.asarray(kept.logp_ref_PMC)), wide, constant_values=jnp.nan),
    )
    state, metrics = updated(padded, beta=0.3)
    assert_trees_close(state.opt_state, whole[0].opt_state, rtol=1e-5, atol=2e-6)
    assert_trees_close(metrics, whole[1], rtol=1e-5, atol=1e-6)


def sliced(kept, groups):
    return jax.tree.map(lambda x: x[groups], kept)


def test_a_group_without_signal_contributes_nothing_even_with_a_kl_term():
    kept = batch(beta=True)
    silent = replace(kept, weight_PM=kept.weight_PM.at[1:].set(0), advantage_PM=kept.advantage_PM.at[1:].set(0))
    state, metrics = updated(silent, beta=0.3)
    alone, of_alone = updated(sliced(silent, slice(0, 1)), beta=0.3)
    assert metrics.kl > 0
    assert_trees_close(state.opt_state, alone.opt_state, rtol=1e-5, atol=2e-6)
    assert_trees_close(metrics, of_alone, rtol=1e-5, atol=1e-6)


# --- micro-batches ------------------------------------------------------------------------------------------------------------

CUTS = [
    (prompts, kept, shards, size)
    for prompts, kept, shards in [(4, 6, 1), (4, 6, 2), (6, 4, 3), (8, 1, 4), (1, 12, 1)]
    for size in [0, *micro_batch_sizes(prompts, kept, shards)]
]


@pytest.mark.parametrize(("prompts", "kept", "shards", "size"), CUTS)
def test_micro_batches_hold_every_rollout_once_with_its_own_prompt(prompts, kept, shards, size):
    number_PM = np.arange(prompts * kept).reshape(prompts, kept)
    tokens_PMC = np.stack([number_PM, number_PM + 1000, number_PM + 2000], -1)
    owner_P = np.arange(prompts)
    values: dict[str, Any] = {
        "prompt_PL": np.stack([owner_P, -owner_P], -1),
        "prompt_length_P": owner_P + 50,
        "tokens_PMC": tokens_PMC,
        "length_PM": number_PM + 7,
        "logp_old_PMC": tokens_PMC / 8,
        "advantage_PM": number_PM / 4,
        "weight_PM": number_PM / 2,
    }
    whole = KeptBatch(**values)
    names = ("tokens_PMC", "length_PM", "logp_old_PMC", "weight_PM")

    @jax.jit
    def there_and_back(whole):
        micro = split_micro_batches(whole, size, shards)
        return micro, [join_micro_batches(getattr(micro, name), (prompts, kept), shards) for name in names]

    micro, joined = jax.device_get(there_and_back(whole))
    blocks, groups, each = micro.length_PM.shape
    assert groups * each == (size or prompts * kept)
    assert blocks * groups * each == prompts * kept
    assert sorted(micro.tokens_PMC[..., 0].ravel()) == list(range(prompts * kept))
    owner = np.broadcast_to(micro.prompt_PL[..., :1], (blocks, groups, each))
    np.testing.assert_array_equal(micro.tokens_PMC[..., 0] // kept, owner)
    np.testing.assert_array_equal(micro.prompt_length_P, micro.prompt_PL[..., 0] + 50)
    np.testing.assert_array_equal(micro.length_PM, micro.tokens_PMC[..., 0] + 7)
    np.testing.assert_array_equal(micro.weight_PM, micro.advantage_PM * 2)
    assert micro.logp_ref_PMC is None
    # A shard keeps to its own groups: no rollout moves between devices.
    shard_of = micro.prompt_PL[..., 0] // (prompts // shards)
    np.testing.assert_array_equal(shard_of, np.broadcast_to(np.repeat(np.arange(shards), groups // shards), shard_of.shape))
    for name, again in zip(names, joined, strict=True):
        np.testing.assert_array_equal(again, getattr(whole, name))


@pytest.mark.parametrize("size", [5, 7, 9, 16, 48])
def test_an_impossible_micro_batch_is_refused_with_the_possible_ones(size):
    with pytest.raises(ValueError, match=rf"update.micro_batch={size} .* 4 groups of 6 .* possible are 2, 4, 6, 12, 24"):
        split_micro_batches(batch(), size, 2)


# --- plans --------------------------------------------------------------------------------------------------------------------


def planned(kept, *, shape, shards=1, tile=1, sizes=3):
    """The plan of a batch; two shards are blocks of groups on one device here."""
    length, weight = np.asarray(kept.length_PM), np.asarray(kept.weight_PM)
    plan = plan_update(length, weight, steps=C, prompt_length=50, shape=shape, shards=shards, tile=tile, sizes=sizes)
    return replicate(plan)


@pytest.mark.parametrize(
    ("loss", "shape", "shards", "sizes"),
    [("grpo", (4, 6), 1, 3), ("dapo", (2, 6), 1, 3), ("grpo", (1, 2), 2, 3), ("dapo", (2, 6), 2, 1), ("grpo", (1, 3), 1, 0)],
    ids=str,
)
def test_a_plan_changes_no_gradient(loss, shape, shards, sizes):
    kept = batch(beta=True)
    expected, of_expected = updated(kept, loss=loss, beta=0.3)
    state = init_state(parameters(), optimizer=RECORD)
    chosen = learner(RECORD, loss, beta=0.3, data_shards=shards)
    state, metrics = chosen.update(state, kept, None, planned(kept, shape=shape, shards=shards, sizes=sizes))
    assert_trees_close(state.opt_state, expected.opt_state, rtol=1e-5, atol=2e-6)
    assert_trees_close(metrics, of_expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 6), (1, 3)], ids=str)
def test_what_a_plan_leaves_out_has_no_gradient(shape):
    kept = batch()
    kept = replace(kept, weight_PM=kept.weight_PM.at[jnp.asarray([0, 2])].set(0))
    expected, of_expected = updated(kept)
    plan = planned(kept, shape=shape)
    assert plan.group_ISG.shape[0] * plan.group_ISG.shape[2] * shape[1] == (12 if shape[0] == 4 else 24)
    state, metrics = learner().update(init_state(parameters(), optimizer=RECORD), kept, None, plan)
    assert_trees_close(state.opt_state, expected.opt_state, rtol=1e-5, atol=2e-6)
    assert_trees_close(metrics, of_expected, rtol=1e-5, atol=1e-6)


def test_plans_of_one_size_share_one_program():
    fresh = Learner(decoder()[0], ADAMW, LOSSES["grpo"], UpdateSettings())
    state = init_state(parameters(), optimizer=ADAMW)
    for seed in range(6):
        kept = batch(seed)
        plan = replace(planned(kept, shape=(2, 6)), places=2 * M * C)
        state, metrics = fresh.update(state, kept, None, plan)
        assert metrics.taken == 1
    assert fresh.compiled_programs() == 1


# --- the optimiser step -------------------------------------------------------------------------------------------------------


def test_a_step_moves_the_parameters_and_frees_the_old_state():
    state = init_state(parameters(), optimizer=ADAMW)
    moved, metrics = learner(ADAMW).update(state, batch())
    assert int(moved.updates) == 1
    assert metrics.taken == metrics.finite == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    for before, after in zip(jax.tree.leaves(parameters()), jax.tree.leaves(moved.params), strict=True):
        assert np.any(before != after)


def test_a_step_without_signal_leaves_every_bit_of_the_state():
    kept = batch(beta=True)
    silent = replace(kept, weight_PM=jnp.zeros_like(kept.weight_PM))
    moved, _ = updated(kept, optimizer=ADAMW, beta=0.3)
    before = jax.tree.map(np.array, moved)
    after, metrics = learner(ADAMW, beta=0.3).update(moved, silent)
    assert_trees_identical(after, before)
    assert int(after.updates) == 1
    assert (metrics.taken, metrics.finite, metrics.loss, metrics.grad_norm, metrics.tokens) == (0, 1, 0, 0, 0)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_reported(broken):
    kept = batch()
    moved, _ = updated(kept, optimizer=ADAMW)
    before = jax.tree.map(np.array, moved)
    bad = replace(kept, advantage_PM=kept.advantage_PM.at[1, 2].set(broken))
    after, metrics = learner(ADAMW).update(moved, bad)
    assert_trees_identical(after, before)
    assert (metrics.taken, metrics.finite) == (0, 0)
    healthy, metrics = learner(ADAMW).update(after, kept)
    assert metrics.taken == 1
    assert int(healthy.updates) == 2


def test_steps_of_one_shape_share_one_program():
    fresh = Learner(decoder()[0], ADAMW, LOSSES["grpo"], UpdateSettings())
    state = init_state(parameters(), optimizer=ADAMW)
    state, _ = fresh.update(state, batch(0))
    programs = fresh.compiled_programs()
    for seed in range(1, 4):
        state, _ = fresh.update(state, batch(seed))
    assert fresh.compiled_programs() == programs == 1
    assert int(state.updates) == 4


def test_the_reference_costs_nothing_at_the_start_and_pulls_back_later():
    kept = batch()
    update = learner(ADAMW, beta=0.3)
    kept = update.with_reference(parameters(), kept)
    logp, _ = reference_logp(jax.tree.map(lambda x: np.asarray(x, np.float64), parameters()), kept, 1.0)
    inside = np.arange(C) < np.asarray(kept.length_PM)[..., None]
    np.testing.assert_allclose(np.asarray(kept.logp_ref_PMC)[inside], logp[inside], rtol=1e-5, atol=1e-5)
    state = init_state(parameters(), optimizer=ADAMW)
    state, first = update.update(state, kept)
    assert 0 <= first.kl < 1e-9
    _, second = update.update(state, kept)
    assert second.kl > 1e-5


def test_reference_logp_is_the_same_however_it_is_cut():
    kept = batch()
    whole = learner(beta=0.3).logp(parameters(), kept)
    cut = learner(beta=0.3, micro_batch=4, data_shards=2).logp(parameters(), kept)
    np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-5)


# --- with the rollout engine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    return RolloutEngine(decoder()[0], rollouts=M, max_completion_length=9, chunk=4, eos_ids=[2, 5])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_first_on_policy_update_has_ratio_one(engine, temperature):
    prompts = PromptBatch(batch().prompt_PL, batch().prompt_length_P)
    params = jax.tree.map(lambda x: 0.5 * x, parameters())
    rollouts = engine(params, prompts, jax.random.key(3), sampling_params(temperature=temperature))
    lengths = np.asarray(rollouts.length_PN)
    assert lengths.min() < lengths.max()
    kept = replace(
        batch(),
        tokens_PMC=rollouts.tokens_PNC,
        length_PM=rollouts.length_PN,
        logp_old_PMC=rollouts.logp_PNC,
        weight_PM=jnp.ones((P, M)),
    )
    state, metrics = updated(kept, params, optimizer=ADAMW, temperature=temperature)
    assert metrics.tokens == lengths.sum()
    assert metrics.ratio_deviation < 2e-6
    assert metrics.logp_gap < 2e-6
    assert metrics.clip_low_fraction == metrics.clip_high_fraction == 0
    _, again = learner(ADAMW, temperature=temperature).update(state, kept)
    assert again.ratio_deviation > 1e-3


# --- keeping ------------------------------------------------------------------------------------------------------------------


def rollouts_of(prompts, n, steps, seed=0):
    rng = np.random.default_rng(seed)
    return Rollouts(
        tokens_PNC=jnp.asarray(rng.integers(0, 99, (prompts, n, steps)), jnp.int32),
        logp_PNC=jnp.asarray(-rng.random((prompts, n, steps)), jnp.float32),
        length_PN=jnp.asarray(rng.integers(1, steps + 1, (prompts, n)), jnp.int32),
        finished_PN=jnp.asarray(rng.random((prompts, n)) < 0.6),
        decoded_rows=jnp.float32(2 * prompts * n * steps),
    )


def kept_of(rewards, valid, *, m=3, steps=11, over="kept", ties="index", rule="max_variance"):
    rewards_PN, valid_PN = np.asarray(rewards, np.float32), np.asarray(valid, bool)
    prompts, n = rewards_PN.shape
    rollouts = rollouts_of(prompts, n, 11)
    parts = np.stack([rewards_PN, 2 * rewards_PN], -1)
    batch = PromptBatch(jnp.arange(prompts * 7, dtype=jnp.int32).reshape(prompts, 7), jnp.full(prompts, 5, jnp.int32))
    keep = make_keep(rule=rule, m=m, ties=ties, over=over, eps=1e-4)
    kept, selection, groups = keep(batch, rollouts, rewards_PN, valid_PN, parts, jax.random.key(0), steps=steps)
    return batch, rollouts, kept, selection, groups


REWARDS = [[0, 1, 2, 5, 9], [3, 3, 3, 3, 3], [1, 0, 1, 7, 2]]
VALID = [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 1, 0, 0]]


def test_keeping_gathers_each_kept_rollout_whole():
    batch, rollouts, kept, selection, _ = kept_of(REWARDS, VALID)
    index = np.asarray(selection.index_PM)
    assert set(index[0]) == {0, 1, 4}
    assert list(index[2]) in ([0, 2, -1], [2, 0, -1])
    for p, m in zip(*np.nonzero(index >= 0), strict=True):
        np.testing.assert_array_equal(kept.tokens_PMC[p, m], rollouts.tokens_PNC[p, index[p, m]])
        np.testing.assert_array_equal(kept.logp_old_PMC[p, m], rollouts.logp_PNC[p, index[p, m]])
        assert kept.length_PM[p, m] == rollouts.length_PN[p, index[p, m]]
    np.testing.assert_array_equal(kept.prompt_PL, batch.tokens_PL)
    np.testing.assert_array_equal(kept.prompt_length_P, batch.length_P)


def test_only_kept_rollouts_of_groups_with_signal_have_weight_and_advantage():
    _, _, kept, selection, groups = kept_of(REWARDS, VALID)
    # Group 1 is all equal, and the two valid rollouts of group 2 are equal too.
    np.testing.assert_array_equal(kept.weight_PM, [[1, 1, 1], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(kept.advantage_PM[1:], 0)
    chosen = np.asarray(REWARDS[0], np.float64)[np.asarray(selection.index_PM[0])]
    np.testing.assert_allclose(kept.advantage_PM[0], (chosen - chosen.mean()) / (chosen.std(ddof=1) + 1e-4), rtol=1e-5)
    np.testing.assert_allclose(groups.no_signal_fraction, 2 / 3, rtol=1e-6)


def test_an_empty_slot_has_no_weight_beside_kept_rollouts():
    _, _, kept, selection, _ = kept_of([[4, 1, 2, 3, 0]], [[1, 0, 1, 0, 0]])
    assert list(selection.index_PM[0]) == [2, 0, -1]
    np.testing.assert_array_equal(kept.weight_PM, [[1, 1, 0]])
    assert kept.advantage_PM[0, 2] == 0


def test_completions_are_cut_to_the_bucket_that_is_asked():
    _, rollouts, kept, selection, _ = kept_of(REWARDS, VALID, steps=8)
    assert kept.tokens_PMC.shape == kept.logp_old_PMC.shape == (3, 3, 8)
    np.testing.assert_array_equal(kept.tokens_PMC[0, 0], rollouts.tokens_PNC[0, selection.index_PM[0, 0], :8])


def test_group_metrics_equal_numpy_over_valid_rollouts():
    _, rollouts, _, selection, groups = kept_of(REWARDS, VALID)
    rewards, valid = np.asarray(REWARDS, np.float64), np.asarray(VALID, bool)
    scored = rewards[valid]
    kept = [rewards[p][[i for i in selection.index_PM[p].tolist() if i >= 0]] for p in range(3)]
    expected = {
        "reward_mean": scored.mean(),
        "reward_std": scored.std(ddof=1),
        "parts_mean": [scored.mean(), 2 * scored.mean()],
        "variance_all": np.mean([rewards[p][valid[p]].var() for p in range(3)]),
        "variance_kept": np.mean([of_group.var() for of_group in kept]),
        "invalid_fraction": 3 / 15,
        "kept_reward_mean": np.concatenate(kept).mean(),
        "mean_length": np.mean(rollouts.length_PN),
        "truncated_fraction": 1 - np.mean(rollouts.finished_PN),
        "tokens_generated": np.sum(rollouts.length_PN),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(groups, name), value, rtol=1e-5, err_msg=name)
    assert groups.variance_kept > groups.variance_all


def test_the_rule_all_keeps_every_valid_rollout():
    _, _, kept, selection, _ = kept_of(REWARDS, VALID, rule="all", m=5)
    np.testing.assert_array_equal(selection.index_PM[0], np.arange(5))
    np.testing.assert_array_equal(selection.index_PM[2], [0, 2, -1, -1, -1])
    assert kept.tokens_PMC.shape == (3, 5, 11)
