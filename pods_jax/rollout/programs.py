"""The jitted programs of the rollout engine: prefill, a chunk of decoding, growth of the cache, the move to fewer rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from pods_jax.devices.sharding import constrain, group_shards
from pods_jax.rollout.compaction import Move, take_each, take_rows
from pods_jax.rollout.sampling import SamplingParams, sample, uniforms
from pods_jax.types import PromptBatch

MAX_EOS_IDS = 8


@dataclass(frozen=True)
class Call:
    """One call of one compiled program, with shapes in the place of arrays; nothing runs.

    Attributes:
        name: The program, with its size, such as ``decode 512``.
        function: The jitted function.
        args: Its arguments.
        static: Its static arguments by keyword.
        kept: What else of the rollout lies on the devices meanwhile.
        donated: The argument whose memory the result takes over; None where there is none.
        caches: The caches that a loop over tokens must leave in place; None where the program has no such loop.
    """

    name: str
    function: Any
    args: tuple[Any, ...]
    static: dict[str, Any] = field(default_factory=dict)
    kept: tuple[Any, ...] = ()
    donated: Any = None
    caches: Any = None

    def results(self) -> Any:
        """Returns the shapes of its results, without compiling it."""
        return jax.eval_shape(partial(self.function, **self.static), *self.args)

    def lower(self) -> jax.stages.Lowered:
        """Returns the program, traced and not yet compiled."""
        return self.function.lower(*self.args, **self.static)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """What a chunk of decoding reads and returns; donated from chunk to chunk.

    The batch starts as P prompts with N rollouts each, and shrinks to fewer and narrower tiles, which the same letters name.
    ``limit_PN`` is the number of tokens at which a rollout is cut. ``running_PN`` says which rollouts go on: neither ended by
    an EOS token, nor at their limit, nor a row of padding. ``filled`` counts the tokens that every row has (beyond their
    length, ended rollouts hold padding). ``decoded_rows`` is that of ``Rollouts``.
    """

    cache: Any
    key_PN: Key[Array, "P N"]
    tokens_PNC: Int[Array, "P N C"]
    logp_PNC: Float[Array, "P N C"]
    length_PN: Int[Array, "P N"]
    finished_PN: Bool[Array, "P N"]
    running_PN: Bool[Array, "P N"]
    limit_PN: Int[Array, "P N"]
    filled: Int[Array, ""]
    decoded_rows: Float[Array, ""]

    @property
    def rows(self) -> tuple[Array, Array, Array, Array]:
        """What a rollout is, row by row: tokens, log-probabilities, length, finished."""
        return self.tokens_PNC, self.logp_PNC, self.length_PN, self.finished_PN


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stop:
    """When a chunk ends early: once no shard has more than ``rows`` running, but not before ``filled`` tokens (int32)."""

    rows: Int[Array, ""]
    filled: Int[Array, ""]


def eos_array(ids: Sequence[int]) -> np.ndarray:
    """EOS ids as a fixed-size int32 array, -1 where unused, so that another set of ids never recompiles.

    Raises:
        ValueError: there is no id, a negative one, or more than ``MAX_EOS_IDS``.
    """
    if not 1 <= len(ids) <= MAX_EOS_IDS or min(ids) < 0:
        raise ValueError(f"eos ids {sorted(ids)}: between 1 and {MAX_EOS_IDS} non-negative ids are needed")
    return np.asarray(sorted(ids) + [-1] * (MAX_EOS_IDS - len(ids)), np.int32)


def rollout_keys(key: Key[Array, ""], prompts: int, rollouts: int, first: Any = 0) -> Key[Array, "P N"]:
    """One key per rollout, folded from the prompt's place, counted from ``first``, and the rollout's index."""
    per_prompt = jax.vmap(jax.random.fold_in, (None, 0))(key, first + jnp.arange(prompts))
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(per_prompt, jnp.arange(rollouts))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedPrompts:
    """The prompts of the batch as decoding reads them: each layer's cache, and the lengths. Never changed by decoding."""

    cache: Any
    length_P: Int[Array, "P"]


def _record(state: DecodeState, slot: Array, token_PN: Array, logp_PN: Array, eos_ids: Array) -> DecodeState:
    """Writes the token drawn for completion position ``slot``; rollouts that had ended keep zeros."""
    running = state.running_PN
    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=slot, axis=2)
    length_PN = state.length_PN + running
    ended_PN = running & (token_PN[..., None] == eos_ids[None, None]).any(axis=-1)
    return replace(
        state,
        tokens_PNC=put(state.tokens_PNC, jnp.where(running, token_PN, 0)[..., None]),
        logp_PNC=put(state.logp_PNC, jnp.where(running, logp_PN, 0.0)[..., None]),
        length_PN=length_PN,
        finished_PN=state.finished_PN | ended_PN,
        running_PN=running & ~ended_PN & (length_PN < state.limit_PN),
        filled=slot + 1,
    )


