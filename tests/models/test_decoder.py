"""The ways through the decoder are one function: the plain forward, which test_hf_logits.py holds against torch."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from flax import nnx
from jaxtyping import jaxtyped

from pods_jax.devices.sharding import partition_spec
from pods_jax.models import decoder as module
from pods_jax.models.attention import DECODE_FORMS
from pods_jax.models.decoder import Decoder
from pods_jax.models.spec import DecoderSpec, Llama3Rope

P, M, L, C, V, D, F, LAYERS = 3, 5, 7, 11, 29, 13, 17, 2
SPEC = DecoderSpec(vocab_size=V, width=D, layers=LAYERS, q_heads=8, kv_heads=2, head_size=6, feed_forward=F)
SCALED = Llama3Rope(factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_position=12)
SPECS = {
    "plain": SPEC,
    "full": replace(SPEC, tied=False, qkv_bias=True, qk_norm=True, rope_scaling=SCALED, norm_eps=1e-3),
}
RNG = np.random.default_rng(0)
LENGTH = jnp.asarray([7, 1, 4])
PROMPTS = jnp.asarray(RNG.integers(0, V, (P, L)))
TOKENS = jnp.asarray(RNG.integers(0, V, (P, M, C)))
OWN = np.arange(C) < np.resize([11, 1, 6, 2, 9], (P, M))[..., None]
WEIGHT = jnp.asarray(RNG.normal(size=(P, M, C, V)) * OWN[..., None] / 50, jnp.float32)
close = partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)
checked = jaxtyped(typechecker=beartype)
unstack = checked(module.unstack)


class CheckedDecoder(Decoder):
    """The decoder, its annotations checked at run time."""

    __call__ = checked(Decoder.__call__)
    prefill = checked(Decoder.prefill)
    decode = checked(Decoder.decode)
    group_hidden = checked(Decoder.group_hidden)
    logits = checked(Decoder.logits)
    head_DV = checked(Decoder.head_DV)


@cache
def parameters(spec):
    """Random values everywhere, norms and biases too; large enough for logits of about 1."""
    rng = np.random.default_rng(1)
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0)))))

    def draw(path, leaf):
        center = 1.0 if path[-1].key.endswith("_norm") else 0.0
        return jnp.asarray(center + 0.3 * rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def bound(spec, **options):
    """The decoder of given parameters, as a function of them."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: CheckedDecoder(spec, rngs=nnx.Rngs(0), **options)))
    return partial(nnx.merge, graph)


def concatenated_logits(params, prompts, tokens, *, spec, **options):
    """Logits that predict each completion token, every completion behind its own copy of the prompt."""
    place = jnp.arange(L + C)[None]
    length = jnp.repeat(LENGTH, M)[:, None]
    own = jnp.take_along_axis(tokens.reshape(P * M, C), jnp.clip(place - length, 0, C - 1), axis=1)
    copied = jnp.repeat(jnp.pad(prompts, ((0, 0), (0, C))), M, axis=0)
    logits = bound(spec, **options)(params)(jnp.where(place < length, copied, own))
    at = length - 1 + jnp.arange(C)[None]
    return jnp.take_along_axis(logits, at[..., None], axis=1).reshape(P, M, C, V)


def group_logits(params, prompts, tokens, *, spec, **options):
    decoder = bound(spec, **options)(params)
    return decoder.logits(decoder.group_hidden(prompts, LENGTH, tokens))


@cache
def value_and_gradient(logits, name, **options):
    """Compiled: logits, and the gradient of a weighted sum of those of valid tokens."""

    def value(params, prompts, tokens):
        out = logits(params, prompts, tokens, spec=SPECS[name], **options)
        return jnp.sum(WEIGHT * out), out

    run = jax.jit(jax.value_and_grad(value, has_aux=True))

    def result(prompts=PROMPTS, tokens=TOKENS):
        (_, out), gradient = run(parameters(SPECS[name]), prompts, tokens)
        return np.asarray(out), gradient

    return result


