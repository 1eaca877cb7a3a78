"""How a policy's texts become tokens, and which tokens end a completion: the model's own way, or one of the user's."""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pods_jax.assembly.policy import ModelFolders, find_folder, find_folders
from pods_jax.config.fields import ConfigError
from pods_jax.config.sections import DataConfig, ModelConfig
from pods_jax.data.generation import FILE as GENERATION_FILE
from pods_jax.data.generation import read_generation
from pods_jax.data.prompts import eos_ids, load_tokenizer, tokenizer_difference
from pods_jax.data.templates import TEMPLATE_FILE, check_options, default_template, read_options, read_template, with_defaults
from pods_jax.models.families import read_spec


@dataclass(frozen=True)
class Texts:
    """How a policy's texts become tokens and end.

    Attributes:
        folders: Where the policy's pieces lie; ``folders.tokenizer`` is the one of ``model.tokenizer`` where that is set.
        tokenizer: The tokenizer, with the chat template of ``data.chat_template`` where that is set.
        template_options: Values of the template's own variables.
        stop_ids: Every token that ends a completion.
        exported_files: Texts by the names of the files that an export holds, where they are not the folder's own.
        template: The text of ``data.chat_template``, or None.
    """

    folders: ModelFolders
    tokenizer: PreTrainedTokenizerBase
    template_options: Mapping[str, Any]
    stop_ids: tuple[int, ...]
    exported_files: Mapping[str, str]
    template: str | None

    def exported_tokenizer(self) -> PreTrainedTokenizerBase:
        """Returns the tokenizer as an export holds it: its chat template has the options as defaults."""
        if TEMPLATE_FILE not in self.exported_files:
            return self.tokenizer
        return _with_template(self.tokenizer, self.exported_files[TEMPLATE_FILE])


def find_texts(model: ModelConfig, data: DataConfig) -> Texts:
    """Reads the tokenizer, the chat template and the stop ids that the configuration names.

    Raises:
        ConfigError: ``model.path`` or ``model.tokenizer`` cannot be had, or the tokenizer has ids that the model has not.
        ValueError: A file cannot be read, or the chat template has no such option.
    """
    folders = find_folders(model.path, model.revision)
    # First, for a tokenizer's library also reads the config, and trips over a malformed one.
    vocab_size = read_spec(folders.model).vocab_size
    if model.tokenizer is None:
        tokenizer = load_tokenizer(folders.tokenizer)
    else:
        folders = replace(folders, tokenizer=find_folder(model.tokenizer, key="model.tokenizer"))
        tokenizer = _other_tokenizer(model, folders, vocab_size)
    template = None if data.chat_template is None else read_template(data.chat_template)
    if template is not None:
        tokenizer = _with_template(tokenizer, template)
    options = read_options(data.template_options)
    check_options(tokenizer, options)
    stop_ids = eos_ids(tokenizer, folders.generation)
    files = {}
    if template is not None or options:
        files[TEMPLATE_FILE] = with_defaults(default_template(tokenizer) or "", options)
    if model.tokenizer is not None:
        files[GENERATION_FILE] = _generation_text(folders, tokenizer, stop_ids)
    return Texts(folders, tokenizer, options, stop_ids, files, template)


def keep_template(texts: Texts, folder: Path) -> None:
    """Writes an own chat template into the run folder, for evaluations of the run."""
    if texts.template is not None:
        (folder / TEMPLATE_FILE).write_text(texts.template, encoding="utf-8")


def check_kept_template(texts: Texts, data: DataConfig, folder: Path) -> None:
    """Refuses to continue a run whose chat template has been edited since.

    Raises:
        ConfigError: The template is another than the one that the run folder keeps.
    """
    kept = folder / TEMPLATE_FILE
    if texts.template is not None and kept.is_file() and kept.read_text(encoding="utf-8") != texts.template:
        raise ConfigError(f"data.chat_template={data.chat_template} has changed since the run started; {kept} is what it was")


def _with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer with another default template; those for tools stay."""
    changed = copy.copy(tokenizer)
    named = tokenizer.chat_template
    changed.chat_template = {**named, "default": template} if isinstance(named, dict) else template
    return changed


def _other_tokenizer(model: ModelConfig, folders: ModelFolders, vocab_size: int) -> PreTrainedTokenizerBase:
    """Loads a tokenizer that is not the model's, as it will be read next to the model's config."""
    alone = load_tokenizer(folders.tokenizer, key="model.tokenizer")
    tokenizer = load_tokenizer(folders.tokenizer, key="model.tokenizer", model=folders.model)
    if what := tokenizer_difference(alone, tokenizer):
        raise ConfigError(
            f"model.tokenizer={model.tokenizer} cannot be exported with model.path={model.path}: next to the model's "
            f"config.json transformers reads it as {type(tokenizer).__name__}, with another {what}"
        )
    highest = max(tokenizer.get_vocab().values())
    if highest >= vocab_size:
        raise ConfigError(
            f"model.tokenizer={model.tokenizer} has token ids up to {highest}; "
            f"the vocabulary of model.path={model.path} ends at {vocab_size - 1}"
        )
    return tokenizer


def _generation_text(folders: ModelFolders, tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...]) -> str:
    """The model's ``generation_config.json`` with the special tokens of another tokenizer."""
    special = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": list(stop_ids)}
    settings = read_generation(folders.generation) | {name: value for name, value in special.items() if value is not None}
    return json.dumps(settings, indent=2) + "\n"
