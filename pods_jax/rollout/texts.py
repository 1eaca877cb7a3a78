"""Completion tokens as text, for verifiers and logs. Text is never tokenised again."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def completion_texts(
    tokenizer: PreTrainedTokenizerBase, tokens_PNC: Int[np.ndarray, "P N C"], length_PN: Int[np.ndarray, "P N"]
) -> list[list[str]]:
    """Text of each completion up to its length, special tokens (EOS among them) left out."""
    prompts, rollouts, _ = tokens_PNC.shape
    rows = [tokens_PNC[p, n, : length_PN[p, n]].tolist() for p in range(prompts) for n in range(rollouts)]
    texts = _decoded(tokenizer, rows)
    return [list(texts[p * rollouts : (p + 1) * rollouts]) for p in range(prompts)]


def _decoded(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> Sequence[str]:
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        # What batch_decode comes to, on all cores and without its look at the type of every token.
        return tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=True)
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)
