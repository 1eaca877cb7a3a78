"""The tokenizer of an export: written next to adapters, and proved to encode as the policy's own does."""

import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from pods_jax.assembly.texts import Texts
from pods_jax.data.generation import FILE
from pods_jax.data.prompts import load_tokenizer, tokenizer_difference


def save_tokenizer(texts: Texts, folder: Path) -> None:
    """Writes the policy's tokenizer, chat templates and stop ids into a folder of adapters.

    They are saved and not copied: which class reads a tokenizer's files depends on the ``config.json`` next to them, which a
    folder of adapters does not have.

    Args:
        texts: The policy's.
        folder: Folder of the adapters.

    Raises:
        RuntimeError: As ``check_tokens``.
    """
    tokenizer, generation = texts.exported_tokenizer(), texts.folders.generation / FILE
    tokenizer.save_pretrained(str(folder))
    if FILE in texts.exported_files:
        (folder / FILE).write_text(texts.exported_files[FILE], encoding="utf-8")
    elif generation.is_file():
        shutil.copyfile(generation, folder / FILE)
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
    if what := tokenizer_difference(tokenizer, exported):
        raise RuntimeError(f"{folder} has another {what} than the tokenizer that the policy was trained with")
