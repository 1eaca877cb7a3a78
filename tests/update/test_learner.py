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

from pods_jax.algorithm.losses import LOSSES, Numbers
from pods_jax.config.entries import micro_batch_sizes
from pods_jax.devices.sharding import make_mesh, replicate, to_global
from pods_jax.models.decoder import Decoder
from pods_jax.models.spec import DecoderSpec
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.sampling import sampling_params
from pods_jax.types import KeptBatch, PromptBatch
from pods_jax.update.learner import Learner, UpdateSettings, init_state
from pods_jax.update.microbatches import deal_rollouts, micro_batch_shape, place, take_micro_batch

SPEC = DecoderSpec(vocab_size=13, width=12, layers=2, q_heads=4, kv_heads=2, head_size=6, feed_forward=10, qkv_bias=True)
P, M, L, C = 4, 6, 7, 5

# Moves nothing and keeps the gradient as its state: what an optimiser would have been given.
RECORD = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),  # type: ignore[arg-type]
)
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.add_decayed_weights(0.1))
RATE = optax.constant_schedule(1e-2)


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


def batch(seed=0, *, prompts=P):
    """A kept batch with every length, an empty slot, and tokens and numbers beyond the lengths that must not matter."""
    rng = np.random.default_rng(seed)
    length_PM = rng.integers(1, C + 1, (prompts, M))
    length_PM[0, 0], length_PM[0, 1] = 1, C
    weight_PM = np.ones((prompts, M), np.float32)
    weight_PM[-1, -1] = 0
    logp = rng.normal(-2.5, 0.6, (prompts, M, C)).astype(np.float32)
    return KeptBatch(
        prompt_PL=jnp.asarray(rng.integers(0, SPEC.vocab_size, (prompts, L)), jnp.int32),
        prompt_length_P=jnp.asarray(rng.integers(2, L + 1, prompts), jnp.int32),
        tokens_PMC=jnp.asarray(rng.integers(0, SPEC.vocab_size, (prompts, M, C)), jnp.int32),
        length_PM=jnp.asarray(length_PM, jnp.int32),
        logp_old_PMC=jnp.asarray(logp),
        advantage_PM=jnp.asarray(rng.normal(0, 1, (prompts, M)), jnp.float32),
        weight_PM=jnp.asarray(weight_PM),
        index_PM=jnp.tile(jnp.arange(M), (prompts, 1)),
    )


@cache
def learner(optimizer=RECORD, loss="grpo", remat=False, beta=0.0, clip_low=0.2, clip_high=0.2, **numbers):
    graph, _ = decoder(remat)
    return Learner(graph, optimizer, RATE, UpdateSettings(LOSSES[loss], Numbers(clip_low, clip_high, beta), **numbers))


@cache
def reference_parameters():
    return jax.tree.map(lambda x: 0.9 * x, parameters())


def updated(kept, params=None, *, optimizer=RECORD, **choices):
    """The state and metrics after one update; with ``RECORD`` the optimiser state is the gradient."""
    state = init_state(jax.tree.map(jnp.copy, parameters() if params is None else params), optimizer=optimizer)
    reference = reference_parameters() if choices.get("beta") else None
    return learner(optimizer, **choices)(state, kept, 1, reference=reference)


def assert_trees_close(actual, expected, **tolerance):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, err_msg=jax.tree_util.keystr(path), **tolerance)


def assert_metrics_close(actual, expected):
    """All but the share of padding, which is what the ways of cutting differ in."""
    assert actual.keys() == expected.keys()
    for name in actual.keys() - {"update/padding_fraction"}:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


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


@cache
def _other(seed, temperature):
    return reference_logp(jax.tree.map(lambda x: np.asarray(x, np.float64), reference_parameters()), batch(seed), temperature)[
        0
    ]


def other_logp(kept, temperature):
    """Log-probabilities of the reference policy for the default batch."""
    np.testing.assert_array_equal(kept.tokens_PMC, batch().tokens_PMC)
    return _other(0, temperature)


