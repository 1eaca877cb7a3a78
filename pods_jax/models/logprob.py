"""Log-probabilities and entropies of tokens; the output head runs in chunks, so that no array holds all logits."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_logp(
    hidden_PMCD: Float[Array, "P M C D"],
    head_DV: Float[Array, "D V"],
    tokens_PMC: Int[Array, "P M C"],
    *,
    temperature: Float[Array, ""],
    logit_chunk: int,
    shards: int = 1,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "P M C"], Float[Array, "P M C"]]:
    """Returns the log-probability of each token, and the entropy of the distribution that predicts it.

        log softmax(hidden head / temperature)[token]

    Args:
        hidden_PMCD: Final hidden states that predict the tokens.
        head_DV: Output head.
        tokens_PMC: Tokens to score.
        temperature: Divides the logits.
        logit_chunk: Most logits that one device holds at once, which sets how many tokens of every group a chunk has (at least
            one). The backward pass recomputes each chunk's logits.
        shards: Devices over which groups and vocabulary are spread.
        entropy_gradient: Whether the gradient flows through the entropies; False spares computing it.

    Returns:
        Log-probabilities and entropies, float32, in nats.
    """
    prompts, kept, steps, width = hidden_PMCD.shape
    # A group's rollouts lie on one device, so its tokens can be cut anywhere without communication.
    count = kept * steps
    size = max(1, min(count, logit_chunk * shards // (prompts * head_DV.shape[1])))
    chunks = math.ceil(count / size)
    size = math.ceil(count / chunks)

    def cut(x: Array, *tail: int) -> Array:
        flat = jnp.pad(x.reshape(prompts, count, *tail), ((0, 0), (0, chunks * size - count), *[(0, 0)] * len(tail)))
        return jnp.moveaxis(flat.reshape(prompts, chunks, size, *tail), 1, 0)

    @jax.checkpoint
    def one_chunk(hidden: Array, tokens: Array) -> tuple[Array, Array]:
        logits = jnp.einsum("ptd,dv->ptv", hidden, head_DV, preferred_element_type=jnp.float32) / temperature
        log_total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        seen, seen_total = (logits, log_total) if entropy_gradient else jax.lax.stop_gradient((logits, log_total))
        mean_logit = jnp.sum(jax.nn.softmax(seen, axis=-1) * seen, axis=-1)
        return chosen - log_total, seen_total - mean_logit

    _, scores = jax.lax.scan(lambda carry, chunk: (carry, one_chunk(*chunk)), None, (cut(hidden_PMCD, width), cut(tokens_PMC)))
    logp, entropy = (
        jnp.moveaxis(x, 0, 1).reshape(prompts, chunks * size)[:, :count].reshape(prompts, kept, steps) for x in scores
    )
    return logp, entropy
