"""The FLOP formula agrees with what XLA counts, and the work of a group grows as the design says."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pods_jax.bench import floors
from pods_jax.bench.floors import Work, forward_flops, rollout_bytes, rollout_work, update_work
from pods_jax.models.decoder import Decoder
from pods_jax.models.spec import DecoderSpec

SPEC = DecoderSpec(vocab_size=512, width=256, layers=3, q_heads=4, kv_heads=2, head_size=64, feed_forward=1024, qkv_bias=True)


def counted(function, *arguments):
    costs = jax.jit(function).lower(*arguments).cost_analysis()
    assert costs is not None
    return costs["flops"]


@pytest.fixture(scope="module")
def decoder():
    return nnx.eval_shape(lambda: Decoder(SPEC, rngs=nnx.Rngs(0), unroll=True))


@pytest.mark.parametrize("form", ["tied", "untied", "wide heads"])
def test_the_formula_is_what_xla_counts_of_the_plain_forward(form):
    changes = {"tied": {}, "untied": {"tied": False}, "wide heads": {"head_size": 128, "kv_heads": 1}}
    spec = replace(SPEC, **changes[form])
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0), unroll=True)))
    prompts, length = 3, 64
    tokens = jax.ShapeDtypeStruct((prompts, length), jnp.int32)
    flops = counted(lambda state, tokens: nnx.merge(graph, state)(tokens), state, tokens)
    # The program scores all pairs and hides half of them; token-wise operations add a few percent.
    dense = Work(tokens=prompts * length, pairs=prompts * length * length, logits=prompts * length)
    assert forward_flops(spec, dense) < flops < 1.05 * forward_flops(spec, dense)


def test_the_formula_is_what_xla_counts_of_the_group_forward(decoder):
    graph, state = nnx.split(decoder)
    prompts, m, length, steps = 2, 3, 48, 32
    shapes = [(prompts, length), (prompts,), (prompts, m, steps)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]

    def logits(state, *arguments):
        decoder = nnx.merge(graph, state)
        return decoder.logits(decoder.group_hidden(*arguments))

    dense = update_work(prompts, m, length, steps, causal=False)
    assert dense.pairs == prompts * (length**2 + m * steps * (length + steps))
    assert forward_flops(SPEC, dense) < counted(logits, state, *arguments) < 1.05 * forward_flops(SPEC, dense)


def test_work_by_hand():
    # One prompt of 2 tokens, 2 rollouts of 3: two tokens of each rollout pass, and they see 3 and 4 tokens.
    assert rollout_work(1, 2, 2, 3) == Work(tokens=2 + 2 * 2, pairs=3 + 2 * (3 + 4), logits=1 + 2 * 2)
    assert update_work(1, 2, 2, 3) == Work(tokens=2 + 2 * 3, pairs=3 + 2 * (3 + 4 + 5), logits=2 * 3)


def test_flops_by_hand():
    spec = DecoderSpec(vocab_size=11, width=2, layers=3, q_heads=2, kv_heads=1, head_size=4, feed_forward=5)
    per_token = 3 * 2 * (2 * (2 + 2 * 1) * 4 + 2 * 4 * 2 + 3 * 2 * 5)
    assert forward_flops(spec, Work(tokens=7, pairs=0, logits=0)) == 7 * per_token
    assert forward_flops(spec, Work(tokens=0, pairs=7, logits=0)) == 7 * 3 * 4 * 2 * 4
    assert forward_flops(spec, Work(tokens=0, pairs=0, logits=7)) == 7 * 2 * 2 * 11


@pytest.mark.parametrize("work", [rollout_work, update_work])
def test_a_prompt_costs_once_per_group(work):
    short, long = work(3, 8, 100, 7), work(3, 8, 200, 7)
    assert long.tokens - short.tokens == 3 * 100


def test_bytes_by_hand():
    spec = DecoderSpec(vocab_size=11, width=2, layers=3, q_heads=2, kv_heads=1, head_size=4, feed_forward=5)
    weights = 3 * (2 * 4 * 4 + 2 * 4 * 2 + 3 * 2 * 5) + 2 * 11
    # Two decode steps: the second reads one own token of each of 2 rollouts, both read the 5 prompt tokens.
    cached = 2 * 5 + 2 * 1
    assert rollout_bytes(spec, 1, 2, 5, 3, itemsize=4) == 4 * (2 * weights + cached * 2 * 3 * 4)


def test_the_probe_multiplies_what_it_claims(monkeypatch):
    calls = []
    monkeypatch.setattr(floors.jax, "jit", lambda function: lambda *arguments: calls.append((function, arguments)))
    probe = floors.matmul_probe(SPEC, rows=16, dtype=jnp.float32, steps=1)
    monkeypatch.undo()
    probe.run()
    [(function, arguments)] = calls
    assert probe.amount <= counted(function, *arguments) < 1.02 * probe.amount
    assert np.isfinite(np.asarray(function(*arguments))).all()