def prefill(
    graph: nnx.GraphDef,
    rollouts: int,
    max_length: int,
    capacity: int,
    params: Any,
    prompts: PromptBatch,
    key: Array,
    sampling: SamplingParams,
    eos_ids: Array,
    limit_PN: Array,
    first: Array | None = None,
) -> tuple[DecodeState, SharedPrompts]:
    """Runs the prompts, and draws each rollout's first token from its prompt's last hidden state."""
    decoder = nnx.merge(graph, params)
    count = prompts.tokens_PL.shape[0]
    hidden_PLD, prompt_cache = decoder.prefill(prompts.tokens_PL)
    last_PD = jnp.take_along_axis(hidden_PLD, (prompts.length_P - 1)[:, None, None], axis=1)[:, 0]
    logits_PV = decoder.logits(last_PD)
    shape = (count, rollouts)

    def filled_with(value: Any, dtype: Any, *tail: int) -> Array:
        return constrain(jnp.full((*shape, *tail), value, dtype), ("prompts", "rollouts", "tokens")[: 2 + len(tail)])

    state = DecodeState(
        cache=decoder.empty_cache(*shape, capacity),
        key_PN=rollout_keys(key, *shape, 0 if first is None else first),
        tokens_PNC=filled_with(0, jnp.int32, max_length),
        logp_PNC=filled_with(0, jnp.float32, max_length),
        length_PN=filled_with(0, jnp.int32),
        finished_PN=filled_with(False, bool),
        running_PN=filled_with(True, bool),
        limit_PN=limit_PN,
        filled=jnp.int32(0),
        decoded_rows=jnp.float32(0),
    )
    logits_PNV = jnp.broadcast_to(logits_PV[:, None], (*shape, logits_PV.shape[-1]))
    token_PN, logp_PN = sample(logits_PNV, uniforms(state.key_PN, jnp.arange(1))[0], sampling)
    return _record(state, jnp.int32(0), token_PN, logp_PN, eos_ids), SharedPrompts(prompt_cache, prompts.length_P)


def decode_chunk(
    graph: nnx.GraphDef,
    begin: int,
    capacity: int,
    params: Any,
    state: DecodeState,
    shared: SharedPrompts,
    sampling: SamplingParams,
    eos_ids: Array,
    stop: Stop,
) -> DecodeState:
    """Decodes until the cache is full, every rollout has ended, or few enough go on; from token ``begin`` at the earliest."""
    if begin == capacity:  # a cache of one token, which the prefill has drawn
        return state
    decoder = nnx.merge(graph, params)
    inputs = decoder.decode_inputs(shared.length_P, begin - 1, capacity - 1)
    tiles, width = state.length_PN.shape
    shards = group_shards()
    uniform_TPN = constrain(uniforms(state.key_PN, jnp.arange(begin, capacity)), ("tokens", "prompts", "rollouts"))

    def unfinished(state: DecodeState) -> Array:
        running_S = state.running_PN.reshape(shards, -1).sum(axis=1)
        most = running_S.max()
        return (state.filled < capacity) & (most > 0) & ((most > stop.rows) | (state.filled < stop.filled))

    def one_token(state: DecodeState) -> DecodeState:
        before = state.filled - 1
        token_PN = jax.lax.dynamic_index_in_dim(state.tokens_PNC, before, axis=2, keepdims=False)
        logits_PNV, cache = decoder.decode(inputs, token_PN, shared.length_P, shared.cache, state.cache, before)
        uniform_PN = jax.lax.dynamic_index_in_dim(uniform_TPN, state.filled - begin, keepdims=False)
        drawn_PN, logp_PN = sample(logits_PNV, uniform_PN, sampling)
        state = replace(state, cache=cache, decoded_rows=state.decoded_rows + tiles * width)
        return _record(state, state.filled, drawn_PN, logp_PN, eos_ids)

    return jax.lax.while_loop(unfinished, one_token, state)


def grow(graph: nnx.GraphDef, capacity: int, params: Any, state: DecodeState) -> DecodeState:
    """The batch with room for ``capacity`` tokens of each rollout."""
    decoder = nnx.merge(graph, params)
    return replace(state, cache=decoder.grow_cache(state.cache, capacity))


def shrink(
    graph: nnx.GraphDef, params: Any, state: DecodeState, shared: SharedPrompts, move: Move, *, width: int
) -> tuple[DecodeState, SharedPrompts]:
    """The batch with the moved rows alone."""
    decoder = nnx.merge(graph, params)

    def rows(tree: Any) -> Any:
        return jax.tree.map(lambda x: take_rows(x, move.row_SR, width), tree)

    def tiles(tree: Any) -> Any:
        return jax.tree.map(lambda x: take_each(x, move.tile_ST), tree)

    running_PN = rows(state.running_PN)
    moved = replace(
        state,
        cache=decoder.each_layer(rows, state.cache),
        key_PN=rows(state.key_PN),
        tokens_PNC=rows(state.tokens_PNC),
        logp_PNC=rows(state.logp_PNC),
        length_PN=rows(state.length_PN),
        finished_PN=rows(state.finished_PN),
        running_PN=running_PN & move.real_SR.reshape(running_PN.shape),
        limit_PN=rows(state.limit_PN),
    )
    return moved, SharedPrompts(decoder.each_layer(tiles, shared.cache), tiles(shared.length_P))
