from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped

from pods_jax.rollout import sampling
from pods_jax.rollout.sampling import BLOCK, sampling_params

uniforms = jax.jit(jaxtyped(typechecker=beartype)(sampling.uniforms))
checked_sample = jaxtyped(typechecker=beartype)(sampling.sample)
truncate = jax.jit(jaxtyped(typechecker=beartype)(sampling.truncate))
inverse_cdf = jax.jit(jaxtyped(typechecker=beartype)(sampling.inverse_cdf))


@jax.jit
def sample(logits, keys, params):
    """Draws with the numbers that the rows' keys give for position 0."""
    return checked_sample(jnp.asarray(logits), uniforms(keys, jnp.arange(1))[0], params)


DRAWS = 16_384
LAST_UNIFORM = np.float32(1 - 2.0**-24)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.08},
    "top_k and top_p": {"temperature": 0.8, "top_k": 6, "top_p": 0.75},
    "all": {"temperature": 1.3, "top_k": 9, "top_p": 0.95, "min_p": 0.05},
}


def kept_by_sorting(relative, top_k, top_p, min_p):
    """Which entries of one row may be drawn: the definition, with a sort, in float64."""
    relative = np.asarray(relative, np.float64)
    kept = np.ones(len(relative), bool)
    if top_k:
        kept &= relative >= np.sort(relative)[::-1][min(top_k, len(relative)) - 1]
    if top_p < 1:
        values = np.unique(relative[kept])[::-1]
        mass = np.array([relative[relative >= value].sum() for value in values])
        kept &= relative >= values[np.argmax(mass >= np.float64(np.float32(top_p)) * relative[kept].sum())]
    return kept & (relative >= np.float64(np.float32(min_p)))


def logits_of(vocab, seed=0):
    return np.random.default_rng(seed).normal(scale=1.5, size=vocab).astype(np.float32)


