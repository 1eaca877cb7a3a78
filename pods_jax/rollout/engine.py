"""The rollout engine: prompts in, n completions of each out, in jitted chunks.

A prompt is prefilled once for its n rollouts. Decoding runs in chunks; each chunk is one ``while_loop`` whose cache has room
for the tokens so far and one chunk more, so no token attends over the whole maximum. A chunk also ends when so few rollouts go
on that a smaller batch holds them (``compaction.py``). The set of compiled programs is bounded: for each prompt bucket one
prefill, one loop for each cache size and number of rows, and what grows caches and moves rows between them; sampling
parameters, EOS ids and keys are traced. Every draw's key is folded from the step's key, the prompt's place in the step, the
rollout's index and the token's position, so neither chunks, nor rows, nor lanes, nor devices change a token.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from pods_jax.models.spec import DecoderSpec
from pods_jax.rollout.compaction import Move, Rows, bring_home, plan, row_sizes, take_each, take_rows
from pods_jax.rollout.sampling import SamplingParams, sample, uniforms
from pods_jax.sharding import constrain, group_shards, replicate, spread, to_local
from pods_jax.types import PromptBatch, Rollouts

MAX_EOS_IDS = 8
LANE_FLOPS = 6e6
LANE_WEIGHTS = 16e6


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


@dataclass(frozen=True)
class Lanes:
    """Parts of the prompts that one device generates side by side, each on a thread of its own.

    Attributes:
        most: Lanes at most.
        rows: Rollouts that each has at least.
    """

    most: int = 1
    rows: int = 1


def default_lanes(devices: int, platform: str, spec: DecoderSpec) -> Lanes:
    """One lane for each core of a CPU, for the programs of a small model leave all but one idle most of the time.

    Not where a lane's token would take less than the threads' taking turns (some million operations), nor where the weights
    outgrow the cores' common cache, since every lane reads them.
    """
    if platform != "cpu" or devices > 1 or spec.matrix_weights > LANE_WEIGHTS:
        return Lanes()
    return Lanes(os.cpu_count() or 1, math.ceil(LANE_FLOPS / (2 * spec.matrix_weights)))


def default_chunk(platform: str) -> int:
    """Tokens by which the cache grows: short chunks pay on a CPU, where attention reads the whole cache from memory."""
    return 32 if platform == "cpu" else 256


def cache_sizes(max_completion_length: int, chunk: int) -> list[int]:
    """Sizes through which the cache grows: equal steps of about ``chunk`` tokens up to the limit.

    Each size is one compiled loop and one compiled update, so a last step of a few tokens would cost more than it saves.
    """
    steps = max(1, round(max_completion_length / chunk))
    return [math.ceil(max_completion_length * (i + 1) / steps) for i in range(steps)]


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


class RolloutEngine:
    """Generates rollouts with a decoder whose structure is fixed and whose parameters are passed at each call.

    Args:
        graph: Graph definition of the ``Decoder`` (``nnx.split``).
        rollouts: Rollouts generated for each prompt (N).
        max_completion_length: Longest completion in tokens (C), EOS included.
        chunk: Tokens by which the cache grows, about.
        eos_ids: Every id that ends a completion.
        width: Rows of one tile once the batch has shrunk; see ``compaction.default_width``.
        shrink_steps: Sizes of the batch from one half to the next; 0 keeps every row to the end.
        lanes: Into how many parts the prompts may be cut; one where there are several devices.
        prepare: Turns the learner's parameters into the decoding ones once per call (cast, gathered over ``fsdp``); the
            identity where nothing changes.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        *,
        rollouts: int,
        max_completion_length: int,
        chunk: int,
        eos_ids: Sequence[int],
        width: int = 1,
        shrink_steps: int = 2,
        lanes: Lanes | None = None,
        prepare: Callable[[Any], Any] = lambda params: params,
    ):
        self.rollouts = rollouts
        self.max_completion_length = max_completion_length
        self.capacities = cache_sizes(max_completion_length, chunk)
        self.eos_ids = eos_array(eos_ids)
        self.width = min(width, rollouts)
        self.shrink_steps = shrink_steps
        self.lanes = lanes or Lanes()
        # Moving rows takes a moment, and each size that is met is compiled: not at every token.
        self.pause = math.ceil(max_completion_length / 32)
        self._prepare = prepare
        self.prefill = jax.jit(partial(_prefill, graph, rollouts, max_completion_length, self.capacities[0]))
        chunks = zip([1, *self.capacities], self.capacities, strict=False)
        self.decode = {c: jax.jit(partial(_decode_chunk, graph, begin, c), donate_argnums=1) for begin, c in chunks}
        self.grow = {c: jax.jit(partial(_grow, graph, c)) for c in self.capacities[1:]}
        self.shrink = jax.jit(partial(_shrink, graph), static_argnames="width")
        # Of bare functions, engines would share one count of programs.
        self.bring_home = jax.jit(partial(bring_home))
        self.cut = jax.jit(partial(_cut), static_argnums=0)
        self.join = jax.jit(partial(_join))
        # Held while a program is called, not while it runs: two lanes would both compile what neither has met.
        self._calling = Lock()

    def __call__(
        self,
        params: Any,
        prompts: PromptBatch,
        key: Key[Array, ""],
        sampling: SamplingParams,
        limit_PN: Int[Array, "P N"] | None = None,
    ) -> Rollouts:
        """Generates ``rollouts`` completions of each prompt.

        Args:
            params: The decoder's parameters (pure tree).
            prompts: Right-padded prompts; each padded length is one compiled prefill.
            key: The step's key.
            sampling: Temperature and truncation.
            limit_PN: Tokens after which each rollout is cut, 1 to ``max_completion_length``; the maximum when not given.
        """
        params = self._prepare(params)
        lanes = self.lanes_of(len(prompts.length_P))
        if lanes == 1:
            return self._generate(params, sampling, key, None, prompts, limit_PN)
        firsts = [replicate(np.int32(len(prompts.length_P) // lanes * lane)) for lane in range(lanes)]
        mesh = jax.sharding.get_mesh()

        def generate(first: Array, part: tuple[PromptBatch, Any]) -> Rollouts:
            with nullcontext() if mesh.empty else jax.set_mesh(mesh):  # which every thread has to be told
                return self._generate(params, sampling, key, first, *part)

        return self.join(list(self._threads.map(generate, firsts, self.cut(lanes, (prompts, limit_PN)))))

    def _generate(
        self,
        params: Any,
        sampling: SamplingParams,
        key: Key[Array, ""],
        first: Int[Array, ""] | None,
        prompts: PromptBatch,
        limit_PN: Int[Array, "P N"] | None,
    ) -> Rollouts:
        """The rollouts of all prompts, or of some, whose places in the step count from ``first``; else as for a call."""
        with self._calling:
            state, shared = self.prefill(params, prompts, key, sampling, self._eos, limit_PN, first)
        rows, home = Rows.whole(len(prompts.length_P), self.rollouts, group_shards()), None
        sizes, capacities, filled = deque(self.row_sizes(rows.count)), deque(self.capacities), 1
        while True:
            stop = replicate(Stop(np.int32(sizes[0] if sizes else 0), np.int32(filled + self.pause)))  # type: ignore[arg-type]
            with self._calling:
                state = self.decode[capacities[0]](params, state, shared, sampling, self._eos, stop)
            filled, running_PN = to_local((state.filled, state.running_PN))
            if not running_PN.any():
                break
            running_SR = running_PN.reshape(rows.home_SR.shape)
            with self._calling:
                while sizes and (planned := plan(rows, running_SR, rollouts=self.rollouts, width=self.width, size=sizes[0])):
                    home = self._home(home, state, rows)
                    rows, move = planned
                    state, shared = self.shrink(params, state, shared, spread(move), width=self.width)
                    running_SR, _ = np.asarray(move.real_SR), sizes.popleft()
                if filled == capacities[0]:
                    capacities.popleft()
                    state = self.grow[capacities[0]](params, state)
        with self._calling:
            return Rollouts(*self._home(home, state, rows), state.decoded_rows)

    def _home(self, home: Any, state: DecodeState, rows: Rows) -> tuple[Array, Array, Array, Array]:
        """All rollouts, with what the rows of the batch hold put in its place."""
        return state.rows if home is None else self.bring_home(home, state.rows, spread(rows.home_SR))

    def first_tokens(
        self, params: Any, prompts: PromptBatch, key: Key[Array, ""], sampling: SamplingParams
    ) -> tuple[Int[np.ndarray, "P N"], Float[np.ndarray, "P N"]]:
        """The first token of each rollout and its log-probability, on the host; arguments as for a call."""
        state, _ = self.prefill(self._prepare(params), prompts, key, sampling, self._eos, None, None)
        tokens_PNC, logp_PNC = to_local((state.tokens_PNC, state.logp_PNC))
        return tokens_PNC[..., 0], logp_PNC[..., 0]

    @cached_property
    def _eos(self) -> Int[Array, "E"]:
        # At the first call, not when built: only then is there a device to put them on.
        return replicate(self.eos_ids)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.lanes.most, "lane")

    def lanes_of(self, prompts: int) -> int:
        """Lanes of a batch of ``prompts``: as many as are allowed and share it evenly."""
        most = max(1, min(self.lanes.most, prompts * self.rollouts // self.lanes.rows))
        return max(lanes for lanes in range(1, most + 1) if prompts % lanes == 0)

    def bucket(self, length: int) -> int:
        """Smallest cache size that holds ``length`` tokens: the update's completions are cut to it."""
        return next(c for c in self.capacities if c >= length)

    def row_sizes(self, rows: int) -> list[int]:
        """Numbers of rows of one shard, largest first, to which a batch of ``rows`` may shrink."""
        return row_sizes(rows, self.width, self.shrink_steps)

    def compiled_programs(self) -> int:
        """Entries of the compiled programs' call caches so far; on one device constant once every size has been met."""
        programs: list[Any] = [self.prefill, *self.decode.values(), *self.grow.values(), self.shrink, self.bring_home]
        programs += [self.cut, self.join]
        return sum(program._cache_size() for program in programs)

    def most_programs(self, prompts: int) -> int:
        """Most programs that are ever compiled for one prompt bucket of ``prompts`` groups."""
        lanes = self.lanes_of(prompts)
        caches, sizes = len(self.capacities), 1 + len(self.row_sizes(prompts // lanes // group_shards() * self.rollouts))
        return 1 + caches * sizes + (caches - 1) * sizes + (caches + 1) * (sizes - 1) + 2 * (lanes > 1)


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


def _prefill(
    graph: nnx.GraphDef,
    rollouts: int,
    max_length: int,
    capacity: int,
    params: Any,
    prompts: PromptBatch,
    key: Array,
    sampling: SamplingParams,
    eos_ids: Array,
    limit_PN: Array | None = None,
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
        limit_PN=filled_with(max_length, jnp.int32) if limit_PN is None else limit_PN,
        filled=jnp.int32(0),
        decoded_rows=jnp.float32(0),
    )
    logits_PNV = jnp.broadcast_to(logits_PV[:, None], (*shape, logits_PV.shape[-1]))
    token_PN, logp_PN = sample(logits_PNV, uniforms(state.key_PN, jnp.arange(1))[0], sampling)
    return _record(state, jnp.int32(0), token_PN, logp_PN, eos_ids), SharedPrompts(prompt_cache, prompts.length_P)


def _decode_chunk(
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


def _grow(graph: nnx.GraphDef, capacity: int, params: Any, state: DecodeState) -> DecodeState:
    decoder = nnx.merge(graph, params)
    return replace(state, cache=decoder.grow_cache(state.cache, capacity))


def _shrink(
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


def _cut(lanes: int, tree: Any) -> list[Any]:
    """Trees of arrays ``[P, ...]`` in equal parts of the prompts."""
    leaves, structure = jax.tree.flatten(tree)
    return [jax.tree.unflatten(structure, part) for part in zip(*(jnp.split(leaf, lanes) for leaf in leaves), strict=True)]


def _join(parts: list[Rollouts]) -> Rollouts:
    """The rollouts of all lanes, in the order of the prompts."""
    return Rollouts(
        tokens_PNC=jnp.concatenate([part.tokens_PNC for part in parts]),
        logp_PNC=jnp.concatenate([part.logp_PNC for part in parts]),
        length_PN=jnp.concatenate([part.length_PN for part in parts]),
        finished_PN=jnp.concatenate([part.finished_PN for part in parts]),
        decoded_rows=sum(part.decoded_rows for part in parts),  # type: ignore[arg-type]
    )
