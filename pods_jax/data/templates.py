"""The chat template that turns messages into a prompt, where a user brings an own one or sets its options.

A template is a Jinja text. Beside the messages it reads variables of its own (``enable_thinking`` of Qwen3): its options. They
are given when prompts are rendered, and written in front of the template that is exported with the model, so that the exported
folder renders the same prompts by itself.
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import TemplateError, meta
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

TEMPLATE_FILE = "chat_template.jinja"
# What the renderer fills in itself.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "dict", "namespace"}


class _Generation(Extension):
    """The block tag of transformers around what an assistant writes; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """Returns the content of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_template(path: str) -> str:
    """Reads a chat template from a file.

    Raises:
        ValueError: The file cannot be read, or is no Jinja template.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
        _environment().parse(text)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"data.chat_template={path} cannot be read: {error}") from error
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        at = "" if line is None else f" (line {line})"
        raise ValueError(f"data.chat_template={path} is no Jinja template: {error}{at}") from error
    return text


def read_options(options: Sequence[str]) -> dict[str, Any]:
    """Reads ``data.template_options``: each ``name=value``, the value as YAML reads it (``false``, ``3``, ``text``).

    Raises:
        ValueError: An option has not that form, its value is no truth value, number or text, or it is given twice.
    """
    read: dict[str, Any] = {}
    for option in options:
        name, sign, text = option.partition("=")
        try:
            value = yaml.safe_load(text) if sign else None
        except yaml.YAMLError:
            value = None
        finite = not isinstance(value, float) or math.isfinite(value)
        if not name.isidentifier() or not isinstance(value, bool | int | float | str) or not finite:
            raise ValueError(f"data.template_options={option!r} must be name=value, the value true, false, a number or a text")
        if name in read:
            raise ValueError(f"data.template_options gives {name} twice")
        read[name] = value
    return read


def default_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns the template that a prompt without tools is rendered with, or None."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def check_options(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
    """Refuses options that the tokenizer's chat template does not read, which would change nothing.

    Raises:
        ValueError: The message gives the nearest name and all names.
    """
    if not options:
        return
    template = default_template(tokenizer)
    if template is None:
        raise ValueError(f"data.template_options={','.join(options)}: the model has no chat template; give data.chat_template")
    special = {name for name in tokenizer.special_tokens_map if name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    known = sorted(_variables(template) - _GIVEN - special)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"data.template_options={name}: the chat template reads no such variable; {hint}"
                f"it reads: {', '.join(known) or 'none'}"
            )


def with_defaults(template: str, options: Mapping[str, Any]) -> str:
    """Returns the template with the options as defaults in front, which whoever renders it may still set otherwise."""
    return "".join(_default(name, value) for name, value in options.items()) + template


def _default(name: str, value: Any) -> str:
    # JSON writes all kinds as Jinja reads them. The line break is dropped in rendering, and lets the template begin a line.
    return f"{{%- if {name} is not defined %}}{{%- set {name} = {json.dumps(value)} %}}{{%- endif %}}\n"


def _variables(template: str) -> set[str]:
    return meta.find_undeclared_variables(_environment().parse(template))


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