def target_distribution(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    relative = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    mass = relative * kept_by_sorting(relative, top_k, top_p, min_p)
    return mass / mass.sum()


def chi_square_limit(freedom):
    """Exceeded once in ten thousand times by chance (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.72 * np.sqrt(part)) ** 3


# --- the distribution


@pytest.mark.parametrize("vocab", [11, BLOCK, 2 * BLOCK + 45])
@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_truncated_distribution(name, vocab):
    logits = logits_of(vocab)
    expected = DRAWS * target_distribution(logits, **SETTINGS[name])
    keys = jax.random.split(jax.random.key(vocab), DRAWS)
    tokens, _ = sample(np.broadcast_to(logits, (DRAWS, vocab)), keys, sampling_params(**SETTINGS[name]))
    counts = np.bincount(np.asarray(tokens), minlength=vocab)

    assert counts[expected == 0].sum() == 0
    rare = expected < 10
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    expected, counts = expected[expected > 0], counts[expected > 0]
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(len(expected) - 1)


def test_logp_is_that_of_the_whole_temperature_scaled_softmax():
    vocab, rows = BLOCK + 27, 64
    logits = np.stack([logits_of(vocab, seed) for seed in range(rows)])
    keys = jax.random.split(jax.random.key(0), rows)
    for params in SETTINGS.values():
        tokens, logp = sample(logits, keys, sampling_params(**params))
        scaled = logits.astype(np.float64) / params["temperature"]
        expected = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
        np.testing.assert_allclose(logp, expected[np.arange(rows), np.asarray(tokens)], atol=1e-5)


def test_temperature_zero_takes_the_most_probable_token_and_its_logp_at_temperature_one():
    logits = np.stack([logits_of(BLOCK + 27, seed) for seed in range(16)])
    truncations: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}]
    for truncation in truncations:
        tokens, logp = sample(logits, jax.random.split(jax.random.key(0), 16), sampling_params(temperature=0.0, **truncation))
        np.testing.assert_array_equal(tokens, logits.argmax(axis=-1))
        np.testing.assert_allclose(logp, jax.nn.log_softmax(logits).max(axis=-1), atol=1e-5)


def test_top_k_of_one_is_greedy_at_any_temperature():
    logits = np.stack([logits_of(37, seed) for seed in range(16)])
    tokens, _ = sample(logits, jax.random.split(jax.random.key(0), 16), sampling_params(temperature=2.0, top_k=1))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=-1))


def test_large_logits_neither_overflow_nor_lose_the_logp():
    logits = np.array([[1e4, 1e4 - 1, -1e4, -np.inf]], np.float32)
    tokens, logp = sample(np.repeat(logits, 200, 0), jax.random.split(jax.random.key(0), 200), sampling_params(temperature=1.0))
    share = 1 / (1 + np.exp(-1))
    assert set(np.asarray(tokens).tolist()) == {0, 1}
    np.testing.assert_allclose(logp, np.log(np.where(np.asarray(tokens) == 0, share, 1 - share)), atol=1e-5)


# --- keys


def test_a_token_depends_on_its_key_and_logits_alone():
    logits = np.stack([logits_of(41, seed) for seed in range(30)])
    keys = jax.random.split(jax.random.key(5), 30)
    params = sampling_params(temperature=1.0, top_p=0.9)
    tokens, logp = (np.asarray(x) for x in sample(logits, keys, params))
    reversed_tokens, reversed_logp = sample(logits[::-1], keys[::-1], params)
    np.testing.assert_array_equal(reversed_tokens, tokens[::-1])
    np.testing.assert_array_equal(reversed_logp, logp[::-1])
    np.testing.assert_array_equal(sample(logits[7:9], keys[7:9], params)[0], tokens[7:9])
    np.testing.assert_array_equal(sample(logits.reshape(5, 6, 41), keys.reshape(5, 6), params)[0], tokens.reshape(5, 6))


def test_other_keys_give_other_tokens():
    logits = np.broadcast_to(logits_of(41), (64, 41))
    params = sampling_params(temperature=1.0)
    first, second = (np.asarray(sample(logits, jax.random.split(jax.random.key(k), 64), params)[0]) for k in (0, 1))
    assert (first != second).any()
    assert len(set(first.tolist())) > 5


def test_every_row_and_position_has_a_number_of_its_own_whichever_are_asked_for_together():
    keys = jax.random.split(jax.random.key(3), (5, 7))
    drawn = np.asarray(uniforms(keys, jnp.arange(11)))
    assert drawn.shape == (11, 5, 7)
    assert len(np.unique(drawn)) == drawn.size
    assert (drawn >= 0).all()
    assert (drawn < 1).all()
    np.testing.assert_array_equal(uniforms(keys[2:3, 4:], jnp.arange(6, 9)), drawn[6:9, 2:3, 4:])
    np.testing.assert_array_equal(drawn[8, 1, 2], jax.random.uniform(jax.random.fold_in(keys[1, 2], 8)))


def test_changed_parameters_do_not_recompile():
    draw: Any = jax.jit(sampling.sample)
    logits, uniform = np.broadcast_to(logits_of(13), (3, 13)), np.array([0.1, 0.5, 0.9], np.float32)
    for params in [*SETTINGS.values(), {"temperature": 0.0}, {"temperature": 1}]:
        draw(logits, uniform, sampling_params(**params))
    assert draw._cache_size() == 1


# --- truncation


@settings(deadline=None, max_examples=150)
@given(
    row=st.lists(st.integers(0, 16), min_size=8, max_size=8),
    place=st.integers(0, 200),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 9, 150, 300]),
    top_p=st.integers(1, 256).map(lambda i: i / 256),
    min_p=st.sampled_from([0.0, 0.0, 1 / 64, 4 / 64, 5 / 64]),
)
def test_truncation_equals_the_definition_by_sorting(row, place, top_k, top_p, min_p):
    # Multiples of 1/64 that sum to 4: ties, and masses that meet top_p exactly, are decided and not left to rounding.
    relative = np.zeros(201, np.float32)
    relative[:9] = [64, *row]
    relative[9 : 9 + 256 - 64 - sum(row)] = 1
    relative = np.roll(relative / 64, place)
    result = truncate(relative[None], sampling_params(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p))
    np.testing.assert_array_equal(result[0], np.where(kept_by_sorting(relative, top_k, top_p, min_p), relative, 0))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), top_k=st.integers(1, 200), spread=st.sampled_from([1e-3, 1.0, 10.0]))
def test_top_k_keeps_exactly_k_of_any_distinct_floats(seed, top_k, spread):
    logits = np.random.default_rng(seed).normal(scale=spread, size=197)
    relative = np.exp(logits - logits.max()).astype(np.float32)
    kept = np.asarray(truncate(relative[None], sampling_params(temperature=1.0, top_k=top_k)))[0]
    np.testing.assert_array_equal(kept, np.where(kept_by_sorting(relative, top_k, 1.0, 0.0), relative, 0))
    if len(np.unique(relative)) == 197:
        assert (kept > 0).sum() == min(top_k, 197)


def test_hand_worked_truncations():
    relative = np.array([[0.25, 1.0, 0.5, 0.25, 0.0]], np.float32)

    def kept(**truncation):
        return np.flatnonzero(truncate(relative, sampling_params(temperature=1.0, **truncation))[0]).tolist()

    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=2) == [1, 2]
    assert kept(top_k=3) == [0, 1, 2, 3]  # the third is tied with the fourth
    assert kept(top_p=0.5) == [1]  # 1.0 of 2.0 reaches it exactly
    assert kept(top_p=0.51) == [1, 2]
    assert kept(top_k=2, top_p=0.7) == [1, 2]  # of the 1.5 that top-k leaves
    assert kept(top_k=2, top_p=0.66) == [1]
    assert kept(min_p=0.25) == [0, 1, 2, 3]
    assert kept(min_p=0.26) == [1, 2]
    assert kept(top_k=1, top_p=0.99, min_p=0.01) == [1]


# --- the draw


@settings(deadline=None, max_examples=150)
@given(
    row=st.lists(st.integers(0, 3), min_size=BLOCK + 8, max_size=BLOCK + 8),
    place=st.integers(0, BLOCK + 7),
    uniform=st.integers(0, 2**12 - 1),
)
def test_the_draw_inverts_the_cumulative_distribution(row, place, uniform):
    mass = np.asarray(row, np.float32)
    mass[place] += 1
    # 2^11 quanta and 2^12 uniforms: every product is exact in float32.
    mass[-1] += 2**11 - mass.sum()
    expected = np.searchsorted(np.cumsum(mass), uniform / 2**12 * 2**11, side="right")
    assert int(inverse_cdf(mass[None], np.asarray([uniform / 2**12], np.float32))[0]) == expected


@pytest.mark.parametrize("vocab", [1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_the_ends_of_the_uniform_range_draw_the_first_and_last_token_with_mass(vocab):
    rng = np.random.default_rng(vocab)
    for _ in range(5):
        first, last = np.sort(rng.integers(0, vocab, 2))
        mass = np.zeros((2, vocab), np.float32)
        mass[:, first : last + 1] = rng.random(last + 1 - first) * (rng.random(last + 1 - first) < 0.3)
        mass[:, [first, last]] = rng.random() + 0.1
        np.testing.assert_array_equal(inverse_cdf(mass, np.asarray([0.0, LAST_UNIFORM])), [first, last])


def test_tokens_without_mass_are_never_drawn_from_a_large_vocabulary():
    # Rounding steps of the cumulative sum at empty blocks are where a careless draw lands: aim at every block's end.
    blocks = 1188
    rng = np.random.default_rng(0)
    mass = rng.random((blocks, BLOCK), np.float32) * (rng.random((blocks, 1)) < 0.5)
    ends = np.cumsum(mass.sum(axis=1, dtype=np.float64))
    uniform = (ends[:, None] / ends[-1] + np.arange(-4, 5) * 2.0**-24).astype(np.float32).clip(0, LAST_UNIFORM).ravel()
    mass = jnp.asarray(mass.ravel())
    tokens = jax.jit(jax.vmap(partial(sampling.inverse_cdf, mass)))(uniform)
    assert (mass[tokens] > 0).all()


def test_rows_are_drawn_from_independently():
    mass = np.eye(7, dtype=np.float32)[[3, 6, 0, 2]].reshape(2, 2, 7)
    np.testing.assert_array_equal(inverse_cdf(mass, np.full((2, 2), 0.3, np.float32)), [[3, 6], [0, 2]])
