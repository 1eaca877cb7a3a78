"""The protocol of rollout engines, and this package's own: prompts in, n completions of each out, in jitted chunks.

Loop, evaluator and assembly know an engine by ``Engine`` alone. In ``RolloutEngine`` a prompt is prefilled once for its n
rollouts. Decoding runs in chunks; each chunk is one ``while_loop`` whose cache has room for the tokens so far and one chunk
more, so no token attends over the whole maximum. A chunk also ends when so few rollouts go on that a smaller batch holds them
(``compaction.py``). The set of compiled programs is bounded: for each padded prompt length one prefill, one loop for each cache
size and number of rows, and what grows caches and moves rows between them; sampling parameters, EOS ids and keys are traced.
Every draw's key is folded from the step's key, the prompt's place in the step, the rollout's index and the token's position, so
neither chunks, nor rows, nor lanes, nor devices change a token.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Key

from pods_jax.devices.sharding import group_shards, replicate, spread, spread_shape, to_local
from pods_jax.rollout.compaction import Move, Rows, bring_home, fit_rows, row_sizes
from pods_jax.rollout.lanes import Lanes, cut, join
from pods_jax.rollout.programs import Call, DecodeState, SharedPrompts, Stop, decode_chunk, eos_array, grow, prefill, shrink
from pods_jax.rollout.sampling import SamplingParams
from pods_jax.types import PromptBatch, Rollouts


@dataclass(frozen=True)
class Foretold:
    """What an engine will compile and hold for batches of one size.

    Attributes:
        programs: Most programs that are ever compiled for one padded length of the prompts.
        completion_lengths: Padded lengths that ``padded_length`` gives.
        sizes: The sizes that are compiled, in words.
        cache_tokens: Most tokens whose keys and values one device holds at once.
        lanes: Parts of the prompts that are generated side by side.
    """

    programs: int
    completion_lengths: tuple[int, ...]
    sizes: str
    cache_tokens: int
    lanes: int = 1


class Engine(Protocol):
    """What generates rollouts.

    Attributes:
        rollouts: Rollouts generated for each prompt (N).
    """

    rollouts: int

    def __call__(
        self,
        params: Any,
        prompts: PromptBatch,
        key: Key[Array, ""],
        sampling: SamplingParams,
        limit_PN: Int[Array, "P N"] | None = None,
    ) -> Rollouts:
        """Generates the rollouts of each prompt.

        Args:
            params: The policy's parameters (pure tree).
            prompts: Right-padded prompts.
            key: The step's key.
            sampling: Temperature and truncation.
            limit_PN: Tokens after which each rollout is cut, at least 1; the engine's maximum when not given.
        """
        ...

    def padded_length(self, length: int) -> int:
        """Smallest of a few lengths that hold ``length`` tokens; the update's completions are cut to it."""
        ...

    def foretell(self, prompts: int, prompt_length: int) -> Foretold:
        """What batches of so many prompts, padded to so many tokens, will compile and hold."""
        ...

    def compiled_programs(self) -> int:
        """Programs compiled so far."""
        ...


def default_chunk(platform: str) -> int:
    """Tokens by which the cache grows: short chunks pay on a CPU, where attention reads the whole cache from memory."""
    return 32 if platform == "cpu" else 256


def cache_sizes(max_completion_length: int, chunk: int) -> list[int]:
    """Sizes through which the cache grows: equal steps of about ``chunk`` tokens up to the limit.

    Each size is one compiled loop and one compiled update, so a last step of a few tokens would cost more than it saves.
    """
    steps = max(1, round(max_completion_length / chunk))
    return [math.ceil(max_completion_length * (i + 1) / steps) for i in range(steps)]