def reference_loss(params, kept, *, name, temperature, clip_low, clip_high, beta):
    logp, _ = reference_logp(params, kept, temperature)
    logp_ref = other_logp(kept, temperature) if beta else logp
    total = count = 0.0
    for p, m in np.ndindex(*kept.length_PM.shape):
        if kept.weight_PM[p, m] == 0:
            continue
        length = int(kept.length_PM[p, m])
        new, old = logp[p, m, :length], np.asarray(kept.logp_old_PMC[p, m, :length], np.float64)
        ratio, advantage = np.exp(new - old), float(kept.advantage_PM[p, m])
        tokens = np.minimum(ratio * advantage, np.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)
        if beta:
            difference = logp_ref[p, m, :length] - new
            tokens = tokens - beta * (np.exp(difference) - difference - 1)
        total += tokens.mean() if name == "grpo" else tokens.sum()
        count += 1 if name == "grpo" else length
    return -total / count


@pytest.mark.parametrize(("loss", "beta", "temperature"), [("grpo", 0.0, 1.0), ("grpo", 0.3, 0.7), ("dapo", 0.0, 0.7)])
def test_loss_and_gradient_equal_a_float64_reference(loss, beta, temperature):
    kept, params = batch(), parameters()
    numbers = {"temperature": temperature, "beta": beta, "clip_low": 0.2, "clip_high": 0.3}
    state, metrics = updated(kept, loss=loss, **numbers)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def value(params):
        return reference_loss(params, kept, name=loss, **numbers)

    np.testing.assert_allclose(metrics["loss"], value(exact), rtol=2e-5, atol=2e-6)
    assert metrics["policy/clip_low_fraction"] > 0
    assert metrics["policy/clip_high_fraction"] > 0
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
    kept = batch()
    _, metrics = updated(kept, beta=0.3, temperature=0.7, clip_low=0.2, clip_high=0.3)
    logp, entropy = reference_logp(jax.tree.map(lambda x: np.asarray(x, np.float64), parameters()), kept, 0.7)
    trained = (np.arange(C) < np.asarray(kept.length_PM)[..., None]) & (np.asarray(kept.weight_PM) > 0)[..., None]
    gap = np.abs(logp - kept.logp_old_PMC)[trained]
    difference = (other_logp(kept, 0.7) - logp)[trained]
    assert metrics["tokens/trained"] == trained.sum()
    np.testing.assert_allclose(metrics["policy/entropy"], entropy[trained].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["policy/logp_gap"], gap.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["policy/logp_gap_max"], gap.max(), rtol=1e-5)
    np.testing.assert_allclose(metrics["policy/kl"], (np.expm1(difference) - difference).mean(), rtol=1e-4)
    np.testing.assert_allclose(
        metrics["policy/ratio_deviation"], np.abs(np.expm1((logp - kept.logp_old_PMC)[trained])).mean(), rtol=1e-4
    )


# --- what must not change the gradient ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    return updated(batch(), beta=0.3)


@pytest.mark.parametrize(
    "choice",
    [
        {"micro_batch": 1},
        {"micro_batch": 3, "logit_chunk": 1},
        {"micro_batch": 2, "rungs": 3},
        {"rungs": 3, "multiple": 1},
        {"micro_batch": 12, "logit_chunk": 2 * P * M * SPEC.vocab_size},
        {"remat": True},
    ],
    ids=lambda choice: " ".join(f"{name}={value}" for name, value in choice.items()),
)
def test_no_way_of_cutting_changes_loss_gradient_or_statistics(whole, choice):
    state, metrics = updated(batch(), beta=0.3, **choice)
    assert_trees_close(state.opt_state, whole[0].opt_state, rtol=1e-5, atol=2e-6)
    assert_metrics_close(metrics, whole[1])


def test_padding_and_what_lies_beyond_a_length_change_nothing(whole):
    kept, rng = batch(), np.random.default_rng(9)
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
    )
    state, metrics = updated(padded, beta=0.3)
    assert_trees_close(state.opt_state, whole[0].opt_state, rtol=1e-5, atol=2e-6)
    assert_metrics_close(metrics, whole[1])


def sliced(kept, groups):
    return jax.tree.map(lambda x: x[groups], kept)


