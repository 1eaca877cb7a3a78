"""The bundled model's tokenizer: one token for each character of the arithmetic task, one for each of the four tags.

Called by the script that makes the bundled model; what it writes is read back by the same code as any other tokenizer.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = "0123456789+-*=/%().,:? \n"
"""Every other character becomes ``<unk>``. With these the vocabulary is 32 tokens, which divides over 2, 4 and 8 shards."""
CHAT_TEMPLATE = "{{- bos_token -}}\n{%- for message in messages -%}\n{{- message['content'] -}}\n{%- endfor -%}\n"
"""BOS, then the contents of the messages as they stand; the model answers right after the last."""


def build_tokenizer() -> Tokenizer:
    """Build the character-level tokenizer; within its alphabet, decoding what was encoded gives the same text back."""
    entries = [PAD, BOS, EOS, UNKNOWN, *TAGS, *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({entry: index for index, entry in enumerate(entries)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(entry, normalized=False, special=True) for entry in (PAD, BOS, EOS, UNKNOWN)])
    # The tags are not special: decoding that skips special tokens must keep them, the rewards read them.
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def write_tokenizer(folder: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json into a folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    names = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    _write_json(folder / "tokenizer_config.json", settings)
    ids = {f"{name}_id": tokenizer.token_to_id(entry) for name, entry in names.items() if entry != UNKNOWN}
    _write_json(folder / "generation_config.json", ids)


def _write_json(file: Path, values: Mapping[str, object]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
