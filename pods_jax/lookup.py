"""How the entries of every table are found: by name, or as ``module:function`` where code of the user's own makes sense.

A configuration holds names alone; the table of each name checks it here, before anything is allocated, so that all of them
refuse an unknown one in the same words.
"""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def lookup(
    table: Mapping[str, T],
    name: str,
    key: str,
    *,
    own: tuple[type, ...] | None = None,
    takes: Sequence[str] = (),
    others: Iterable[str] = (),
) -> T:
    """Returns the entry of a table, or imports an own one.

    Args:
        table: Entries by name.
        name: Name of the wanted one.
        key: Configuration key that holds the name, for the error message.
        own: Accept ``module:function``, importable from the working directory, and there records of these types too.
        takes: What an own function is called with: names of its arguments, with a ``=`` at the end of keywords.
        others: What else is accepted there, for the error message alone.

    Raises:
        ValueError: There is no such entry, and the message gives the nearest and all valid names; or the module or what
            should stand in it cannot be had.
    """
    if name in table:
        return table[name]
    if own is not None and ":" in name.strip(":"):
        found = import_own(name, key, own)
        if not isinstance(found, own):
            _check_takes(found, name, key, takes)
        return found
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    valid = ", ".join([*table, *others, *(["module:function"] if own is not None else [])])
    raise ValueError(f"{key}={name!r} is unknown; {hint}valid: {valid}")


def import_own(name: str, key: str, kinds: tuple[type, ...] = ()) -> Any:
    """Imports what ``module:function`` names, from the working directory too: a function, or a record of one of ``kinds``.

    Raises:
        ValueError: The module cannot be imported, or has nothing callable of that name.
    """
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise ValueError(f"{key}={name!r} names no function: expected module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{key}: module {module_name!r} cannot be imported ({reason})") from error
    function = vars(module).get(function_name)
    if not callable(function) and not isinstance(function, kinds):
        fault = "has no function" if function is None else "has something that is no function named"
        raise ValueError(f"{key}: module {module_name!r} {fault} {function_name!r}")
    return function


def _check_takes(function: Callable[..., Any], name: str, key: str, takes: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions do not tell theirs
        return
    keywords = {argument[:-1]: None for argument in takes if argument.endswith("=")}
    try:
        signature.bind(*takes[: len(takes) - len(keywords)], **keywords)
    except TypeError as error:
        raise ValueError(f"{key}: {name} takes {signature}; expected ({', '.join(takes)})") from error


def bind(function: Callable[..., T], options: Sequence[str], key: str, passed: Sequence[str] = ()) -> Callable[..., T]:
    """Gives the keyword-only numbers of an entry other values than their defaults.

    Args:
        function: The entry; what may be set are its keyword-only parameters that have a number as their default.
        options: Each ``name=number``.
        key: Configuration key that holds the options, for the error message.
        passed: Parameters that the caller gives a value, which cannot be set.

    Raises:
        ValueError: An option has not that form, or the entry has no such number.
    """
    if not options:
        return function
    numbers = {name: value for name, value in settable(function).items() if name not in passed}
    given: dict[str, float] = {}
    for option in options:
        name, _, text = option.partition("=")
        if name not in numbers:
            known = ", ".join(numbers) or "none"
            raise ValueError(f"{key}={option!r}: the chosen entry has no number {name!r}; it has: {known}")
        try:
            given[name] = type(numbers[name])(text)
        except ValueError:
            raise ValueError(f"{key}={option!r} must be {name}=number") from None
    return partial(function, **given)


def settable(function: Callable[..., Any]) -> dict[str, int | float]:
    """The keyword-only numbers of an entry that ``bind`` sets, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and type(p.default) in (int, float)}
