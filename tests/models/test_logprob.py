from functools import partial
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from pods_jax.models import logprob

P, M, C, D, V = 2, 3, 11, 5, 17
ROWS = P * M * C
CHUNKS = [1, P * V, 2 * P * V + 5, P * M * V, 4 * P * M * V, 10 * P * M * V, 10**9]
token_logp = jaxtyped(typechecker=beartype)(logprob.token_logp)
compiled = jax.jit(token_logp, static_argnames=("logit_chunk", "shards"))


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(P, M, C, D)), rng.normal(size=(D, V))
    return jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32), jnp.asarray(rng.integers(0, V, (P, M, C)))


def softmax64(hidden, head, temperature):
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64) / temperature
    return np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def cotangent():
    return jnp.asarray(np.random.default_rng(1).normal(size=(P, M, C)), jnp.float32)


def weighted(hidden, head, tokens, **options):
    logp, entropy = token_logp(hidden, head, tokens, **options)
    return jnp.sum(logp * cotangent() + 7.0 * entropy)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
@pytest.mark.parametrize("logit_chunk", CHUNKS)
def test_logp_and_entropy_equal_the_float64_softmax_for_any_chunk(data, logit_chunk, temperature):
    hidden, head, tokens = data
    logp, entropy = compiled(hidden, head, tokens, temperature=jnp.float32(temperature), logit_chunk=logit_chunk)
    probability = softmax64(hidden, head, temperature)
    chosen = np.take_along_axis(probability, np.asarray(tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(logp, np.log(chosen), atol=1e-5)
    np.testing.assert_allclose(entropy, -(probability * np.log(probability)).sum(-1), atol=1e-5)
    assert logp.dtype == entropy.dtype == jnp.float32


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("logit_chunk", [1, 7 * P * V, 2 * P * M * V, 10**9])
def test_gradient_equals_the_float64_one_and_entropy_carries_none(data, logit_chunk, temperature):
    hidden, head, tokens = data
    gradient = jax.jit(jax.grad(partial(weighted, temperature=jnp.float32(temperature), logit_chunk=logit_chunk), (0, 1)))
    hidden_gradient, head_gradient = gradient(hidden, head, tokens)
    residual = np.eye(V)[np.asarray(tokens)] - softmax64(hidden, head, temperature)
    by_logits = np.asarray(cotangent(), np.float64)[..., None] * residual / temperature
    np.testing.assert_allclose(hidden_gradient, by_logits @ np.asarray(head, np.float64).T, atol=1e-5)
    expected = np.einsum("pmcd,pmcv->dv", np.asarray(hidden, np.float64), by_logits)
    np.testing.assert_allclose(head_gradient, expected, atol=2e-5)


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def sizes(jaxpr):
    """Elements of every intermediate of a jaxpr and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                inner = getattr(inner, "jaxpr", inner)
                yield from sizes(inner)


def largest_of_gradient(data, **options):
    gradient = jax.value_and_grad(partial(weighted, temperature=jnp.float32(1.0), **options), (0, 1))
    return max(sizes(jax.make_jaxpr(gradient)(*data).jaxpr))


@pytest.mark.parametrize("tokens", [1, 2, 5, 12])
def test_no_array_of_forward_or_backward_holds_more_logits_than_a_chunk(data, tokens):
    assert largest_of_gradient(data, logit_chunk=tokens * P * V) <= max(tokens * P * V, ROWS * D + P * M * D)
    assert largest_of_gradient(data, logit_chunk=10**9) >= ROWS * V


def test_shards_share_the_chunk(data):
    assert largest_of_gradient(data, logit_chunk=P * M * V, shards=4) > 3 * P * M * V
    assert largest_of_gradient(data, logit_chunk=P * M * V, shards=1) < ROWS * V / 2


@pytest.mark.parametrize("logit_chunk", CHUNKS)
def test_chunks_cover_the_tokens_without_an_empty_one(data, logit_chunk):
    jaxpr = jax.make_jaxpr(partial(token_logp, temperature=jnp.float32(1.0), logit_chunk=logit_chunk))(*data)
    (scan,) = (equation for equation in jaxpr.jaxpr.eqns if equation.primitive.name == "scan")
    most = max(1, min(M * C, logit_chunk // (P * V)))
    assert ceil(M * C / most) - 1 <= scan.params["length"] <= ceil(M * C / most)


QWEN_VOCABULARY, WIDTH, CHUNK_LOGITS = 151_936, 64, 1 << 22
MIB = 2**20


def temporary_bytes(prompts, kept, steps, logit_chunk=CHUNK_LOGITS):
    """Temporaries of value and gradient, by the compiler's own plan; nothing runs."""

    def value(hidden, head, tokens, cotangent):
        logp, entropy = token_logp(hidden, head, tokens, temperature=jnp.float32(1.0), logit_chunk=logit_chunk)
        return jnp.sum(logp * cotangent), entropy

    shape, kind = (prompts, kept, steps), jax.ShapeDtypeStruct
    arrays = [kind(s, jnp.float32) for s in ((*shape, WIDTH), (WIDTH, QWEN_VOCABULARY))] + [
        kind(shape, jnp.int32),
        kind(shape, jnp.float32),
    ]
    gradient = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))
    memory = gradient.lower(*arrays).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("larger", [(1, 4, 216), (1, 16, 54), (4, 4, 54), (1, 64, 54)])
def test_memory_of_scoring_follows_neither_rollouts_nor_lengths_at_a_vocabulary_of_151936(larger):
    base = (1, 4, 54)  # whole chunks of 27 tokens
    rows, more = np.prod(base), np.prod(larger)
    growth = temporary_bytes(*larger) - temporary_bytes(*base)
    # What must grow: hidden states and their gradient, cut in chunks, and a few numbers a token.
    assert growth <= (more - rows) * 4 * (2 * WIDTH + 16) + MIB / 4
    # The gradient of the head is accumulated beside at most two chunks of logits: far below all logits.
    head = 4 * WIDTH * QWEN_VOCABULARY
    assert temporary_bytes(*larger) < head + 2 * 4 * CHUNK_LOGITS + more * 4 * (2 * WIDTH + 16) + MIB
    assert temporary_bytes(*larger) < more * QWEN_VOCABULARY * 4 / 5


def test_memory_of_scoring_follows_the_chunk():
    small, large = (temporary_bytes(1, 4, 108, chunk) for chunk in (CHUNK_LOGITS, 4 * CHUNK_LOGITS))
    assert large - small > 2 * 4 * CHUNK_LOGITS


def test_bfloat16_hidden_states_give_float32_results_near_the_exact_ones(data):
    hidden, head, tokens = data
    logp, entropy = compiled(
        hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16), tokens, temperature=jnp.float32(1.0), logit_chunk=P * M * V
    )
    exact = softmax64(hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16), 1.0)
    chosen = np.take_along_axis(exact, np.asarray(tokens)[..., None], -1)[..., 0]
    assert logp.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logp, np.log(chosen), atol=1e-5)
