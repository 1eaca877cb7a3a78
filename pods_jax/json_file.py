"""Reads the JSON files of a model folder, so that all of them refuse a damaged one in the same words."""

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object that a file holds.

    Raises:
        ValueError: The file is not JSON, holds something else than an object, or gives a key two different values; the message
            is one line that begins with the file's name.
        OSError: The file cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a JSON {type(found).__name__}, expected an object")
    return found


def shown(value: Any, limit: int = 80) -> str:
    """Returns a value as an error message shows it: one line of at most ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    for key, value in pairs:
        if repr(found[key]) != repr(value):  # NaN, too, is the same as itself then
            raise ValueError(f"{key} stands there twice, as {shown(value)} and as {shown(found[key])}")
    return found
