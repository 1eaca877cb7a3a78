import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from pods_jax.models import layers
from pods_jax.models.spec import DecoderSpec, Llama3Rope

checked = jaxtyped(typechecker=beartype)
rms_norm, rotate = checked(layers.rms_norm), checked(layers.rotate)
rotary_frequencies, rotary_tables = checked(layers.rotary_frequencies), checked(layers.rotary_tables)

SPEC = DecoderSpec(vocab_size=7, width=8, layers=1, q_heads=1, kv_heads=1, head_size=64, feed_forward=8, rope_theta=500_000.0)
LLAMA3 = replace(SPEC, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 8192))


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def float64(x):
    return np.asarray(x, np.float64)


# --- RMSNorm


@pytest.mark.parametrize("shape", [(13,), (5, 13), (2, 3, 5, 13)])
def test_rms_norm_equals_its_formula(shape):
    x, scale = normal(*shape), normal(13, seed=1)
    expected = float64(x) / np.sqrt((float64(x) ** 2).mean(-1, keepdims=True) + 1e-5) * float64(scale)
    np.testing.assert_allclose(rms_norm(x, scale, 1e-5), expected, atol=1e-6)


def test_epsilon_stands_inside_the_root():
    x = jnp.full(4, 1e-4, jnp.float32)
    np.testing.assert_allclose(rms_norm(x, jnp.ones(4), 1e-6), 1e-4 / math.sqrt(1e-8 + 1e-6), rtol=1e-5)
    np.testing.assert_array_equal(rms_norm(jnp.zeros(4), jnp.ones(4), 1e-6), 0)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    x = 100 * normal(3, 256, dtype=jnp.bfloat16)
    result = rms_norm(x, jnp.ones(256, jnp.bfloat16), 1e-6)
    assert result.dtype == jnp.bfloat16
    expected = float64(x) / np.sqrt((float64(x) ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(float64(result), expected, rtol=2.0**-8)


# --- rotary positions


def test_rotary_frequencies_equal_their_formula():
    expected = 500_000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(rotary_frequencies(SPEC), expected, rtol=1e-5)


def test_llama3_scaling_stretches_long_waves_keeps_short_ones_and_blends_between():
    expected, kinds = [], set()
    for frequency in 500_000.0 ** (-np.arange(0, 64, 2) / 64):
        wavelength = 2 * math.pi / frequency
        if wavelength > 8192 / 1.0:
            expected.append(frequency / 8.0)
            kinds.add("stretched")
        elif wavelength < 8192 / 4.0:
            expected.append(frequency)
            kinds.add("kept")
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
            kinds.add("blended")
    assert kinds == {"stretched", "kept", "blended"}
    np.testing.assert_allclose(rotary_frequencies(LLAMA3), expected, rtol=1e-5)


@pytest.mark.parametrize("spec", [SPEC, LLAMA3], ids=["plain", "llama3"])
def test_rotary_tables_hold_the_angle_of_every_position(spec):
    positions = jnp.asarray([[0, 1, 7], [100, 4095, 8191]])
    cosine, sine = rotary_tables(positions, spec)
    angle = float64(positions)[..., None] * float64(rotary_frequencies(spec))
    np.testing.assert_allclose(cosine, np.cos(angle), atol=1e-3)  # float32 angles: 8191 radians to 24 bits
    np.testing.assert_allclose(sine, np.sin(angle), atol=1e-3)
    np.testing.assert_allclose(cosine[0], np.cos(angle[0]), atol=1e-6)


def test_rotation_turns_each_pair_of_halves_by_its_angle():
    x, positions = normal(2, 3, 5, 64), jnp.asarray([[0, 3, 11], [2, 29, 31]])
    rotated = rotate(x, *rotary_tables(positions, SPEC))
    angle = float64(positions)[..., None, None] * 500_000.0 ** (-np.arange(0, 64, 2) / 64)
    turned = (float64(x)[..., :32] + 1j * float64(x)[..., 32:]) * np.exp(1j * angle)
    np.testing.assert_allclose(rotated, np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-5)
    np.testing.assert_array_equal(rotated[0, 0], x[0, 0])


def test_scores_of_rotated_heads_depend_on_the_distance_alone():
    q, k = normal(1, 1, 64), normal(1, 1, 64, seed=1)

    def score(at, to):
        q_at, k_to = (rotate(a, *rotary_tables(jnp.asarray([p]), LLAMA3)) for a, p in ((q, at), (k, to)))
        return float((q_at * k_to).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_rotation_keeps_the_dtype():
    assert rotate(normal(3, 2, 64, dtype=jnp.bfloat16), *rotary_tables(jnp.arange(3), SPEC)).dtype == jnp.bfloat16
