"""The rollout engine: prompts in, n completions of each out, in jitted chunks.

A prompt is prefilled once for its n rollouts. Decoding runs in chunks; each chunk is one ``while_loop`` whose cache has room
for the tokens so far and one chunk more, so no token attends over the whole maximum, and it ends as soon as every rollout has
ended. The set of compiled programs is one prefill for each prompt bucket and one loop for each cache size; sampling
parameters, EOS ids and keys are traced. Every draw's key is folded from the step's key, the prompt's place in the step, the
rollout's index and the token's position, so neither chunks nor devices change a token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from pods_jax.rollout.sampling import SamplingParams, sample
from pods_jax.sharding import constrain, replicate
from pods_jax.types import PromptBatch, Rollouts

MAX_EOS_IDS = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """What a chunk of decoding reads and returns; donated from chunk to chunk.

    ``filled`` counts the tokens every rollout has (finished rollouts hold padding beyond their length).
    """

    cache: Any
    key_PN: Key[Array, "P N"]
    tokens_PNC: Int[Array, "P N C"]
    logp_PNC: Float[Array, "P N C"]
    length_PN: Int[Array, "P N"]
    finished_PN: Bool[Array, "P N"]
    filled: Int[Array, ""]


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


def rollout_keys(key: Key[Array, ""], prompts: int, rollouts: int) -> Key[Array, "P N"]:
    """One key per rollout, folded from the prompt's place and the rollout's index."""
    per_prompt = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(prompts))
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(per_prompt, jnp.arange(rollouts))


class RolloutEngine:
    """Generates rollouts with a decoder whose structure is fixed and whose parameters are passed at each call.

    Args:
        graph: Graph definition of the ``Decoder`` (``nnx.split``).
        rollouts: Rollouts generated for each prompt (N).
        max_completion_length: Longest completion in tokens (C), EOS included.
        chunk: Tokens by which the cache grows, about.
        eos_ids: Every id that ends a completion.
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
        prepare: Callable[[Any], Any] = lambda params: params,
    ):
        self.rollouts = rollouts
        self.max_completion_length = max_completion_length
        self.capacities = cache_sizes(max_completion_length, chunk)
        self.eos_ids = eos_array(eos_ids)
        self._prepare = prepare
        self.prefill = jax.jit(partial(_prefill, graph, rollouts, max_completion_length, self.capacities[0]))
        self.decode = {c: jax.jit(partial(_decode_chunk, graph, c), donate_argnums=1) for c in self.capacities}
        self.grow = {c: jax.jit(partial(_grow, graph, c)) for c in self.capacities[1:]}

    def __call__(self, params: Any, prompts: PromptBatch, key: Key[Array, ""], sampling: SamplingParams) -> Rollouts:
        """Generates ``rollouts`` completions of each prompt.

        Args:
            params: The decoder's parameters (pure tree).
            prompts: Right-padded prompts; each padded length is one compiled prefill.
            key: The step's key.
            sampling: Temperature and truncation.
        """
        params = self._prepare(params)
        state, prompt_cache = self.prefill(params, prompts, key, sampling, self._eos)
        for capacity in self.capacities:
            if capacity in self.grow:
                if bool(jax.device_get(state.finished_PN.all())):
                    break
                state = self.grow[capacity](params, state)
            state = self.decode[capacity](params, state, prompt_cache, prompts.length_P, sampling, self._eos)
        return Rollouts(state.tokens_PNC, state.logp_PNC, state.length_PN, state.finished_PN)

    @cached_property
    def _eos(self) -> Int[Array, "E"]:
        # At the first call, not when built: only then is there a device to put them on.
        return replicate(self.eos_ids)

    def bucket(self, length: int) -> int:
        """Smallest cache size that holds ``length`` tokens: the update's completions are cut to it."""
        return next(c for c in self.capacities if c >= length)

    def compiled_programs(self) -> int:
        """Number of compiled programs so far; constant after warm-up."""
        programs: list[Any] = [self.prefill, *self.decode.values(), *self.grow.values()]
        return sum(program._cache_size() for program in programs)


