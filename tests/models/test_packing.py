from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from pods_jax.models.decoder import Decoder
from pods_jax.models.packing import pack, packing, unpack
from pods_jax.models.spec import DecoderSpec

S, R, C, SPARE = 2, 3, 5, 4
LENGTHS = st.lists(st.integers(0, C), min_size=S * R, max_size=S * R).map(lambda x: np.reshape(x, (S, R)))


def packed_by_hand(x_SRC, length_SR, places):
    out = np.zeros((S, places, *x_SRC.shape[3:]), x_SRC.dtype)
    for s in range(S):
        tokens = [x_SRC[s, r, t] for r in range(R) for t in range(length_SR[s, r])]
        if tokens:
            out[s, : len(tokens)] = tokens
    return out


@settings(deadline=None, max_examples=30)
@given(LENGTHS, st.integers(0, SPARE))
def test_rows_lie_end_to_end_and_come_back(length_SR, spare):
    places = max(1, int(length_SR.sum(axis=1).max()) + spare)
    x_SRC = np.arange(1, S * R * C * 7 + 1, dtype=np.float32).reshape(S, R, C, 7)
    layout = packing(jnp.asarray(length_SR), C, places)
    packed = pack(jnp.asarray(x_SRC), layout)
    np.testing.assert_array_equal(packed, packed_by_hand(x_SRC, length_SR, places))
    inside = np.arange(C) < length_SR[..., None]
    np.testing.assert_array_equal(unpack(packed, layout), np.where(inside[..., None], x_SRC, 0))
    np.testing.assert_array_equal(layout.real_ST.sum(axis=1), length_SR.sum(axis=1))
    for s, r, t in np.argwhere(inside):
        place = layout.place_SRC[s, r, t]
        assert (layout.row_ST[s, place], layout.step_ST[s, place]) == (r, t)


def test_each_is_the_others_transpose():
    length_SR, places = jnp.asarray([[5, 0, 2], [1, 4, 3]]), 11
    layout = packing(length_SR, C, places)
    rng = np.random.default_rng(0)
    rows, places_ST = rng.normal(size=(S, R, C, 7)).astype(np.float32), rng.normal(size=(S, places, 7)).astype(np.float32)
    for forward, back, x, g in ((pack, unpack, rows, places_ST), (unpack, pack, places_ST, rows)):
        gradient = jax.vjp(lambda x, forward=forward: forward(x, layout), x)[1](jnp.asarray(g))[0]
        np.testing.assert_array_equal(gradient, back(jnp.asarray(g), layout))
        # <A x, g> = <x, A' g>
        np.testing.assert_allclose((forward(jnp.asarray(x), layout) * g).sum(), (x * np.asarray(gradient)).sum(), rtol=1e-5)


# --- the model on packed tokens


P, M, L = 4, 3, 7
SPEC = DecoderSpec(vocab_size=13, width=12, layers=2, q_heads=4, kv_heads=2, head_size=6, feed_forward=10, qkv_bias=True)


@pytest.mark.parametrize("options", [{"form": "rows", "unroll": True}, {"form": "dots", "remat": True}], ids=str)
@pytest.mark.parametrize("shards", [1, 2])
def test_packed_states_and_their_gradients_are_those_of_the_padded_forward(options, shards):
    rng = np.random.default_rng(3)
    graph, state = nnx.split(Decoder(SPEC, rngs=nnx.Rngs(0), **options))
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0.3, 0.4, x.shape), jnp.float32), nnx.to_pure_dict(state))
    prompt_PL = jnp.asarray(rng.integers(0, 13, (P, L)), jnp.int32)
    prompt_length_P = jnp.asarray([7, 2, 4, 1], jnp.int32)
    tokens_PMC = jnp.asarray(rng.integers(0, 13, (P, M, C)), jnp.int32)
    length_PM = jnp.asarray([[5, 1, 3], [2, 2, 0], [0, 0, 0], [4, 5, 1]], jnp.int32)
    places = int(length_PM.reshape(shards, -1).sum(axis=1).max()) + 2
    layout = packing(length_PM.reshape(shards, -1), C, places)
    weight = jnp.asarray(rng.normal(size=(P, M, C, SPEC.width)), jnp.float32)
    inside = (np.arange(C) < np.asarray(length_PM)[..., None])[..., None]

    def padded(params):
        states = nnx.merge(graph, params).group_hidden(prompt_PL, prompt_length_P, tokens_PMC)
        states = jnp.where(inside, states, 0)
        return (weight * states).sum(), states

    def packed(params):
        states = nnx.merge(graph, params).packed_hidden(prompt_PL, prompt_length_P, tokens_PMC, layout)
        states = unpack(states, layout).reshape(P, M, C, -1)
        return (weight * states).sum(), states

    (expected, gradient), states = (jax.jit(partial(jax.value_and_grad(f, has_aux=True)))(params) for f in (padded, packed))
    np.testing.assert_allclose(states[0][1], expected[1], atol=1e-5)
    for a, b in zip(jax.tree.leaves(states[1]), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
