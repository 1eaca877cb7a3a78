import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from pods_jax.algorithm import masked

checked = jaxtyped(typechecker=beartype)
length_mask, usable, safe_divide = checked(masked.length_mask), checked(masked.usable), checked(masked.safe_divide)
masked_sum, masked_mean = checked(masked.masked_sum), checked(masked.masked_mean)
masked_centre, masked_variance = checked(masked.masked_centre), checked(masked.masked_variance)

REDUCTIONS = [masked_sum, masked_mean, lambda x, mask: masked_centre(x, mask).sum(), masked_variance]


def test_length_mask_is_true_up_to_the_length():
    mask = length_mask(jnp.array([[0, 2], [3, 5]]), 3)
    np.testing.assert_array_equal(mask, [[[0, 0, 0], [1, 1, 0]], [[1, 1, 1], [1, 1, 1]]])


def test_usable_leaves_out_what_is_not_finite():
    x = jnp.array([1, jnp.nan, jnp.inf, -jnp.inf, 2.0])
    np.testing.assert_array_equal(usable(x, jnp.array([1, 1, 1, 1, 0], bool)), [1, 0, 0, 0, 0])


def test_dividing_by_an_empty_count_gives_zero():
    np.testing.assert_array_equal(safe_divide(jnp.array([6.0, 5.0]), jnp.array([4, 0])), [1.5, 0])
    np.testing.assert_array_equal(safe_divide(jnp.array(jnp.nan), jnp.array(0)), 0)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("rubbish", [0.0, jnp.nan, jnp.inf])
def test_an_empty_mask_gives_zero_with_zero_gradient(reduce, rubbish):
    x, mask = jnp.full(5, rubbish), jnp.zeros(5, bool)
    value, gradient = jax.value_and_grad(reduce)(x, mask)
    assert value == 0
    np.testing.assert_array_equal(gradient, jnp.zeros(5))


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_masked_out_equals_dropped_in_value_and_gradient(reduce):
    x = jnp.array([0.3, jnp.nan, -1.2, jnp.inf, 2.5, 0.7, -jnp.inf])
    mask = jnp.isfinite(x)
    value, gradient = jax.value_and_grad(reduce)(x, mask)
    value_dropped, gradient_dropped = jax.value_and_grad(reduce)(x[mask], jnp.ones(4, bool))
    np.testing.assert_allclose(value, value_dropped, atol=1e-6)
    np.testing.assert_allclose(gradient[mask], gradient_dropped, atol=1e-6)
    np.testing.assert_array_equal(gradient[~mask], 0)


def test_reductions_along_an_axis_equal_numpy():
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(3, 5, 7)), rng.random((3, 5, 7)) < 0.6
    array = np.ma.masked_array(x, ~mask)
    x32 = jnp.asarray(x, jnp.float32)
    np.testing.assert_allclose(masked_sum(x32, jnp.asarray(mask), 1), array.sum(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(masked_mean(x32, jnp.asarray(mask), 1), array.mean(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(masked_variance(x32, jnp.asarray(mask), 2), array.var(2), rtol=1e-5)
    np.testing.assert_allclose(masked_variance(x32, jnp.asarray(mask), 2, ddof=1), array.var(2, ddof=1), rtol=1e-5)


def test_sample_variance_of_one_entry_is_zero():
    assert masked_variance(jnp.array([3.0, 9.0]), jnp.array([True, False]), ddof=1) == 0


def test_centring_keeps_a_small_spread_on_a_large_offset():
    steps = np.arange(64) % 5 - 2.0
    x = jnp.asarray(1e4 + steps * 2**-10, jnp.float32)
    centred = masked_centre(x, jnp.ones(64, bool))
    np.testing.assert_allclose(centred, (steps - steps.mean()) * 2**-10, rtol=1e-4)


def test_half_precision_is_summed_in_float32():
    total = masked_sum(jnp.ones(1000, jnp.bfloat16), jnp.ones(1000, bool))
    assert total.dtype == jnp.float32
    assert total == 1000