def _record(state: DecodeState, slot: Array, token_PN: Array, logp_PN: Array, eos_ids: Array) -> DecodeState:
    """Writes the token drawn for completion position ``slot``; rollouts that had ended keep zeros."""
    running = ~state.finished_PN
    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=slot, axis=2)
    return replace(
        state,
        tokens_PNC=put(state.tokens_PNC, jnp.where(running, token_PN, 0)[..., None]),
        logp_PNC=put(state.logp_PNC, jnp.where(running, logp_PN, 0.0)[..., None]),
        length_PN=state.length_PN + running,
        finished_PN=state.finished_PN | (token_PN[..., None] == eos_ids[None, None]).any(axis=-1),
        filled=slot + 1,
    )


def _draw(logits_PNV: Array, key_PN: Array, position: Array, sampling: SamplingParams) -> tuple[Array, Array]:
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))(key_PN, position)
    return sample(logits_PNV, keys, sampling)


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
) -> tuple[DecodeState, Any]:
    """Runs the prompts, and draws each rollout's first token from its prompt's last hidden state."""
    decoder = nnx.merge(graph, params)
    count = prompts.tokens_PL.shape[0]
    hidden_PLD, prompt_cache = decoder.prefill(prompts.tokens_PL)
    last_PD = jnp.take_along_axis(hidden_PLD, (prompts.length_P - 1)[:, None, None], axis=1)[:, 0]
    logits_PV = decoder.logits(last_PD)
    shape = (count, rollouts)

    def zeros(dtype: Any, *tail: int) -> Array:
        return constrain(jnp.zeros((*shape, *tail), dtype), ("prompts", "rollouts", "tokens")[: 2 + len(tail)])

    state = DecodeState(
        cache=decoder.empty_cache(*shape, capacity),
        key_PN=rollout_keys(key, *shape),
        tokens_PNC=zeros(jnp.int32, max_length),
        logp_PNC=zeros(jnp.float32, max_length),
        length_PN=zeros(jnp.int32),
        finished_PN=zeros(bool),
        filled=jnp.int32(0),
    )
    logits_PNV = jnp.broadcast_to(logits_PV[:, None], (*shape, logits_PV.shape[-1]))
    token_PN, logp_PN = _draw(logits_PNV, state.key_PN, jnp.int32(0), sampling)
    return _record(state, jnp.int32(0), token_PN, logp_PN, eos_ids), prompt_cache


def _decode_chunk(
    graph: nnx.GraphDef,
    capacity: int,
    params: Any,
    state: DecodeState,
    prompt_cache: Any,
    prompt_length_P: Array,
    sampling: SamplingParams,
    eos_ids: Array,
) -> DecodeState:
    """Decodes until the cache is full or every rollout has ended."""
    decoder = nnx.merge(graph, params)
    weights = decoder.decode_weights()

    def unfinished(state: DecodeState) -> Array:
        return (state.filled < capacity) & ~state.finished_PN.all()

    def one_token(state: DecodeState) -> DecodeState:
        before = state.filled - 1
        token_PN = jax.lax.dynamic_index_in_dim(state.tokens_PNC, before, axis=2, keepdims=False)
        logits_PNV, cache = decoder.decode(weights, token_PN, prompt_length_P, prompt_cache, state.cache, before)
        drawn_PN, logp_PN = _draw(logits_PNV, state.key_PN, state.filled, sampling)
        return _record(replace(state, cache=cache), state.filled, drawn_PN, logp_PN, eos_ids)

    return jax.lax.while_loop(unfinished, one_token, state)


def _grow(graph: nnx.GraphDef, capacity: int, params: Any, state: DecodeState) -> DecodeState:
    decoder = nnx.merge(graph, params)
    return replace(state, cache=decoder.grow_cache(state.cache, capacity))
