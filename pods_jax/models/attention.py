"""Attention over a shared prompt, whose keys and values exist once per group.

Attention is computed in three places: within a prompt, from a group's completions to their prompt and themselves (the update),
and from one new token per rollout (decoding). Each softmax runs over the prompt's and the own part together, so the result
equals plain attention over the concatenated sequence. Decoding has one form per backend (``DECODE_FORMS``), because CPUs and
TPUs want other cache layouts and other products. All scores are float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pods_jax.devices.sharding import constrain

Cache = tuple[Array, Array]  # keys and values of one layer

# Finite, so that a row without any visible key gives garbage that is masked later, and never NaN.
HIDDEN = -1e30


def _grouped(q: Float[Array, "... Q H"], kv_heads: int) -> Float[Array, "... K G H"]:
    """Returns the queries scaled by ``1/sqrt(H)``, their heads split by the key-value head that they read."""
    *lead, q_heads, head = q.shape
    return (q * (head**-0.5)).astype(q.dtype).reshape(*lead, kv_heads, q_heads // kv_heads, head)


def _einsum(expression: str, a: Array, b: Array) -> Array:
    return jnp.einsum(expression, a, b, preferred_element_type=jnp.float32)


def prompt_attention(
    q_PLQH: Float[Array, "P L Q H"], k_PLKH: Float[Array, "P L K H"], v_PLKH: Float[Array, "P L K H"]
) -> Float[Array, "P L Q H"]:
    """Returns the causal attention of each prompt to itself, in the dtype of the queries.

    Padding lies on the right, so causality alone hides it from every valid query.
    """
    length = q_PLQH.shape[1]
    q = _grouped(q_PLQH, k_PLKH.shape[2])
    scores = _einsum("plkgh,pskh->pkgls", q, k_PLKH)
    visible = jnp.tril(jnp.ones((length, length), bool))[None, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, HIDDEN), axis=-1).astype(v_PLKH.dtype)
    return _einsum("pkgls,pskh->plkgh", weights, v_PLKH).reshape(q_PLQH.shape).astype(q_PLQH.dtype)


def completion_attention(
    q_PMCQH: Float[Array, "P M C Q H"],
    k_PMCKH: Float[Array, "P M C K H"],
    v_PMCKH: Float[Array, "P M C K H"],
    prompt_k_PLKH: Float[Array, "P L K H"],
    prompt_v_PLKH: Float[Array, "P L K H"],
    prompt_length_P: Int[Array, "P"],
) -> Float[Array, "P M C Q H"]:
    """Returns the attention of completion tokens to their group's prompt and, causally, to their own completion.

    One softmax runs over both parts. Prompt keys beyond ``prompt_length_P`` are hidden.
    """
    steps, prompt_steps = q_PMCQH.shape[2], prompt_k_PLKH.shape[1]
    q = _grouped(q_PMCQH, k_PMCKH.shape[3])
    on_prompt = _einsum("pmckgh,pskh->pmkgcs", q, prompt_k_PLKH)
    on_own = _einsum("pmckgh,pmskh->pmkgcs", q, k_PMCKH)
    in_prompt = jnp.arange(prompt_steps)[None, :] < prompt_length_P[:, None]
    on_prompt = jnp.where(in_prompt[:, None, None, None, None, :], on_prompt, HIDDEN)
    causal = jnp.tril(jnp.ones((steps, steps), bool))
    on_own = jnp.where(causal[None, None, None, None], on_own, HIDDEN)
    weights = jax.nn.softmax(jnp.concatenate([on_prompt, on_own], axis=-1), axis=-1).astype(v_PMCKH.dtype)
    out = _einsum("pmkgcs,pskh->pmckgh", weights[..., :prompt_steps], prompt_v_PLKH)
    out = out + _einsum("pmkgcs,pmskh->pmckgh", weights[..., prompt_steps:], v_PMCKH)
    return out.reshape(q_PMCQH.shape).astype(q_PMCQH.dtype)


@dataclass(frozen=True)
class DecodeForm:
    """How one backend lays out the caches of a layer, and how one new token per rollout attends to them.

    The forms differ in when they write the token's keys and values, since that decides whether the compiler updates the caches
    in place or copies them. On matrix units ``write`` does it after all layers, so that no layer waits for an updated cache. On
    a CPU with unrolled layers ``attend`` writes before it reads; with scanned layers, whose caches are one stacked array,
    writing afterwards is in place.

    Attributes:
        prompt_cache: ``(k_PLKH, v_PLKH) -> prompt cache``.
        empty_cache: ``(prompts, rollouts, capacity, kv_heads, head_size, dtype) -> own cache``.
        attend: ``(q_PNQH, k_PNKH, v_PNKH, prompt cache, prompt_length_P, own cache, filled) -> (out_PNQH, new)``: over the
            prompt, the first ``filled`` own tokens and the token itself; ``new`` is what ``write`` takes.
        write: ``(own cache, new, slot) -> own cache``.
        grow: ``(own cache, capacity) -> own cache`` with room for more tokens.
    """

    prompt_cache: Callable[..., Any]
    empty_cache: Callable[..., Any]
    attend: Callable[..., tuple[Array, Any]]
    write: Callable[..., Any]
    grow: Callable[[Any, int], Any]


def _softmax(
    scores: Sequence[Float[Array, "P ... keys"]], length_P: Int[Array, "P"], filled: Int[Array, ""]
) -> tuple[list[Float[Array, "P ... keys"]], Float[Array, "P ... 1"]]:
    """Returns one softmax over several parts: the exponentials of each part, and their total, which still has to divide them.

    The parts are the prompt's scores, those of the own tokens, of which ``filled`` exist, and those of the token itself where
    it is not among the own tokens.
    """
    on_prompt, on_own, *on_self = scores
    in_prompt = jnp.arange(on_prompt.shape[-1])[None, :] < length_P[:, None]
    on_prompt = jnp.where(jnp.expand_dims(in_prompt, tuple(range(1, on_prompt.ndim - 1))), on_prompt, HIDDEN)
    there = jnp.arange(on_own.shape[-1]) < filled
    on_own = jnp.where(jnp.expand_dims(there, tuple(range(on_own.ndim - 1))), on_own, HIDDEN)
    parts = [on_prompt, on_own, *on_self]
    peak = reduce(jnp.maximum, (part.max(axis=-1, keepdims=True) for part in parts))
    parts = [jnp.exp(part - peak) for part in parts]
    return parts, reduce(jnp.add, (part.sum(axis=-1, keepdims=True) for part in parts))


# --- matrix units (TPU, GPU): batched dots over [P, N, S, K, H] --------------------------------------------------------------


# Tokens rewritten for one that is written. Written alone, a token makes the TPU compiler keep the caches in a layout other than
# the one that attention reads, and copy all of them at every token; a whole tile keeps them in place.
WRITE_TILE = 128


def _dots_empty(prompts: int, rollouts: int, capacity: int, kv_heads: int, head: int, dtype: Any) -> Cache:
    empty = jnp.zeros((prompts, rollouts, capacity, kv_heads, head), dtype)
    empty = constrain(empty, ("prompts", "rollouts", "tokens", "kv_heads", "head"))
    return empty, empty


def _dots_attend(
    q_PNQH: Array,
    k_PNKH: Array,
    v_PNKH: Array,
    prompt: tuple[Array, Array],
    length_P: Array,
    own: Cache,
    filled: Array,
) -> tuple[Array, Cache]:
    q = _grouped(q_PNQH, k_PNKH.shape[2])
    on_prompt = _einsum("pnkgh,pskh->pnkgs", q, prompt[0])
    on_own = _einsum("pnkgh,pnskh->pnkgs", q, own[0])
    on_self = _einsum("pnkgh,pnkh->pnkg", q, k_PNKH)
    parts, total = _softmax((on_prompt, on_own, on_self[..., None]), length_P, filled)
    w_prompt, w_own, w_self = (part * (1.0 / total) for part in parts)
    out = _einsum("pnkgs,pskh->pnkgh", w_prompt.astype(v_PNKH.dtype), prompt[1])
    out = out + _einsum("pnkgs,pnskh->pnkgh", w_own.astype(v_PNKH.dtype), own[1])
    out = out + w_self * v_PNKH[:, :, :, None, :].astype(jnp.float32)
    return out.reshape(q_PNQH.shape).astype(q_PNQH.dtype), (k_PNKH, v_PNKH)


def _dots_write(own: Cache, new: Cache, slot: Array) -> Cache:
    capacity = own[0].shape[2]
    tile = min(WRITE_TILE, capacity)
    start = jnp.minimum(slot // tile * tile, capacity - tile)
    here = (jnp.arange(tile) == slot - start)[None, None, :, None, None]

    def put(cache: Array, new: Array) -> Array:
        before = jax.lax.dynamic_slice_in_dim(cache, start, tile, axis=2)
        after = jnp.where(here, new[:, :, None].astype(cache.dtype), before)
        return jax.lax.dynamic_update_slice_in_dim(cache, after, start, axis=2)

    return put(own[0], new[0]), put(own[1], new[1])


def _dots_grow(own: Cache, capacity: int) -> tuple[Array, Array]:
    room = capacity - own[0].shape[2]
    return tuple(jnp.pad(cache, ((0, 0), (0, 0), (0, room), (0, 0), (0, 0))) for cache in own)  # type: ignore[return-value]


# --- CPU: multiply and reduce over keys [P, N, K, H, S] and values [P, N, K, S, H] --------------------------------------------
# The sums run over the last axis but one, in whole vectors. A batched dot of one query row would copy the cache.


def _rows_empty(prompts: int, rollouts: int, capacity: int, kv_heads: int, head: int, dtype: Any) -> Cache:
    keys = jnp.zeros((prompts, rollouts, kv_heads, head, capacity), dtype)
    values = jnp.zeros((prompts, rollouts, kv_heads, capacity, head), dtype)
    return (
        constrain(keys, ("prompts", "rollouts", "kv_heads", "head", "tokens")),
        constrain(values, ("prompts", "rollouts", "kv_heads", "tokens", "head")),
    )


def _rows_prompt(k_PLKH: Array, v_PLKH: Array) -> tuple[Array, Array]:
    # In float32: a CPU has no dot of bfloat16 with a float32 result, and the prompt's cache is small.
    k, v = k_PLKH.astype(jnp.float32), v_PLKH.astype(jnp.float32)
    return jnp.einsum("plkh->pkhl", k), jnp.einsum("plkh->pklh", v)


def _rows_scores(q_PNKGH: Array, keys_PNKHS: Array) -> Array:
    return jnp.sum(q_PNKGH[..., None] * keys_PNKHS[:, :, :, None].astype(jnp.float32), axis=-2)


def _rows_values(weights_PNKGS: Array, values_PNKSH: Array) -> Array:
    return jnp.sum(weights_PNKGS[..., None] * values_PNKSH[:, :, :, None].astype(jnp.float32), axis=-2)


def _rows_attend(
    q_PNQH: Array,
    k_PNKH: Array,
    v_PNKH: Array,
    prompt: tuple[Array, Array],
    length_P: Array,
    own: Cache,
    filled: Array,
    *,
    write_first: bool,
) -> tuple[Array, Cache]:
    q = _grouped(q_PNQH, k_PNKH.shape[2]).astype(jnp.float32)
    new = _rows_put(own, (k_PNKH, v_PNKH), filled) if write_first else (k_PNKH, v_PNKH)
    keys, values = new if write_first else own
    alone = q.shape[1] == 1  # a prompt of one rollout is a cache like its own
    on_prompt = _rows_scores(q, prompt[0][:, None]) if alone else _einsum("pnkgh,pkhs->pnkgs", q, prompt[0])
    scores = [on_prompt, _rows_scores(q, keys)]
    if not write_first:
        scores.append(jnp.sum(q * k_PNKH[:, :, :, None].astype(jnp.float32), axis=-1, keepdims=True))
    # Over all five axes of the scores, two of them short, a CPU's exponential takes three times as long as over rows of scores.
    rows = [part.reshape(q.shape[0], -1, part.shape[-1]) for part in scores]
    parts, total = _softmax(rows, length_P, filled + 1 if write_first else filled)
    w_prompt, w_own, *w_self = (part.reshape(*q.shape[:-1], -1) for part in parts)
    out = _rows_values(w_prompt, prompt[1][:, None]) if alone else _einsum("pnkgs,pksh->pnkgh", w_prompt, prompt[1])
    out = out + _rows_values(w_own, values)
    if w_self:
        out = out + w_self[0] * v_PNKH[:, :, :, None].astype(jnp.float32)
    return (out / total.reshape(*q.shape[:-1], 1)).reshape(q_PNQH.shape).astype(q_PNQH.dtype), new


def _rows_put(own: Cache, new: Cache, slot: Array) -> Cache:
    (keys, values), (k_PNKH, v_PNKH) = own, new
    put = jax.lax.dynamic_update_slice_in_dim
    return (
        put(keys, k_PNKH[..., None].astype(keys.dtype), slot, axis=4),
        put(values, v_PNKH[:, :, :, None].astype(values.dtype), slot, axis=3),
    )


def _rows_grow(own: Cache, capacity: int) -> tuple[Array, Array]:
    keys, values = own
    still, room = (0, 0), (0, capacity - values.shape[3])
    return jnp.pad(keys, (still, still, still, still, room)), jnp.pad(values, (still, still, still, room, still))


DECODE_FORMS: dict[str, DecodeForm] = {
    "dots": DecodeForm(lambda k, v: (k, v), _dots_empty, _dots_attend, _dots_write, _dots_grow),
    "rows": DecodeForm(
        _rows_prompt, _rows_empty, partial(_rows_attend, write_first=True), lambda own, new, slot: new, _rows_grow
    ),
    "stacked_rows": DecodeForm(_rows_prompt, _rows_empty, partial(_rows_attend, write_first=False), _rows_put, _rows_grow),
}


ON_CPU = {"rows", "stacked_rows"}


def decode_form(platform: str, unroll: bool) -> str:
    """Returns the name of the form for a backend and layer loop: ``rows`` or ``stacked_rows`` on a CPU, ``dots`` elsewhere."""
    if platform != "cpu":
        return "dots"
    return "rows" if unroll else "stacked_rows"
