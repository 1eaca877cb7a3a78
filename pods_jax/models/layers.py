"""The pieces of a decoder layer that look at one token at a time: RMSNorm and rotary positions."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pods_jax.models.spec import DecoderSpec, Llama3Rope


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """Returns ``x / sqrt(mean(x^2) + eps) * scale``, computed in float32, in the dtype of ``x``.

    Reference: Root Mean Square Layer Normalization, arXiv 1910.07467, equation 4.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed.astype(x.dtype) * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))).astype(x.dtype)


def rotary_frequencies(spec: DecoderSpec) -> Float[Array, "half"]:
    """Returns the angle per position of each rotated pair, in radians: ``theta^(-2i/H)``, rescaled for Llama 3.1 and later."""
    exponent = jnp.arange(0, spec.head_size, 2, dtype=jnp.float32) / spec.head_size
    frequency = 1.0 / (spec.rope_theta**exponent)
    return frequency if spec.rope_scaling is None else _llama3(frequency, spec.rope_scaling)


def _llama3(frequency: Float[Array, "half"], scaling: Llama3Rope) -> Float[Array, "half"]:
    # Long wavelengths are stretched by the factor, short ones kept, and the band between is blended linearly.
    wavelength = 2.0 * math.pi / frequency
    blend = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = jnp.clip(blend, 0.0, 1.0)
    return (1.0 - blend) * frequency / scaling.factor + blend * frequency


def rotary_tables(positions: Int[Array, "..."], spec: DecoderSpec) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
    """Returns the float32 cosine and sine of every position's angles, which all layers of a forward pass share."""
    angle = positions[..., None].astype(jnp.float32) * jnp.expand_dims(rotary_frequencies(spec), tuple(range(positions.ndim)))
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "... heads H"], cosine: Float[Array, "... half"], sine: Float[Array, "... half"]
) -> Float[Array, "... heads H"]:
    """Returns ``x`` rotated by its positions' angles, in the dtype of ``x``.

    Each value of a head's first half is paired with one of the second half, as in Hugging Face checkpoints.

    Reference: RoFormer, arXiv 2104.09864, equation 34.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[..., None, :], sine[..., None, :]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1).astype(x.dtype)
