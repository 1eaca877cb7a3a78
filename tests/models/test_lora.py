from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pods_jax.models.decoder import Decoder
from pods_jax.models.lora import PROJECTIONS, A, B, LoraSpec, initial_adapters, join, merge, project, split_adapters
from pods_jax.models.spec import DecoderSpec
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.sampling import sampling_params
from pods_jax.types import PromptBatch

P, N, L, C, V = 3, 5, 7, 11, 29
SPEC = DecoderSpec(vocab_size=V, width=13, layers=2, q_heads=4, kv_heads=2, head_size=6, feed_forward=17, qkv_bias=True)
EVERYWHERE = LoraSpec(rank=3, alpha=5.0)
SUBSETS = [(name,) for name in PROJECTIONS] + [("q", "v"), tuple(PROJECTIONS)]
PROMPTS = PromptBatch(jnp.asarray(np.random.default_rng(0).integers(0, V, (P, L)), jnp.int32), jnp.asarray([7, 2, 4]))
ENDLESS = [V - 1]


@cache
def graph(lora=None, **options):
    return nnx.split(nnx.eval_shape(lambda: Decoder(SPEC, rngs=nnx.Rngs(0), lora=lora, **options)))


@cache
def parameters(lora):
    """Random values everywhere, B too; the base is the same whatever carries adapters."""
    shapes = nnx.to_pure_dict(graph(lora)[1])

    def draw(path, leaf):
        name = path[-1].key
        rng = np.random.default_rng(list(name.encode()))
        return jnp.asarray(float(name.endswith("_norm")) + 0.3 * rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@cache
def forward(lora):
    return jax.jit(lambda params, tokens: nnx.merge(graph(lora)[0], params)(tokens))


def logits(params, lora=None, tokens=PROMPTS.tokens_PL):
    return np.asarray(forward(lora)(params, tokens))


def assert_trees_identical(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


# --- adapters -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_projection_adds_the_scaled_product_of_both_matrices(name):
    rng, here = np.random.default_rng(1), PROJECTIONS[name]
    size = {"d": 5, "n": 3, "h": 2, "f": 7}
    inputs, outputs = ([size[letter] for letter in letters] for letters in (here.inputs, here.outputs))
    x, w = rng.normal(size=(4, *inputs)), rng.normal(size=(*inputs, *outputs))
    a, b = rng.normal(size=(*inputs, 3)), rng.normal(size=(3, *outputs))
    flat_x, flat_w = x.reshape(4, -1), w.reshape(np.prod(inputs), -1)
    plain = flat_x @ flat_w
    expected = plain + 0.5 * flat_x @ a.reshape(-1, 3) @ b.reshape(3, -1)
    weights = {name: jnp.asarray(w, jnp.float32)}
    adapters = {name + A: jnp.asarray(a, jnp.float32), name + B: jnp.asarray(b, jnp.float32)}
    x = jnp.asarray(x, jnp.float32)
    np.testing.assert_allclose(project(x, weights, name, 0.5).reshape(4, -1), plain, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(project(x, weights | adapters, name, 0.5).reshape(4, -1), expected, rtol=1e-4, atol=1e-5)


def test_new_adapters_are_float32_a_within_its_bound_and_b_zero():
    adapters = {name: value for name, (_, value) in initial_adapters(SPEC, EVERYWHERE, jax.random.key(0)).items()}
    assert set(adapters) == {name + suffix for name in PROJECTIONS for suffix in (A, B)}
    inputs = {"q": 13, "k": 13, "v": 13, "o": 24, "gate": 13, "up": 13, "down": 17}
    for name, width in inputs.items():
        a, b = np.asarray(adapters[name + A]), np.asarray(adapters[name + B])
        assert a.dtype == b.dtype == np.float32
        assert (a.shape[0], a.size, a.shape[-1]) == (2, 2 * width * 3, 3)
        assert 0.7 * width**-0.5 < np.abs(a).max() <= width**-0.5
        assert np.any(a[0] != a[1])
        assert b.shape[:2] == (2, 3)
        assert not b.any()
    assert np.any(np.asarray(adapters["gate" + A]) != np.asarray(adapters["up" + A]))
    again = initial_adapters(SPEC, EVERYWHERE, jax.random.key(1))["q" + A][1]
    assert np.any(np.asarray(again) != np.asarray(adapters["q" + A]))


def test_new_adapters_leave_the_logits_as_they_were():
    base = parameters(None)
    new = {"layers": {name: value for name, (_, value) in initial_adapters(SPEC, EVERYWHERE, jax.random.key(0)).items()}}
    np.testing.assert_array_equal(logits(join(new, base), EVERYWHERE), logits(base))


# --- parting and merging ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", SUBSETS, ids="-".join)
def test_merged_weights_compute_what_base_and_adapters_do(targets):
    lora = replace(EVERYWHERE, targets=targets)
    params = parameters(lora)
    trained, frozen = split_adapters(params)
    assert set(trained["layers"]) == {name + suffix for name in targets for suffix in (A, B)}
    assert_trees_identical(frozen, parameters(None))
    merged = merge(params, lora.scale)
    changed = {name for name in frozen["layers"] if np.any(merged["layers"][name] != frozen["layers"][name])}
    assert changed == set(targets)
    adapted = logits(params, lora)
    np.testing.assert_allclose(logits(merged), adapted, rtol=1e-5, atol=1e-5)
    assert np.abs(adapted - logits(frozen)).max() > 1e-2


def test_joining_undoes_parting():
    params = parameters(EVERYWHERE)
    trained, frozen = split_adapters(params)
    assert_trees_identical(join(trained, frozen), params)
    assert len(jax.tree.leaves(trained)) == 14
    assert not set(map(id, jax.tree.leaves(trained))) & set(map(id, jax.tree.leaves(frozen)))


def test_without_adapters_everything_is_trained_and_merging_changes_nothing():
    base = parameters(None)
    trained, frozen = split_adapters(base)
    assert_trees_identical(trained, base)
    assert frozen == {}
    assert_trees_identical(join(trained, frozen), base)
    assert_trees_identical(join(trained, None), base)
    assert_trees_identical(merge(base, 2.0), base)


def test_a_bfloat16_base_is_merged_in_float32_and_stays_bfloat16():
    params = parameters(EVERYWHERE)
    trained, frozen = split_adapters(params)
    frozen = jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen)
    merged = merge(join(trained, frozen), 0.5)
    exact = merge(join(trained, jax.tree.map(lambda x: x.astype(jnp.float32), frozen)), 0.5)
    assert {x.dtype for x in jax.tree.leaves(merged)} == {jnp.dtype(jnp.bfloat16)}
    assert_trees_identical(merged, jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact))


# --- the other ways through the decoder ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "unroll"), [("dots", False), ("rows", True)])
def test_decoding_with_adapters_draws_from_the_merged_model(form, unroll):
    params = parameters(EVERYWHERE)
    adapted, _ = graph(EVERYWHERE, form=form, unroll=unroll)
    engine = RolloutEngine(adapted, rollouts=N, max_completion_length=C, chunk=4, eos_ids=ENDLESS)
    rollouts = jax.device_get(engine(params, PROMPTS, jax.random.key(0), sampling_params(temperature=1.0)))
    tokens_PNC = rollouts.tokens_PNC
    hidden = jax.jit(lambda p, t: nnx.merge(adapted, p).group_hidden(PROMPTS.tokens_PL, PROMPTS.length_P, t))(
        params, tokens_PNC
    )
    own_logits = jax.jit(lambda p, h: nnx.merge(adapted, p).logits(h))(params, hidden)
    copied = np.zeros((P, N, L + C), np.int32)
    for p, length in enumerate(np.asarray(PROMPTS.length_P)):
        copied[p, :, :length] = PROMPTS.tokens_PL[p, :length]
        copied[p, :, length : length + C] = tokens_PNC[p]
    whole = logits(merge(params, EVERYWHERE.scale), tokens=jnp.asarray(copied.reshape(P * N, -1))).reshape(P, N, L + C, V)
    for p, n in np.ndindex(P, N):
        start, end = int(PROMPTS.length_P[p]) - 1, rollouts.length_PN[p, n]
        expected = np.asarray(jax.nn.log_softmax(whole[p, n, start : start + end]))
        trained = np.asarray(jax.nn.log_softmax(own_logits[p, n, :end]))
        np.testing.assert_allclose(trained, expected, rtol=1e-5, atol=2e-5)
        drawn = np.take_along_axis(expected, tokens_PNC[p, n, :end, None], axis=-1)[:, 0]
        np.testing.assert_allclose(rollouts.logp_PNC[p, n, :end], drawn, rtol=1e-5, atol=2e-5)


# --- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, -2])
def test_a_rank_below_one_is_refused(rank):
    with pytest.raises(ValueError, match=f"lora.rank={rank} must be at least 1"):
        LoraSpec(rank=rank, alpha=1.0)


@pytest.mark.parametrize("targets", [(), ("q", "x"), ("q", "q"), ("q_proj",)])
def test_targets_that_are_none_unknown_or_named_twice_are_refused_with_the_known_ones(targets):
    with pytest.raises(ValueError, match=r"lora.targets=.*must name some of q, k, v, o, gate, up, down, each once"):
        LoraSpec(rank=1, alpha=1.0, targets=targets)
