"""The floor of a benchmark: the matrix products that no program can avoid, at the speed at which this machine multiplies.

    flops = tokens * layers * 2 (D (Q + 2K) H + Q H D + 3 D F)  +  pairs * layers * 4 Q H  +  logits * 2 D V

``tokens`` pass through the layers, ``pairs`` are a query token with a key token it may see (a score and a weighted value
each), ``logits`` are rows of the output head. Norms, rotary positions, softmax and sampling count nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pods_jax.models.spec import DecoderSpec

LARGEST_BUFFER_BYTES = 1 << 28


@dataclass(frozen=True)
class Work:
    """How much passes through a decoder; multiply by 3 for a forward and its backward."""

    tokens: int
    pairs: int
    logits: int


def forward_flops(spec: DecoderSpec, work: Work) -> int:
    """Floating-point operations (a multiply-add is two) of one forward."""
    attention = work.pairs * spec.layers * 4 * spec.q_heads * spec.head_size
    return work.tokens * 2 * spec.matrix_weights + attention + work.logits * 2 * spec.width * spec.vocab_size


def rollout_work(prompts: int, n: int, length: int, steps: int) -> Work:
    """Work of generating ``steps`` tokens for each of n rollouts of prompts of ``length`` tokens.

    A prompt passes once for its n rollouts, its last position gives the first token, and the last token never passes.
    """
    own = n * (steps - 1)
    own_pairs = n * ((steps - 1) * length + _causal_pairs(steps - 1))
    return Work(prompts * (length + own), prompts * (_causal_pairs(length) + own_pairs), prompts * (1 + own))


def update_work(prompts: int, m: int, length: int, steps: int, *, causal: bool = True) -> Work:
    """Work of one forward over m kept rollouts of every group: ``length + m * steps`` tokens, the prompt once.

    Without ``causal`` the pairs are those of full rows, hidden ones too: what a program multiplies that masks scores.
    """
    pairs = _causal_pairs if causal else lambda tokens: tokens**2
    own_pairs = m * (steps * length + pairs(steps))
    return Work(prompts * (length + m * steps), prompts * (pairs(length) + own_pairs), prompts * m * steps)


def added(works: Sequence[Work], shared: Work, copies: int) -> Work:
    """The sum of works, of which ``copies`` count something ``shared`` once too often."""
    return Work(*(sum(getattr(w, f.name) for w in works) - copies * getattr(shared, f.name) for f in fields(Work)))


def _causal_pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def rollout_bytes(spec: DecoderSpec, prompts: int, n: int, length: int, steps: int, itemsize: int) -> int:
    """Bytes that decoding must read: all weights and every cached key and value, once a token (the prompt's once a group)."""
    weights = spec.matrix_weights + spec.width * spec.vocab_size
    cached = prompts * ((steps - 1) * length + n * _causal_pairs(steps - 2))
    return itemsize * ((steps - 1) * weights + cached * 2 * spec.layers * spec.kv_heads * spec.head_size)


@dataclass(frozen=True)
class Probe:
    """A program whose speed is the machine's limit for the shapes at hand; ``amount`` is its FLOPs or bytes."""

    run: Callable[[], jax.Array]
    amount: int


def matmul_probe(spec: DecoderSpec, rows: int, dtype: DTypeLike, steps: int) -> Probe:
    """``steps`` times the layers' and the head's matrix products with ``rows`` tokens, and nothing between them.

    Products that share their input are one (q, k, v; gate, up): the fastest form of these shapes.
    """
    q_width, kv_width = spec.q_heads * spec.head_size, 2 * spec.kv_heads * spec.head_size
    sizes = {
        "qkv": (spec.width, q_width + kv_width),
        "o": (q_width, spec.width),
        "gate_up": (spec.width, 2 * spec.feed_forward),
        "down": (spec.feed_forward, spec.width),
    }
    keys = iter(jax.random.split(jax.random.key(0), len(sizes) * spec.layers + 1))

    def weight(shape: tuple[int, int]) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype) * shape[0] ** -0.5

    layers = [{name: weight(shape) for name, shape in sizes.items()} for _ in range(spec.layers)]
    head = weight((spec.width, spec.vocab_size))

    @jax.jit
    def chain(x: jax.Array, layers: list[dict[str, jax.Array]], head: jax.Array) -> jax.Array:
        def one(_, x):
            first = x
            for w in layers:
                x = (x @ w["qkv"])[:, :q_width] @ w["o"]
                x = (x @ w["gate_up"])[:, : spec.feed_forward] @ w["down"]
            # Adding one logit keeps the head alive; its size keeps the numbers finite over many steps.
            return first + 1e-6 * (x + (x @ head)[:, :1])

        return jax.lax.fori_loop(0, steps, one, x)

    start = jnp.ones((rows, spec.width), dtype)
    return Probe(lambda: chain(start, layers, head), steps * forward_flops(spec, Work(tokens=rows, pairs=0, logits=rows)))


def memory_probe(nbytes: int, steps: int) -> Probe:
    """``steps`` passes over one buffer of ``nbytes`` (at most ``LARGEST_BUFFER_BYTES``), read and written in place.

    A buffer as large as what a step reads stays in a cache exactly where that could.
    """
    x = jnp.ones((max(1, math.ceil(min(nbytes, LARGEST_BUFFER_BYTES) / 4096)), 1024), jnp.float32)
    pass_over = jax.jit(lambda x: jax.lax.fori_loop(0, steps, lambda _, x: 0.5 * x + 1.0, x)[0, 0])
    return Probe(lambda: pass_over(x), 2 * x.nbytes * steps)
