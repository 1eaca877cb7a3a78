"""The tokenizer of an export: written next to adapters, and proved to encode as the policy's own does."""

import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from pods_jax.data.generation import FILE
from pods_jax.data.prompts import load_tokenizer

SAMPLE = "What is 12 + 30?\n\nLet x = 3.5·10^2 (naïve, Größe, 数学), so <think>x\t> 7</think> and \\boxed{42}  \N{ROCKET}"
"""Words, digits, spaces, tags, LaTeX, and letters beyond ASCII."""


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, generation: Path, folder: Path) -> None:
    """Writes the policy's tokenizer, chat templates and stop ids into a folder of adapters.

    They are saved and not copied: which class reads a tokenizer's files depends on the ``config.json`` next to them, which a
    folder of adapters does not have.

    Args:
        tokenizer: The policy's.
        generation: Folder whose ``generation_config.json`` is copied, if it has one.
        folder: Folder of the adapters.

    Raises:
        RuntimeError: As ``check_tokens``.
    """
    tokenizer.save_pretrained(str(folder))
    if (generation / FILE).is_file():
        shutil.copyfile(generation / FILE, folder / FILE)
    check_tokens(tokenizer, folder)


def check_tokens(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Encodes a text with the policy's tokenizer and with an exported one.

    Args:
        tokenizer: The policy's.
        folder: The export.

    Raises:
        RuntimeError: Tokens, special tokens or chat templates differ; or the export's tokenizer cannot be read.
    """
    try:
        exported = load_tokenizer(folder)
    except ValueError as error:
        raise RuntimeError(f"{folder} is complete but for its tokenizer: {error}") from error
    for what, ours, theirs in (
        ("encoding of a sample", tokenizer(SAMPLE)["input_ids"], exported(SAMPLE)["input_ids"]),
        ("special tokens", tokenizer.special_tokens_map, exported.special_tokens_map),
        ("chat template", tokenizer.chat_template, exported.chat_template),
    ):
        if ours != theirs:
            raise RuntimeError(f"{folder} has another {what} than the tokenizer that the policy was trained with")
