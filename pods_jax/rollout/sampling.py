"""Drawing the next token: temperature, top-k, top-p, min-p and greedy as traced values, one uniform number per draw.

The draw inverts the cumulative distribution, so a row costs one random number instead of V; the truncations need no sort of
the vocabulary, because each is a threshold on the probability, found by bisection over the bits of a float.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

# Short enough that the blocks of a large vocabulary split evenly over a few shards; else each token would gather all logits.
BLOCK = 32
_ONE_BITS = int(np.float32(1.0).view(np.int32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters as scalars on the device, so that changing one never recompiles.

    Attributes:
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Keep the k most probable tokens; 0 is off. Ties with the k-th are kept.
        top_p: Keep the most probable tokens whose mass (among the top k) first reaches top_p; 1 is off.
        min_p: Drop tokens less probable than ``min_p`` times the most probable; 0 is off.
    """

    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]


def sampling_params(*, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingParams:
    """Plain numbers as host scalars of fixed dtype."""
    return SamplingParams(
        np.asarray(temperature, np.float32),  # type: ignore[arg-type]
        np.asarray(top_k, np.int32),  # type: ignore[arg-type]
        np.asarray(top_p, np.float32),  # type: ignore[arg-type]
        np.asarray(min_p, np.float32),  # type: ignore[arg-type]
    )


def effective_temperature(temperature: Float[Array, ""]) -> Float[Array, ""]:
    """The divisor of the logits: the temperature, or 1 for greedy decoding."""
    return jnp.where(temperature > 0, temperature, 1.0)


def uniforms(key_R: Key[Array, "*rows"], position_T: Int[Array, "T"]) -> Float[Array, "T *rows"]:
    """A uniform number in [0, 1) for each row and token position, from the row's key folded with the position.

    For many positions at once: hashing one number a row costs a CPU as much as a small matrix product.
    """
    return jax.vmap(lambda t: jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, t)))(key_R.reshape(-1)))(
        position_T
    ).reshape(-1, *key_R.shape)


def sample(
    logits_RV: Float[Array, "*rows V"], uniform_R: Float[Array, "*rows"], params: SamplingParams
) -> tuple[Int[Array, "*rows"], Float[Array, "*rows"]]:
    """Draws one token a row.

    Args:
        logits_RV: Float32 logits.
        uniform_R: One uniform number a row; equal numbers and logits give equal tokens whatever the batch.
        params: Sampling parameters.

    Returns:
        Tokens (int32), and their log-probability under the temperature-scaled softmax over the whole vocabulary, which is
        what the learner computes. Truncation (top-k, top-p, min-p) changes what can be drawn, not the log-probability.
    """
    scaled = logits_RV / effective_temperature(params.temperature)
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    relative = jnp.exp(scaled - peak)
    total = jnp.sum(relative, axis=-1)
    truncated = (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
    kept = jax.lax.cond(truncated, lambda p: truncate(p, params), lambda p: p, relative)
    drawn = jax.lax.cond(
        params.temperature > 0,
        lambda p: inverse_cdf(p, uniform_R),
        lambda p: jnp.argmax(p, axis=-1).astype(jnp.int32),
        kept,
    )
    chosen = jnp.take_along_axis(scaled, drawn[..., None], axis=-1)[..., 0]
    return drawn, chosen - peak[..., 0] - jnp.log(total)


def inverse_cdf(mass_RV: Float[Array, "*rows V"], uniform_R: Float[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Index drawn in proportion to ``mass_RV`` (unnormalised, some positive) from one uniform number in [0, 1) a row.

    Two levels, blocks of the vocabulary and tokens of the block, keep the float32 sums short. A token of zero mass is never
    drawn, however the sums are rounded.
    """
    vocab = mass_RV.shape[-1]
    block = min(BLOCK, vocab)
    pad = -vocab % block
    mass = jnp.pad(mass_RV, [(0, 0)] * (mass_RV.ndim - 1) + [(0, pad)]).reshape(*mass_RV.shape[:-1], -1, block)
    block_mass = mass.sum(axis=-1)
    block_end = jnp.cumsum(block_mass, axis=-1)
    target = uniform_R[..., None] * block_end[..., -1:]
    which = _first_beyond(block_mass, block_end, target)
    start = jnp.take_along_axis(block_end - block_mass, which, axis=-1)
    inner = jnp.take_along_axis(mass, which[..., None], axis=-2)[..., 0, :]
    offset = _first_beyond(inner, jnp.cumsum(inner, axis=-1), target - start)
    return (which * block + offset)[..., 0].astype(jnp.int32)


def _first_beyond(
    mass: Float[Array, "*rows T"], end: Float[Array, "*rows T"], target: Float[Array, "*rows 1"]
) -> Int[Array, "*rows 1"]:
    """First place of non-zero mass whose cumulative ``end`` lies beyond ``target``; the last of non-zero mass if none does.

    A parallel cumulative sum is not monotonic: its rounding may step up at a place without mass, so ``end`` alone cannot tell.
    """
    place = jax.lax.broadcasted_iota(jnp.int32, mass.shape, mass.ndim - 1)
    last = jnp.max(jnp.where(mass > 0, place, 0), axis=-1, keepdims=True)
    return jnp.min(jnp.where((mass > 0) & (end > target), place, last), axis=-1, keepdims=True)


def truncate(relative_RV: Float[Array, "*rows V"], params: SamplingParams) -> Float[Array, "*rows V"]:
    """Sets to zero the mass of tokens that top-k, top-p or min-p exclude.

    Args:
        relative_RV: Probabilities divided by the largest, in [0, 1].
        params: Sampling parameters; top-p is applied to what top-k leaves, as elsewhere in the field.
    """
    by_count = _highest_threshold(
        relative_RV, lambda keep: jnp.sum(keep, axis=-1) >= jnp.maximum(params.top_k, 1), relative_RV.shape[:-1]
    )
    by_count = jnp.where(params.top_k > 0, by_count, 0.0)
    among = jnp.where(relative_RV >= by_count[..., None], relative_RV, 0.0)
    wanted = params.top_p * jnp.sum(among, axis=-1)
    by_mass = _highest_threshold(
        among, lambda keep: jnp.sum(jnp.where(keep, among, 0.0), axis=-1) >= wanted, relative_RV.shape[:-1]
    )
    by_mass = jnp.where(params.top_p < 1, by_mass, 0.0)
    threshold = jnp.maximum(jnp.maximum(by_count, by_mass), params.min_p)
    return jnp.where(relative_RV >= threshold[..., None], relative_RV, 0.0)


def _highest_threshold(
    value_RV: Float[Array, "*rows V"], enough: Callable[[Bool[Array, "*rows V"]], Bool[Array, "*rows"]], rows: tuple[int, ...]
) -> Float[Array, "*rows"]:
    """Largest float t in [0, 1] for which ``enough(value >= t)`` holds; t = 0 must do.

    Non-negative floats are ordered like their bits, so 30 halvings of the integer range are exact.
    """
    bits = jax.lax.bitcast_convert_type(value_RV, jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        good = enough(bits >= middle[..., None])
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.zeros(rows, jnp.int32), jnp.full(rows, _ONE_BITS + 1, jnp.int32)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)
