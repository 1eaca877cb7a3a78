import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from pods_jax.models import attention
from pods_jax.models.attention import DECODE_FORMS, decode_form

P, N, L, S, K, G, H = 3, 5, 7, 11, 2, 4, 6
Q = K * G
LENGTH = jnp.asarray([7, 1, 4])
prompt_attention = jax.jit(jaxtyped(typechecker=beartype)(attention.prompt_attention))
completion_attention = jax.jit(jaxtyped(typechecker=beartype)(attention.completion_attention))


def normal(*shape, seed, scale=1.0, dtype=jnp.float32):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), dtype)


def attend64(q_QH, k_SKH, v_SKH):
    """One query token over the keys it sees, head by head, in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q_QH, k_SKH, v_SKH))
    out = np.zeros(q.shape)
    for head in range(q.shape[0]):
        scores = k[:, head // G] @ q[head] / np.sqrt(H)
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ v[:, head // G]
    return out


@pytest.fixture(scope="module")
def prompt():
    return normal(P, L, Q, H, seed=0), normal(P, L, K, H, seed=1), normal(P, L, K, H, seed=2)


def scrambled(cache, valid, value=1e4):
    """The same cache with large numbers where ``valid`` is false."""
    return jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, cache.ndim))), cache, value)


# --- whole sequences


def test_a_prompt_attends_causally_to_itself(prompt):
    q, k, v = prompt
    out = prompt_attention(q, k, v)
    for p, t in np.ndindex(P, L):
        np.testing.assert_allclose(out[p, t], attend64(q[p, t], k[p, : t + 1], v[p, : t + 1]), atol=1e-5)


def test_completions_attend_to_the_prompt_and_causally_to_themselves(prompt):
    _, prompt_k, prompt_v = prompt
    q, k, v = normal(P, N, S, Q, H, seed=3), normal(P, N, S, K, H, seed=4), normal(P, N, S, K, H, seed=5)
    out = completion_attention(q, k, v, prompt_k, prompt_v, LENGTH)
    for p, n, t in np.ndindex(P, N, S):
        seen = [np.concatenate([a[p, : LENGTH[p]], b[p, n, : t + 1]]) for a, b in ((prompt_k, k), (prompt_v, v))]
        np.testing.assert_allclose(out[p, n, t], attend64(q[p, n, t], *seen), atol=1e-5)


def test_what_stands_in_the_prompts_padding_changes_nothing(prompt):
    _, prompt_k, prompt_v = prompt
    own = normal(P, N, S, Q, H, seed=3), normal(P, N, S, K, H, seed=4), normal(P, N, S, K, H, seed=5)
    valid = jnp.arange(L)[None] < LENGTH[:, None]
    garbage = scrambled(prompt_k, valid), scrambled(prompt_v, valid, -1e4)
    np.testing.assert_array_equal(
        completion_attention(*own, *garbage, LENGTH), completion_attention(*own, prompt_k, prompt_v, LENGTH)
    )


def test_huge_scores_neither_overflow_nor_lose_the_other_part(prompt):
    _, prompt_k, prompt_v = prompt
    q, k, v = normal(P, N, S, Q, H, seed=3, scale=300.0), normal(P, N, S, K, H, seed=4), normal(P, N, S, K, H, seed=5)
    out = completion_attention(q, k, v, prompt_k, prompt_v, LENGTH)
    seen = [np.concatenate([a[0], b[0, 2]]) for a, b in ((prompt_k, k), (prompt_v, v))]
    np.testing.assert_allclose(out[0, 2, S - 1], attend64(q[0, 2, S - 1], *seen), atol=1e-3)


# --- one token at a time


@pytest.fixture(scope="module")
def token():
    """New token's q, k, v and a filled history of own keys and values."""
    return (
        (normal(P, N, Q, H, seed=6), normal(P, N, K, H, seed=7), normal(P, N, K, H, seed=8)),
        (normal(P, N, S, K, H, seed=9), normal(P, N, S, K, H, seed=10)),
    )


def put(form, cache, token, slot):
    """The cache once a token of these keys and values has passed."""
    k, v = token
    q, prompt = jnp.zeros((P, N, Q, H), k.dtype), jnp.zeros((P, L, K, H), k.dtype)
    _, new = form.attend(q, k, v, form.prompt_cache(prompt, prompt), LENGTH, cache, jnp.int32(slot))
    return form.write(cache, new, jnp.int32(slot))


def written(form, history, filled, capacity, dtype=jnp.float32):
    """A cache made as the engine makes it: token by token, grown on the way where the capacity allows."""
    cache = form.empty_cache(P, N, min(3, capacity), K, H, dtype)
    cache = jax.tree.map(lambda a: jnp.full_like(a, 1e4), cache)
    for slot in range(filled):
        if slot == 3:
            cache = form.grow(cache, capacity)
        cache = put(form, cache, [a[:, :, slot] for a in history], slot)
    return form.grow(cache, capacity) if filled <= 3 else cache


@pytest.mark.parametrize("filled", [0, 1, 3, 8, S])
@pytest.mark.parametrize("name", DECODE_FORMS)
def test_a_new_token_attends_to_prompt_history_and_itself(name, filled, prompt, token):
    form = DECODE_FORMS[name]
    _, prompt_k, prompt_v = prompt
    (q, k, v), history = token
    cache = written(form, history, filled, S + 1)
    out, _ = form.attend(q, k, v, form.prompt_cache(prompt_k, prompt_v), LENGTH, cache, jnp.int32(filled))
    assert out.shape == q.shape
    for p, n in np.ndindex(P, N):
        seen = [
            np.concatenate([a[p, : LENGTH[p]], b[p, n, :filled], c[p, n][None]])
            for a, b, c in ((prompt_k, history[0], k), (prompt_v, history[1], v))
        ]
        np.testing.assert_allclose(out[p, n], attend64(q[p, n], *seen), atol=1e-5)


