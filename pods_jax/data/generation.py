"""What is taken from a model's ``generation_config.json``: its stop ids, and nothing else, which is said at the start."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pods_jax.json_file import read_object, shown

FILE = "generation_config.json"
# Settings that change what is sampled. Here the run's configuration has them.
_SAMPLING = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "stop_strings",
)


def read_generation(folder: Path) -> dict[str, Any]:
    """Returns what ``generation_config.json`` of a folder holds; an empty dict where there is none.

    Raises:
        ValueError: The file is no JSON object.
    """
    return read_object(folder / FILE) if (folder / FILE).is_file() else {}


def stop_lines(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], folder: Path) -> list[str]:
    """Returns lines that say what ends a completion, and which defaults of sampling are not taken.

    Args:
        tokenizer: The policy's.
        ids: Stop ids.
        folder: Folder of ``generation_config.json``.

    Raises:
        ValueError: The file is no JSON object.
    """
    names = tokenizer.convert_ids_to_tokens(list(ids))
    lines = ["a completion ends at token " + " or ".join(f"{i} ({shown(name)})" for i, name in zip(ids, names, strict=True))]
    given = {key: value for key, value in read_generation(folder).items() if key in _SAMPLING and value is not None}
    if given:
        settings = ", ".join(f"{key}={shown(value)}" for key, value in given.items())
        lines.append(f"{folder / FILE} has {settings}: not taken, what is sampled is set by rollout.* alone")
    return lines
