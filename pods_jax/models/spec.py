"""The numbers that define a decoder; ``families.py`` reads them from a Hugging Face config, ``decoder.py`` builds it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3Rope:
    """Rotary scaling of kind ``llama3`` (Llama 3.1 and later).

    Attributes:
        factor: Low frequencies are divided by it.
        low_freq_factor: Frequencies count as low below this many turns over ``original_max_position`` positions.
        high_freq_factor: Frequencies are kept above this many turns; between the two they are blended.
        original_max_position: Longest sequence of the model before it was extended, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class DecoderSpec:
    """Shape of a decoder: RMSNorm, rotary positions, grouped-query attention and a gated SiLU MLP.

    Attributes:
        vocab_size: Rows of the embedding (V).
        width: Model width (D).
        layers: Number of decoder layers.
        q_heads: Query heads (Q), a multiple of ``kv_heads``.
        kv_heads: Key-value heads (K).
        head_size: Size of one head (H), which need not be D / Q.
        feed_forward: Width of the gated MLP (F).
        norm_eps: Epsilon inside the square root of RMSNorm.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: ``None``, or the ``llama3`` scaling.
        tied: The output head is the embedding's transpose.
        qkv_bias: Biases on the q, k and v projections (Qwen2).
        qk_norm: RMSNorm over each head of q and k before the rotation (Qwen3).
        max_positions: Longest prompt and completion together that the model was made for, in tokens.
    """

    vocab_size: int
    width: int
    layers: int
    q_heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Rope | None = None
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 32_768

    @property
    def matrix_weights(self) -> int:
        """Number of weights that every token is multiplied with: the layers' matrices, without the output head."""
        heads = 2 * self.q_heads + 2 * self.kv_heads
        return self.layers * self.width * (heads * self.head_size + 3 * self.feed_forward)