class RolloutEngine:
    """Generates rollouts with a decoder whose structure is fixed and whose parameters are passed at each call.

    Args:
        graph: Graph definition of the ``Decoder`` (``nnx.split``).
        rollouts: Rollouts generated for each prompt (N).
        max_completion_length: Longest completion in tokens (C), EOS included.
        chunk: Tokens by which the cache grows, about.
        eos_ids: Every id that ends a completion.
        width: Rows of one tile once the batch has shrunk; see ``compaction.default_width``.
        rungs: Sizes of the batch from one half to the next; 0 keeps every row to the end.
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
        rungs: int = 2,
        lanes: Lanes | None = None,
        prepare: Callable[[Any], Any] = lambda params: params,
    ):
        self.rollouts = rollouts
        self.max_completion_length = max_completion_length
        self.capacities = cache_sizes(max_completion_length, chunk)
        self.eos_ids = eos_array(eos_ids)
        self.width = min(width, rollouts)
        self.rungs = rungs
        self.lanes = lanes or Lanes()
        # Moving rows takes a moment, and each size that is met is compiled: not at every token.
        self.pause = math.ceil(max_completion_length / 32)
        self.prepare = prepare
        self.prefill = jax.jit(partial(prefill, graph, rollouts, max_completion_length, self.capacities[0]))
        chunks = zip([1, *self.capacities], self.capacities, strict=False)
        self.decode = {c: jax.jit(partial(decode_chunk, graph, begin, c), donate_argnums=1) for begin, c in chunks}
        self.grow = {c: jax.jit(partial(grow, graph, c)) for c in self.capacities[1:]}
        self.shrink = jax.jit(partial(shrink, graph), static_argnames="width")
        # Of bare functions, engines would share one count of programs.
        self.bring_home = jax.jit(partial(bring_home))
        self.cut = jax.jit(partial(cut), static_argnums=0)
        self.join = jax.jit(partial(join))
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
        """As in ``Engine``; each padded length of the prompts is one compiled prefill."""
        params = self.prepare(params)
        count = len(prompts.length_P)
        most_PN = np.full((count, self.rollouts), self.max_completion_length, np.int32)
        limits: Array = spread(most_PN) if limit_PN is None else limit_PN
        lanes = self.lanes_of(count)
        if lanes == 1:
            return self._generate(params, sampling, key, None, prompts, limits)
        firsts = [replicate(np.int32(count // lanes * lane)) for lane in range(lanes)]
        mesh = jax.sharding.get_mesh()

        def generate(first: Array, part: tuple[PromptBatch, Array]) -> Rollouts:
            with nullcontext() if mesh.empty else jax.set_mesh(mesh):  # which every thread has to be told
                return self._generate(params, sampling, key, first, *part)

        return self.join(list(self._threads.map(generate, firsts, self.cut(lanes, (prompts, limits)))))

    def _generate(
        self,
        params: Any,
        sampling: SamplingParams,
        key: Key[Array, ""],
        first: Int[Array, ""] | None,
        prompts: PromptBatch,
        limit_PN: Int[Array, "P N"],
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
                while sizes and (fit := fit_rows(rows, running_SR, rollouts=self.rollouts, width=self.width, size=sizes[0])):
                    home = self._home(home, state, rows)
                    rows, move = fit
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

    def padded_length(self, length: int) -> int:
        """Smallest cache size that holds ``length`` tokens."""
        return next(c for c in self.capacities if c >= length)

    def row_sizes(self, rows: int) -> list[int]:
        """Numbers of rows of one shard, largest first, to which a batch of ``rows`` may shrink."""
        return row_sizes(rows, self.width, self.rungs)

    def compiled_programs(self) -> int:
        """Entries of the compiled programs' call caches so far; on one device constant once every size has been met."""
        programs: list[Any] = [self.prefill, *self.decode.values(), *self.grow.values(), self.shrink, self.bring_home]
        programs += [self.cut, self.join]
        return sum(program._cache_size() for program in programs)

    def visit_programs(
        self, visit: Callable[[Call], Any], params: Any, prompts: PromptBatch, sampling: SamplingParams
    ) -> Rollouts:
        """Visits the programs of a rollout, in one lane, that fills every cache and then goes on with fewer rows; nothing runs.

        Args:
            visit: Gets the call of each program, in their order, and returns its results as shapes, as ``Call.results`` does;
                where the shapes have shardings, each program is the one that follows on the program before it.
            params: Parameters for decoding, as ``prepare`` gives them; shapes are enough, here and for the prompts.
            prompts: The prompts.
            sampling: Temperature and truncation.

        Returns:
            The rollouts as shapes.
        """
        count, shards = len(prompts.length_P), group_shards()
        key = jax.eval_shape(partial(jax.random.key, 0))
        limit_PN, stop = spread_shape((count, self.rollouts), np.int32), Stop(np.int32(0), np.int32(0))  # type: ignore[arg-type]
        state, shared = visit(Call("prefill", self.prefill, (params, prompts, key, sampling, self.eos_ids, limit_PN)))

        def decode(name: str, capacity: int, state: DecodeState, shared: SharedPrompts) -> DecodeState:
            args = (params, state, shared, sampling, self.eos_ids, stop)
            return visit(Call(name, self.decode[capacity], args, donated=state, caches=(state.cache, shared.cache)))

        for capacity in self.capacities:
            if capacity in self.grow:
                state = visit(Call(f"grow {capacity}", self.grow[capacity], (params, state), kept=(params, shared)))
            state = decode(f"decode {capacity}", capacity, state, shared)
        rows: tuple[Array, Array, Array, Array] = state.rows
        for size in self.row_sizes(count // shards * self.rollouts)[:1]:
            each = partial(spread_shape, (shards, size))
            move = Move(each(np.int32), each(np.bool_), spread_shape((shards, size // self.width), np.int32))
            args, static = (params, state, shared, move), {"width": self.width}
            fewer, tiles = visit(Call(f"shrink to {shards * size}", self.shrink, args, static, kept=(params,)))
            state = decode(f"decode {shards * size} rows", self.capacities[-1], fewer, tiles)
            kept = (params, tiles, state.cache)
            rows = visit(Call("bring home", self.bring_home, (rows, state.rows, each(np.int32)), kept=kept))
        return Rollouts(*rows, state.decoded_rows)

    def foretell(self, prompts: int, prompt_length: int) -> Foretold:
        """As in ``Engine``: each program once for every cache size and number of rows. What grows or moves is there twice."""
        lanes, shards = self.lanes_of(prompts), group_shards()
        each = prompts // (lanes * shards)
        smaller, caches, whole = self.row_sizes(each * self.rollouts), self.capacities, self.capacities[-1]
        programs = 1 + len(caches) + (len(caches) - 1) + len(smaller) * (3 * len(caches)) + 2 * (lanes > 1)
        tokens = [each * self.rollouts * ([0, *caches][-2] + whole)]
        tokens += [each * self.rollouts * whole + size // self.width * prompt_length + size * whole for size in smaller[:1]]
        rows, cached = (", ".join(map("{:,}".format, sizes)) for sizes in ([each * self.rollouts, *smaller], caches))
        return Foretold(
            programs=programs,
            completion_lengths=tuple(caches),
            sizes=f"rows of a {'lane' if lanes > 1 else 'shard'} {rows}; caches of {cached} tokens",
            cache_tokens=lanes * (each * prompt_length + max(tokens)),
            lanes=lanes,
        )
