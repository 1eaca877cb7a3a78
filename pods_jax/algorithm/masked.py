"""Reductions over a mask, and the one place that says what an empty mask gives: 0.

What a masked-out entry holds never matters, NaN and infinity included, neither to a value nor to a gradient. Sums run in
float32 at least.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num


def length_mask(length: Int[Array, "*B"], size: int) -> Bool[Array, "*B size"]:
    """True at positions ``0 .. length-1`` of a new last axis of ``size`` positions."""
    position = jax.lax.broadcasted_iota(length.dtype, (*length.shape, size), length.ndim)
    return position < length[..., None]


def usable(x: Float[Array, "*B"], mask: Bool[Array, "*B"]) -> Bool[Array, "*B"]:
    """The mask without the entries where ``x`` is NaN or infinite."""
    return mask & jnp.isfinite(x)


def safe_divide(total: Num[Array, "*B"], count: Num[Array, "*B"]) -> Float[Array, "*B"]:
    """``total / count``, and 0 where ``count`` is 0."""
    some = count > 0
    return jnp.where(some, total, 0) / jnp.where(some, count, 1)


def masked_sum(
    x: Num[Array, "..."], mask: Bool[Array, "..."], axis: int | None = None, *, keepdims: bool = False
) -> Float[Array, "..."]:
    """Sum of ``x`` where ``mask``."""
    return jnp.sum(_inside(x, mask), axis=axis, keepdims=keepdims)


def masked_mean(
    x: Num[Array, "..."], mask: Bool[Array, "..."], axis: int | None = None, *, keepdims: bool = False
) -> Float[Array, "..."]:
    """Mean of ``x`` where ``mask``."""
    count = jnp.sum(mask, axis=axis, keepdims=keepdims)
    return safe_divide(masked_sum(x, mask, axis, keepdims=keepdims), count)


def masked_centre(x: Float[Array, "..."], mask: Bool[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """``x`` minus its mean along ``axis`` where ``mask``, and 0 elsewhere.

    The smallest entry is subtracted before the mean is taken, so that rounding depends on the spread of ``x`` and not on its
    offset: the plain float32 mean of rewards near 1e4 is off by more than a spread of 1e-3.
    """
    inside = _inside(x, mask)
    # The result does not depend on what is subtracted, so neither does its gradient.
    smallest = jax.lax.stop_gradient(jnp.min(inside, axis=axis, keepdims=True, where=mask, initial=jnp.inf))
    shifted = jnp.where(mask, inside - smallest, 0)
    return jnp.where(mask, shifted - masked_mean(shifted, mask, axis, keepdims=True), 0)


def masked_variance(x: Float[Array, "..."], mask: Bool[Array, "..."], axis: int = -1, *, ddof: int = 0) -> Float[Array, "..."]:
    """Variance of ``x`` along ``axis`` where ``mask``, with divisor ``count - ddof``; 0 where that is not positive."""
    squares = jnp.square(masked_centre(x, mask, axis))
    return safe_divide(jnp.sum(squares, axis=axis), jnp.sum(mask, axis=axis) - ddof)


def _inside(x: Num[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where(mask, x, 0).astype(jnp.promote_types(x.dtype, jnp.float32))