@cache
def reference(name):
    return value_and_gradient(concatenated_logits, name)()


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def equations(jaxpr):
    """All equations of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                inner = getattr(inner, "jaxpr", inner)
                yield from equations(inner)


# --- the update's forward


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {"unroll": True}),
        *[("full", {"unroll": unroll, "remat": remat}) for unroll in (False, True) for remat in (False, True)],
    ],
)
def test_group_forward_equals_the_concatenated_one_in_values_and_gradients(name, options):
    logits, gradient = value_and_gradient(group_logits, name, **options)()
    expected, expected_gradient = reference(name)
    close(logits[OWN], expected[OWN])
    jax.tree.map(close, gradient, expected_gradient)
    assert min(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient)) > 1e-3


def test_what_stands_in_the_padding_changes_nothing():
    run = value_and_gradient(group_logits, "full", unroll=True, remat=False)
    expected, expected_gradient = run()
    prompts = jnp.where(jnp.arange(L)[None] < LENGTH[:, None], PROMPTS, (PROMPTS + 11) % V)
    logits, gradient = run(prompts, jnp.where(OWN, TOKENS, (TOKENS + 7) % V))
    np.testing.assert_array_equal(logits[OWN], expected[OWN])
    assert (logits[~OWN] != expected[~OWN]).any()
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), gradient, expected_gradient)


def test_each_prompt_passes_the_layers_once_per_group():
    jaxpr = jax.make_jaxpr(partial(group_logits, spec=SPEC, unroll=True))(parameters(SPEC), PROMPTS, TOKENS)
    products = [e.outvars[0].aval for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    wide = [product.size for product in products if product.shape[-1] == F]
    assert wide == [P * (L + M * C) * F] * 2 * LAYERS


def test_remat_recomputes_layers_in_the_backward_pass():
    def products(remat):
        def value(params):
            return group_logits(params, PROMPTS, TOKENS, spec=SPEC, remat=remat).sum()

        jaxpr = jax.make_jaxpr(jax.grad(value))(parameters(SPEC))
        return sum(equation.primitive.name == "dot_general" for equation in equations(jaxpr.jaxpr))

    assert products(True) > products(False)


# --- causality


def influence(function, rows):
    """Which embedding rows have any influence on each output, by gradient."""
    jacobian = jax.jit(jax.jacrev(function))(parameters(SPECS["full"])["embed"])
    return np.abs(np.asarray(jacobian)).sum(axis=-1)[..., :rows] > 0


def test_plain_forward_is_causal():
    tokens = jnp.arange(2 * 9).reshape(2, 9)
    probe = jnp.asarray(RNG.normal(size=V), jnp.float32)

    def outputs(embed):
        return bound(SPECS["full"])(parameters(SPECS["full"]) | {"embed": embed})(tokens) @ probe

    expected = np.zeros((2, 9, 18), bool)
    for p, t, s in np.ndindex(2, 9, 9):
        expected[p, t, tokens[p, s]] = s <= t
    np.testing.assert_array_equal(influence(outputs, 18), expected)


def test_completions_see_their_prompt_and_their_own_past_alone():
    prompts, tokens = jnp.arange(6).reshape(2, 3), jnp.arange(6, 22).reshape(2, 2, 4)
    length = jnp.asarray([3, 2])
    probe = jnp.asarray(RNG.normal(size=D), jnp.float32)

    def outputs(embed):
        decoder = bound(SPECS["full"])(parameters(SPECS["full"]) | {"embed": embed})
        return decoder.group_hidden(prompts, length, tokens) @ probe

    expected = np.zeros((2, 2, 4, 22), bool)
    for p, m, t in np.ndindex(2, 2, 4):
        expected[p, m, t, prompts[p, : length[p]]] = True
        expected[p, m, t, tokens[p, m, :t]] = True
    np.testing.assert_array_equal(influence(outputs, 22), expected)


# --- generating


def decoded_logits(name, capacities, **options):
    """Logits that predict each completion token, one token at a time through caches that grow on the way."""
    build, params = bound(SPECS[name], **options), parameters(SPECS[name])
    hidden, prompt_cache = jax.jit(lambda params: build(params).prefill(PROMPTS))(params)
    first = hidden[jnp.arange(P), LENGTH - 1] @ build(params).head_DV()

    @jax.jit
    def step(params, token, cache, filled):
        decoder = build(params)
        return decoder.decode(decoder.decode_inputs(LENGTH, 0, capacities[-1]), token, LENGTH, prompt_cache, cache, filled)

    outputs = [np.broadcast_to(first.astype(jnp.float32)[:, None], (P, M, V))]
    cache = build(params).empty_cache(P, M, capacities[0])
    for t in range(C - 1):
        if t in capacities:
            cache = build(params).grow_cache(cache, capacities[capacities.index(t) + 1])
        logits, cache = step(params, TOKENS[:, :, t], cache, jnp.int32(t))
        outputs.append(logits)
    return np.stack(outputs, axis=2)


@pytest.mark.parametrize("form", DECODE_FORMS)
@pytest.mark.parametrize("unroll", [False, True], ids=["scan", "unroll"])
def test_cached_decoding_equals_the_full_forward_token_by_token(form, unroll):
    close(decoded_logits("full", [4, 11], form=form, unroll=unroll), reference("full")[0])


# --- dtypes


@pytest.mark.parametrize("form", DECODE_FORMS)
def test_bfloat16_compute_stays_close_to_float32_on_every_way(form):
    name, exact = "full", reference("full")[0]
    options = {"form": form, "unroll": True, "compute_dtype": jnp.bfloat16}
    group = jax.jit(partial(group_logits, spec=SPECS[name], **options))(parameters(SPECS[name]), PROMPTS, TOKENS)
    for logits in (decoded_logits(name, [11], **options), group):
        assert logits.dtype == jnp.float32
        error = np.abs(np.asarray(logits) - exact)[OWN]
        assert error.mean() < 0.02 * exact[OWN].std()
        assert error.max() < 0.2 * exact[OWN].std()


# --- parameters


@pytest.mark.parametrize("name", SPECS)
def test_every_parameter_has_a_logical_axis_per_dimension_that_the_table_can_place(name):
    state = nnx.state(nnx.eval_shape(lambda: Decoder(SPECS[name], rngs=nnx.Rngs(0))))
    for _, variable in nnx.to_flat_state(state):
        axes = variable.get_metadata()["axes"]
        assert len(axes) == variable.get_value().ndim
        assert partition_spec(axes) is not None  # every name is in the table, and no two claim one mesh axis


def test_fresh_parameters_are_small_normals_with_norms_of_one_and_biases_of_zero():
    # Few different shapes, because each compiles its own random numbers.
    spec = replace(SPECS["full"], vocab_size=64, width=64, feed_forward=64, q_heads=4, kv_heads=4, head_size=16)
    params = nnx.to_pure_dict(nnx.state(Decoder(spec, rngs=nnx.Rngs(3), param_dtype=jnp.bfloat16)))
    for path, leaf in jax.tree.leaves_with_path(params):
        assert leaf.dtype == jnp.bfloat16
        name, value = path[-1].key, np.asarray(leaf, np.float64)
        if name.endswith(("_norm", "_bias")):
            np.testing.assert_array_equal(value, 1.0 if name.endswith("_norm") else 0.0)
        else:
            assert value.std() == pytest.approx(0.02, rel=0.1)
            assert abs(value.mean()) < 0.002


def test_layers_are_cut_apart_in_order():
    stacked = {"a": jnp.arange(12.0).reshape(3, 4), "b": {"c": jnp.arange(3)}}
    for index, layer in enumerate(unstack(stacked, 3)):
        np.testing.assert_array_equal(layer["a"], stacked["a"][index])
        assert layer["b"]["c"] == index


def test_gradients_of_unrolled_layers_are_joined_not_padded_to_the_whole_stack():
    def value(params):
        return group_logits(params, PROMPTS, TOKENS, spec=SPEC, unroll=True).sum()

    params = parameters(SPEC)
    stacked = {leaf.shape for leaf in jax.tree.leaves(params["layers"])}
    made = [
        (equation.primitive.name, equation.outvars[0].aval.shape)
        for equation in equations(jax.make_jaxpr(jax.grad(value))(params).jaxpr)
    ]
    assert stacked <= {shape for name, shape in made if name == "concatenate"}
    assert not [shape for name, shape in made if name in ("pad", "add_any", "add") and shape in stacked]