def test_a_group_without_signal_contributes_nothing_even_with_a_kl_term():
    kept = batch()
    silent = replace(kept, weight_PM=kept.weight_PM.at[1:].set(0), advantage_PM=kept.advantage_PM.at[1:].set(0))
    state, metrics = updated(silent, beta=0.3)
    alone, of_alone = updated(sliced(silent, slice(0, 1)), beta=0.3)
    assert metrics["policy/kl"] > 0
    assert_trees_close(state.opt_state, alone.opt_state, rtol=1e-5, atol=2e-6)
    assert_metrics_close(metrics, of_alone)


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
        "weight_PM": number_PM / 2 + 1,
        "index_PM": number_PM,
    }
    shape = micro_batch_shape(prompts, kept, size, shards)
    padded = {"completion_length": 99, "prompt_length": 2, "multiple": 1, "rungs": 0}
    deal = deal_rollouts(values["length_PM"], values["weight_PM"], **padded, shape=shape, shards=shards)
    each_part = [
        jax.jit(take_micro_batch)(KeptBatch(**values), *where)
        for where in zip(jnp.asarray(deal.group_ISG), jnp.asarray(deal.rollout_ISGW), strict=True)
    ]
    assert deal.count == len(each_part)
    micro = jax.tree.map(lambda *parts: np.stack(parts), *each_part)
    blocks, groups, each = micro.length_PM.shape
    assert groups * each == (size or prompts * kept)
    assert blocks * groups * each == prompts * kept
    assert sorted(micro.tokens_PMC[..., 0].ravel()) == list(range(prompts * kept))
    owner = np.broadcast_to(micro.prompt_PL[..., :1], (blocks, groups, each))
    np.testing.assert_array_equal(micro.tokens_PMC[..., 0] // kept, owner)
    np.testing.assert_array_equal(micro.prompt_length_P, micro.prompt_PL[..., 0] + 50)
    np.testing.assert_array_equal(micro.length_PM, micro.tokens_PMC[..., 0] + 7)
    np.testing.assert_array_equal(micro.weight_PM, micro.advantage_PM * 2 + 1)
    # A shard keeps to its own groups: no rollout moves between devices.
    shard_of = micro.prompt_PL[..., 0] // (prompts // shards)
    np.testing.assert_array_equal(shard_of, np.broadcast_to(np.repeat(np.arange(shards), groups // shards), shard_of.shape))


@pytest.mark.parametrize("size", [5, 7, 9, 16, 48])
def test_an_impossible_micro_batch_is_refused_with_the_possible_ones(size):
    with pytest.raises(ValueError, match=rf"update.micro_batch={size} .* 4 groups of 6 .* possible are 2, 4, 6, 12, 24"):
        micro_batch_shape(P, M, size, 2)


# --- deals --------------------------------------------------------------------------------------------------------------------


def dealt(kept, *, shape, shards=1, multiple=1, rungs=3):
    """The deal of a batch; two shards are blocks of groups on one device here."""
    length, weight = np.asarray(kept.length_PM), np.asarray(kept.weight_PM)
    padded = {"completion_length": C, "prompt_length": 50, "multiple": multiple, "rungs": rungs}
    return place(deal_rollouts(length, weight, **padded, shape=shape, shards=shards))


def stepped(state, kept, deal, *, optimizer=RECORD, loss="grpo"):
    return learner(optimizer, loss).update(state, kept, None, None, jnp.float32(0.1), deal)


@pytest.mark.parametrize("over_data", [False, True])
@pytest.mark.parametrize(("loss", "micro_batch"), [("grpo", 0), ("dapo", 12), ("grpo", 4), ("dapo", 2)], ids=str)
def test_two_shards_update_as_one_does(loss, micro_batch, over_data):
    kept = batch()
    expected, of_expected = updated(kept, loss=loss, beta=0.3)
    params, reference = jax.device_get((parameters(), reference_parameters()))
    with jax.set_mesh(mesh := make_mesh((2, 1, 1) if over_data else (1, 2, 1), jax.devices()[:2])):
        state = init_state(replicate(params), optimizer=RECORD)
        chosen = learner(RECORD, loss, beta=0.3, micro_batch=micro_batch, rungs=2)
        state, metrics = chosen(state, to_global(mesh, jax.device_get(kept)), 1, reference=replicate(reference))
    assert_trees_close(state.opt_state, expected.opt_state, rtol=1e-5, atol=2e-6)
    assert_metrics_close(metrics, of_expected)


@pytest.mark.parametrize(
    ("loss", "shape", "rungs"), [("grpo", (4, 6), 3), ("dapo", (2, 6), 3), ("grpo", (1, 2), 3), ("grpo", (1, 3), 0)], ids=str
)
def test_a_deal_changes_no_gradient(loss, shape, rungs):
    kept = batch()
    expected, of_expected = updated(kept, loss=loss)
    state, metrics = stepped(init_state(parameters(), optimizer=RECORD), kept, dealt(kept, shape=shape, rungs=rungs), loss=loss)
    assert_trees_close(state.opt_state, expected.opt_state, rtol=1e-5, atol=2e-6)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], of_expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("shape", [(4, 6), (1, 3)], ids=str)
def test_what_a_deal_leaves_out_has_no_gradient(shape):
    kept = batch()
    kept = replace(kept, weight_PM=kept.weight_PM.at[jnp.asarray([0, 2])].set(0))
    whole = dealt(batch(), shape=(4, 6), rungs=0)
    expected, of_expected = stepped(init_state(parameters(), optimizer=RECORD), kept, whole)
    deal = dealt(kept, shape=shape)
    assert deal.group_ISG.shape[0] * deal.group_ISG.shape[2] * shape[1] == (12 if shape[0] == 4 else 24)
    state, metrics = stepped(init_state(parameters(), optimizer=RECORD), kept, deal)
    assert_trees_close(state.opt_state, expected.opt_state, rtol=1e-5, atol=2e-6)
    assert_trees_close(metrics, of_expected, rtol=1e-5, atol=1e-6)


def test_deals_of_one_size_share_one_program():
    fresh = Learner(decoder()[0], ADAMW, RATE, UpdateSettings(LOSSES["grpo"]))
    state = init_state(parameters(), optimizer=ADAMW)
    for seed in range(6):
        kept = batch(seed)
        deal = replace(dealt(kept, shape=(2, 6)), places=2 * M * C)
        state, metrics = fresh.update(state, kept, None, None, jnp.float32(0.1), deal)
        assert metrics["update/taken"] == 1
    assert fresh.compiled_programs() == 1


# --- the optimiser step -------------------------------------------------------------------------------------------------------


def test_a_step_moves_the_parameters_and_frees_the_old_state():
    state = init_state(parameters(), optimizer=ADAMW)
    moved, metrics = learner(ADAMW)(state, batch(), 1)
    assert int(moved.updates) == 1
    assert (metrics["update/taken"], metrics["update/nonfinite"]) == (1, 0)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    for before, after in zip(jax.tree.leaves(parameters()), jax.tree.leaves(moved.params), strict=True):
        assert np.any(before != after)


def test_a_step_without_signal_leaves_every_bit_of_the_state():
    kept = batch()
    silent = replace(kept, weight_PM=jnp.zeros_like(kept.weight_PM))
    moved, _ = updated(kept, optimizer=ADAMW, beta=0.3)
    before = jax.tree.map(np.array, moved)
    after, metrics = learner(ADAMW, beta=0.3)(moved, silent, 1, reference=reference_parameters())
    assert_trees_identical(after, before)
    assert metrics.pop("policy/learning_rate") == pytest.approx(0.01)
    assert metrics == {"tokens/trained": 0, "update/taken": 0, "update/padding_fraction": 0}
    # Nor does the program move anything that is given nothing to train.
    after, program = stepped(after, silent, dealt(kept, shape=(4, 6)), optimizer=ADAMW)
    assert_trees_identical(after, before)
    assert int(after.updates) == 1
    for name in ("update/taken", "update/nonfinite", "loss", "policy/grad_norm", "tokens/trained"):
        assert program[name] == 0


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_reported(broken):
    kept = batch()
    moved, _ = updated(kept, optimizer=ADAMW)
    before = jax.tree.map(np.array, moved)
    bad = replace(kept, advantage_PM=kept.advantage_PM.at[1, 2].set(broken))
    after, metrics = learner(ADAMW)(moved, bad, 1)
    assert_trees_identical(after, before)
    assert (metrics["update/taken"], metrics["update/nonfinite"]) == (0, 1)
    healthy, metrics = learner(ADAMW)(after, kept, 1)
    assert metrics["update/taken"] == 1
    assert int(healthy.updates) == 2


def test_steps_of_one_shape_share_one_program():
    fresh = Learner(decoder()[0], ADAMW, RATE, UpdateSettings(LOSSES["grpo"]))
    state = init_state(parameters(), optimizer=ADAMW)
    state, _ = fresh(state, batch(0), 1)
    programs = fresh.compiled_programs()
    for seed in range(1, 4):
        state, _ = fresh(state, batch(seed), 1)
    assert fresh.compiled_programs() == programs == 1
    assert int(state.updates) == 4


def test_the_reference_costs_nothing_at_the_start_and_pulls_back_later():
    update = learner(ADAMW, beta=0.3)
    state = init_state(parameters(), optimizer=ADAMW)
    state, first = update(state, batch(), 1, reference=parameters())
    assert 0 <= first["policy/kl"] < 1e-9
    _, second = update(state, batch(), 2, reference=parameters())
    assert second["policy/kl"] > 1e-5


def test_the_reference_is_asked_once_a_step_for_all_epochs():
    """Its log-probabilities are those of the plain forward, in the order of the micro-batches."""
    kept, chosen = batch(), learner(ADAMW, beta=0.3, micro_batch=6, rungs=2)
    deal, _ = chosen.deal(kept)
    assert deal is not None
    logp_IPWC = np.asarray(chosen._reference_logp(reference_parameters(), kept, place(deal)))
    expected, length_PM = other_logp(kept, 1.0), np.asarray(kept.length_PM)
    seen = 0
    for i, s, g, w in np.argwhere(np.asarray(deal.rollout_ISGW) >= 0):
        p, m = deal.group_ISG[i, s, g], deal.rollout_ISGW[i, s, g, w]
        if kept.weight_PM[p, m]:
            length = length_PM[p, m]
            np.testing.assert_allclose(logp_IPWC[i, g, w, :length], expected[p, m, :length], rtol=1e-5, atol=1e-5)
            seen += 1
    assert seen == int(np.asarray(kept.weight_PM).sum())


@pytest.mark.parametrize("epochs", [2, 3])
def test_every_epoch_of_a_step_has_the_rate_of_the_step(epochs):
    """The schedule counts the steps of the run: an update of three epochs moves by three times the step's rate."""
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    ones = optax.stateless(lambda updates, params: jax.tree.map(jnp.ones_like, updates))
    chosen = Learner(decoder()[0], ones, schedule, UpdateSettings(LOSSES["grpo"], epochs=epochs))
    for step, rate in ((1, 1.0), (3, 0.5)):
        params = {**parameters(), "final_norm": jnp.full(SPEC.width, 100.0)}
        state, metrics = chosen(init_state(params, optimizer=ones), batch(), step)
        assert metrics["policy/learning_rate"] == rate
        assert int(state.updates) == metrics["update/taken"] == epochs
        np.testing.assert_array_equal(state.params["final_norm"], 100.0 - epochs * rate)


def test_metrics_of_several_epochs_are_the_last_ones_sums_and_the_first_gap():
    kept = batch()
    singles, state = [], init_state(parameters(), optimizer=ADAMW)
    for _ in range(2):
        state, metrics = learner(ADAMW)(state, kept, 1)
        singles.append(metrics)
    _, both = learner(ADAMW, epochs=2)(init_state(parameters(), optimizer=ADAMW), kept, 1)
    for name in ("policy/logp_gap", "policy/logp_gap_max"):
        assert both[name] == pytest.approx(singles[0][name])
        assert both[name] != pytest.approx(singles[1][name])
    for name in ("tokens/trained", "update/taken", "update/nonfinite"):
        assert both[name] == singles[0][name] + singles[1][name]
    for name in ("loss", "policy/entropy", "policy/clip_fraction", "policy/grad_norm"):
        assert both[name] == pytest.approx(singles[1][name], rel=1e-5)
    assert all(type(value) is float for value in both.values())


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
    assert metrics["tokens/trained"] == lengths.sum()
    assert metrics["policy/ratio_deviation"] < 2e-6
    assert metrics["policy/logp_gap"] < 2e-6
    assert metrics["policy/clip_low_fraction"] == metrics["policy/clip_high_fraction"] == 0
    _, again = learner(ADAMW, temperature=temperature)(state, kept, 2)
    assert again["policy/ratio_deviation"] > 1e-3