@pytest.mark.parametrize("name", DECODE_FORMS)
def test_padding_of_the_prompt_and_empty_slots_change_nothing(name, prompt, token):
    form = DECODE_FORMS[name]
    _, prompt_k, prompt_v = prompt
    (q, k, v), history = token
    cache = form.empty_cache(P, N, S, K, H, jnp.float32)
    garbage = jax.tree.map(lambda a: jnp.full_like(a, -1e4), cache)
    for slot in range(4):
        cache, garbage = (put(form, c, [a[:, :, slot] for a in history], slot) for c in (cache, garbage))
    valid = jnp.arange(L)[None] < LENGTH[:, None]
    clean, _ = form.attend(q, k, v, form.prompt_cache(prompt_k, prompt_v), LENGTH, cache, jnp.int32(4))
    dirty_prompt = form.prompt_cache(scrambled(prompt_k, valid), scrambled(prompt_v, valid, -1e4))
    np.testing.assert_array_equal(form.attend(q, k, v, dirty_prompt, LENGTH, garbage, jnp.int32(4))[0], clean)


@pytest.mark.parametrize("name", DECODE_FORMS)
def test_growing_keeps_the_written_tokens(name, prompt, token):
    form = DECODE_FORMS[name]
    _, prompt_k, prompt_v = prompt
    new, history = token
    cache = written(form, history, 5, 6)
    args = (*new, form.prompt_cache(prompt_k, prompt_v), LENGTH)
    grown, _ = form.attend(*args, form.grow(cache, 13), jnp.int32(5))
    np.testing.assert_allclose(grown, form.attend(*args, cache, jnp.int32(5))[0], atol=1e-6)
    sizes = [sum(a.size for a in jax.tree.leaves(c)) for c in (cache, form.grow(cache, 13))]
    assert sizes == [2 * P * N * K * H * capacity for capacity in (6, 13)]


@pytest.mark.parametrize("tile", [1, 4, S, 128])
@pytest.mark.parametrize("name", DECODE_FORMS)
def test_a_write_lands_in_its_slot_and_moves_nothing_else(name, tile, token, monkeypatch):
    monkeypatch.setattr(attention, "WRITE_TILE", tile)
    form = DECODE_FORMS[name]
    (_, k, v), _ = token
    token_axes = (2, 2) if name == "dots" else (4, 3)
    empty = form.empty_cache(P, N, S, K, H, jnp.float32)
    filler = [normal(*cache.shape, seed=seed) for seed, cache in enumerate(empty)]
    for slot in range(S):
        written_now = put(form, tuple(filler), (k, v), slot)
        for new, before, after, axis in zip((k, v), filler, written_now, token_axes, strict=True):
            after, before = (np.moveaxis(np.asarray(a), axis, 0) for a in (after, before))
            np.testing.assert_array_equal(after[slot], new)
            np.testing.assert_array_equal(np.delete(after, slot, axis=0), np.delete(before, slot, axis=0))


@pytest.mark.parametrize("name", DECODE_FORMS)
def test_huge_scores_of_any_part_are_stable(name, prompt, token):
    form = DECODE_FORMS[name]
    _, prompt_k, prompt_v = prompt
    (q, k, v), history = token
    cache = written(form, history, 4, S)
    out, _ = form.attend(300 * q, k, v, form.prompt_cache(prompt_k, prompt_v), LENGTH, cache, jnp.int32(4))
    for p, n in np.ndindex(P, N):
        seen = [
            np.concatenate([a[p, : LENGTH[p]], b[p, n, :4], c[p, n][None]])
            for a, b, c in ((prompt_k, history[0], k), (prompt_v, history[1], v))
        ]
        np.testing.assert_allclose(out[p, n], attend64(300 * q[p, n], *seen), atol=1e-3)


@pytest.mark.parametrize("name", DECODE_FORMS)
def test_scores_of_bfloat16_heads_are_float32(name):
    """Rounded products would move the log-probabilities; only the inputs and the result may carry bfloat16's rounding."""
    form, dtype = DECODE_FORMS[name], jnp.bfloat16
    q, k = normal(P, N, Q, H, seed=6, scale=4, dtype=dtype), normal(P, N, K, H, seed=7, dtype=dtype)
    # Values of 1 for the first own token and 0 elsewhere: the result is that token's weight.
    v, prompt = jnp.zeros((P, N, K, H), dtype), jnp.zeros((P, L, K, H), dtype)
    history = normal(P, N, S, K, H, seed=9, dtype=dtype), jnp.zeros((P, N, S, K, H), dtype).at[:, :, 0].set(1)
    cache = written(form, history, S, S + 1, dtype)
    out, _ = form.attend(q, k, v, form.prompt_cache(prompt, prompt), LENGTH, cache, jnp.int32(S))
    assert out.dtype == dtype
    scaled = np.asarray(q * H**-0.5, np.float64) * np.sqrt(H)  # every form rounds the scaled queries once
    for p, n in np.ndindex(P, N):
        seen = [np.concatenate([prompt[p, : LENGTH[p]], b[p, n], c[p, n][None]]) for b, c in ((history[0], k), (history[1], v))]
        np.testing.assert_allclose(np.float64(out[p, n]), attend64(scaled[p, n], *seen), rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu", "cuda"])
def test_the_form_follows_the_backend_and_the_layer_loop(platform, unroll):
    form = decode_form(platform, unroll)
    assert form == ("dots" if platform != "cpu" else "rows" if unroll else "stacked_rows")
    assert form in DECODE_FORMS
