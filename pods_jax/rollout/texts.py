"""Completions on the host: their text for verifiers and logs, and their lengths. Text is never tokenised again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pods_jax.devices.sharding import to_local
from pods_jax.types import Rollouts


class Texts(Sequence[list[str]]):
    """Texts of the completions of each group, decoded when they are first asked for.

    Each process asks for the groups that it scores, and the one that writes the log for what it writes of the others.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tokens_PNC: Int[np.ndarray, "P N C"],
        length_PN: Int[np.ndarray, "P N"],
        stop_ids: Iterable[int] = (),
    ):
        self._decode = partial(completion_texts, tokenizer, stop_ids=frozenset(stop_ids))
        self._tokens_PNC, self._length_PN = tokens_PNC, length_PN
        self._decoded: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._tokens_PNC)

    def __getitem__(self, group: int | slice) -> list:  # type: ignore[override]
        wanted = range(len(self))[group]
        groups = list(wanted) if isinstance(wanted, range) else [wanted]
        if missing := [p for p in groups if p not in self._decoded]:
            texts = iter(self._decode(self._tokens_PNC[missing], self._length_PN[missing]))
            self._decoded |= dict(zip(missing, texts, strict=True))
        texts_PN = [self._decoded[p] for p in groups]
        return texts_PN if isinstance(group, slice) else texts_PN[0]


@dataclass(frozen=True)
class Completions:
    """What was generated, on the host and whole on every process.

    Attributes:
        texts_PN: Text of each completion, without the token that ended it.
        length_PN: Completion tokens, the EOS token included.
        finished_PN: False for a completion cut at the limit.
    """

    texts_PN: Texts
    length_PN: Int[np.ndarray, "P N"]
    finished_PN: Bool[np.ndarray, "P N"]


def read_completions(
    tokenizer: PreTrainedTokenizerBase, rollouts: Rollouts, *, prompts: int | None = None, stop_ids: Iterable[int] = ()
) -> Completions:
    """Brings completions to the host; log-probabilities stay on the devices.

    Args:
        tokenizer: The policy's.
        rollouts: What an engine generated.
        prompts: How many prompts to read, from the first; all when not given.
        stop_ids: Tokens that end a completion, which the tokenizer alone need not know; they leave no trace in the text.
    """
    arrays = to_local((rollouts.tokens_PNC, rollouts.length_PN, rollouts.finished_PN))
    tokens_PNC, length_PN, finished_PN = (array[:prompts] for array in arrays)
    return Completions(Texts(tokenizer, tokens_PNC, length_PN, stop_ids), length_PN, finished_PN)


def completion_texts(
    tokenizer: PreTrainedTokenizerBase,
    tokens_PNC: Int[np.ndarray, "P N C"],
    length_PN: Int[np.ndarray, "P N"],
    *,
    stop_ids: Iterable[int] = (),
) -> list[list[str]]:
    """Text of each completion up to its length, without BOS, padding and the tokens that end a completion.

    Every other special token stays: a tokenizer may hold ``<think>``, ``<answer>`` or the opening of a turn as one.
    """
    own = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    dropped = {token for token in (*own, *stop_ids) if isinstance(token, int)}
    prompts, rollouts, _ = tokens_PNC.shape
    rows = [
        [token for token in tokens_PNC[p, n, : length_PN[p, n]].tolist() if token not in dropped]
        for p in range(prompts)
        for n in range(rollouts)
    ]
    texts = _decoded(tokenizer, rows)
    return [list(texts[p * rollouts : (p + 1) * rollouts]) for p in range(prompts)]


def _decoded(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> Sequence[str]:
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        # What batch_decode comes to, on all cores and without its look at the type of every token.
        return tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=False)
    return tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
