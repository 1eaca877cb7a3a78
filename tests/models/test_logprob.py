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
CHUNKS = [1, P * M * V, 2 * P * M * V + 5, 4 * P * M * V, 10 * P * M * V, 10**9]
token_logp = jaxtyped(typechecker=beartype)(logprob.token_logp)
compiled = jax.jit(token_logp, static_argnames=("chunk_logits", "shards"))


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
@pytest.mark.parametrize("chunk_logits", CHUNKS)
def test_logp_and_entropy_equal_the_float64_softmax_for_any_chunk(data, chunk_logits, temperature):
    hidden, head, tokens = data
    logp, entropy = compiled(hidden, head, tokens, temperature=jnp.float32(temperature), chunk_logits=chunk_logits)
    probability = softmax64(hidden, head, temperature)
    chosen = np.take_along_axis(probability, np.asarray(tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(logp, np.log(chosen), atol=1e-5)
    np.testing.assert_allclose(entropy, -(probability * np.log(probability)).sum(-1), atol=1e-5)
    assert logp.dtype == entropy.dtype == jnp.float32


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("chunk_logits", [1, 2 * P * M * V, 10**9])
def test_gradient_equals_the_float64_one_and_entropy_carries_none(data, chunk_logits, temperature):
    hidden, head, tokens = data
    gradient = jax.jit(jax.grad(partial(weighted, temperature=jnp.float32(temperature), chunk_logits=chunk_logits), (0, 1)))
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


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_no_array_of_forward_or_backward_holds_more_logits_than_a_chunk(data, steps):
    assert largest_of_gradient(data, chunk_logits=steps * P * M * V) <= max(steps * P * M * V, ROWS * D + P * M * D)
    assert largest_of_gradient(data, chunk_logits=10**9) >= ROWS * V


def test_shards_share_the_chunk(data):
    assert largest_of_gradient(data, chunk_logits=P * M * V, shards=4) > 3 * P * M * V
    assert largest_of_gradient(data, chunk_logits=P * M * V, shards=1) < ROWS * V / 2


@pytest.mark.parametrize("chunk_logits", CHUNKS)
def test_chunks_cover_the_steps_without_an_empty_one(data, chunk_logits):
    jaxpr = jax.make_jaxpr(partial(token_logp, temperature=jnp.float32(1.0), chunk_logits=chunk_logits))(*data)
    (scan,) = (equation for equation in jaxpr.jaxpr.eqns if equation.primitive.name == "scan")
    most = max(1, min(C, chunk_logits // (P * M * V)))
    assert scan.params["length"] == ceil(C / most)


def test_bfloat16_hidden_states_give_float32_results_near_the_exact_ones(data):
    hidden, head, tokens = data
    logp, entropy = compiled(
        hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16), tokens, temperature=jnp.float32(1.0), chunk_logits=P * M * V
    )
    exact = softmax64(hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16), 1.0)
    chosen = np.take_along_axis(exact, np.asarray(tokens)[..., None], -1)[..., 0]
    assert logp.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logp, np.log(chosen), atol=1e-5)
