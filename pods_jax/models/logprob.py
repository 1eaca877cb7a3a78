"""Log-probabilities and entropies of tokens without a vocabulary-sized array: the output head runs in chunks of time."""

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
    chunk_logits: int,
    shards: int = 1,
) -> tuple[Float[Array, "P M C"], Float[Array, "P M C"]]:
    """``log softmax(hidden head / temperature)[token]`` and the entropy of that softmax, in float32.

    Args:
        hidden_PMCD: Final hidden states that predict the tokens.
        head_DV: Output head.
        tokens_PMC: Tokens to score.
        temperature: Divides the logits.
        chunk_logits: Most logits held at once by one device; sets how many time steps a chunk has (at least one). The backward
            pass recomputes each chunk's logits.
        shards: Devices over which groups and vocabulary are spread.

    Returns:
        Log-probabilities and entropies (nats). The entropy carries no gradient.
    """
    prompts, kept, steps, width = hidden_PMCD.shape
    size = max(1, min(steps, chunk_logits * shards // (prompts * kept * head_DV.shape[1])))
    chunks = math.ceil(steps / size)
    size = math.ceil(steps / chunks)
    pad = chunks * size - steps
    hidden = jnp.pad(hidden_PMCD, ((0, 0), (0, 0), (0, pad), (0, 0))).reshape(prompts, kept, chunks, size, width)
    tokens = jnp.pad(tokens_PMC, ((0, 0), (0, 0), (0, pad))).reshape(prompts, kept, chunks, size)

    @jax.checkpoint
    def one_chunk(hidden: Array, tokens: Array) -> tuple[Array, Array]:
        logits = jnp.einsum("pmcd,dv->pmcv", hidden, head_DV, preferred_element_type=jnp.float32) / temperature
        log_total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        frozen = jax.lax.stop_gradient(logits)
        mean_logit = jnp.sum(jax.nn.softmax(frozen, axis=-1) * frozen, axis=-1)
        return chosen - log_total, jax.lax.stop_gradient(log_total) - mean_logit

    _, (logp, entropy) = jax.lax.scan(
        lambda carry, chunk: (carry, one_chunk(*chunk)), None, (jnp.moveaxis(hidden, 2, 0), jnp.moveaxis(tokens, 2, 0))
    )
    logp, entropy = (jnp.moveaxis(x, 0, 2).reshape(prompts, kept, chunks * size)[:, :, :steps] for x in (logp, entropy))
    return logp, entropy
