"""Kinds of configuration fields: what a value must be, how it is read from text, how it is described.

A configuration class derives from ``Checked`` and writes its limits as annotations (``n: Count = 32``). The same annotation is
checked on construction, reads the command line's text and is printed by ``--help``, so the three cannot disagree.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key, the value and the limit."""


@dataclass(frozen=True)
class Limit:
    """Range of a number; ``also`` is one value allowed besides."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    also: int | None = None

    def allows(self, value: float) -> bool:
        """Whether the value lies in the range."""
        return value == self.also or (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most), ("below", self.below))
        text = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
        return text if self.also is None else f"{text}, or {self.also}"


Count = Annotated[int, Limit(at_least=1)]
CountOrZero = Annotated[int, Limit(at_least=0)]
CountOrAll = Annotated[int, Limit(at_least=0, also=-1)]
CountOrRest = Annotated[int, Limit(at_least=1, also=-1)]
Seed = Annotated[int, Limit(at_least=0, below=2**32)]
Positive = Annotated[float, Limit(above=0)]
NonNegative = Annotated[float, Limit(at_least=0)]
Fraction = Annotated[float, Limit(at_least=0, at_most=1)]
PositiveFraction = Annotated[float, Limit(above=0, at_most=1)]
FractionBelowOne = Annotated[float, Limit(at_least=0, below=1)]

_NAMES = {int: "integer", float: "number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Kind:
    """What one field holds.

    Attributes:
        type: Python type of a value; ``list`` for a list.
        limit: Range of a number.
        choices: The only values, when there are few.
        item: Kind of a list's items.
        optional: ``None`` is a value too.
    """

    type: type
    limit: Limit | None = None
    choices: tuple[str, ...] = ()
    item: Self | None = None
    optional: bool = False

    def __str__(self) -> str:
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        elif self.item:
            text = f"list of {self.item}"
        else:
            text = _NAMES.get(self.type, self.type.__name__)
        text += f" {self.limit}" if self.limit else ""
        return f"{text}, or null" if self.optional else text

    def accept(self, value: Any) -> Any:
        """Return the value to store: as given, an integer made a float where a float is wanted, or a copy of a list.

        Raises:
            ValueError: The value is of another type or out of range (without a message: the caller knows the key).
        """
        if value is None and self.optional:
            return None
        if self.item and isinstance(value, list | tuple):
            return [self.item.accept(item) for item in value]
        if self.type is float and type(value) is int:
            return self.accept(float(value))
        # bool is a subclass of int, but true is not a number of rollouts.
        if not isinstance(value, self.type) or (isinstance(value, bool) and self.type is not bool):
            raise ValueError
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError
        if self.choices and value not in self.choices:
            raise ValueError
        if self.limit and isinstance(value, int | float) and not self.limit.allows(value):
            raise ValueError
        return value

    def read(self, text: str) -> Any:
        """Read the command line's text; text that cannot be read is returned as it is, for ``accept`` to refuse."""
        if self.optional and text.lower() in ("null", "none"):
            return None
        if self.item:
            return [self.item.read(item.strip()) for item in text.strip("[]").split(",") if item.strip()]
        if self.type is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        try:
            return self.type(text)
        except ValueError:
            return text


def kind_of(annotation: Any) -> Kind:
    """Kind of a plain type, of ``Annotated`` with a ``Limit``, of ``Literal``, ``list[...]``, or any of these ``| None``."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return Kind(args[0], limit=args[1])
    if origin is Literal:
        return Kind(str, choices=args)
    if origin is list:
        return Kind(list, item=kind_of(args[0]))
    if origin in (Union, UnionType):
        [inner] = (kind_of(arg) for arg in args if arg is not NoneType)
        return Kind(inner.type, inner.limit, inner.choices, inner.item, optional=True)
    return Kind(annotation)


@cache
def kinds(cls: type) -> dict[str, Kind]:
    """Kind of each field of a configuration class, in order."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: kind_of(hint) for name, hint in hints.items() if get_origin(hint) is not ClassVar}


@dataclass(frozen=True)
class Checked:
    """Base of the configuration classes: every field is checked against its annotation on construction.

    ``class RolloutConfig(Checked, key="rollout")`` names the section in error messages: ``rollout.n=0 must be ...``.

    Attributes:
        prefix: Name of the section, with its dot.
        unread: Keys of the class's sections, or names of whole sections, that what the class configures does not read, each
            with the reason; the command line refuses them.
    """

    prefix: ClassVar[str]
    unread: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, key: str = ""):
        cls.prefix = f"{key}." if key else ""

    def __post_init__(self):
        for name, kind in kinds(type(self)).items():
            value = getattr(self, name)
            try:
                accepted = kind.accept(value)
            except ValueError:
                given = repr(value) if isinstance(value, str) else shown(value)
                raise ConfigError(f"{self.prefix}{name}={given} must be: {kind}") from None
            object.__setattr__(self, name, accepted)


def why_unread(cls: type[Checked], key: str) -> str | None:
    """Returns the reason why a dotted key is not read by what the class configures, or None when it is."""
    return next((why for name, why in cls.unread.items() if key == name or key.startswith(f"{name}.")), None)


def shown(value: Any) -> str:
    """The value as the command line takes it, for error messages and ``--help``."""
    if isinstance(value, list | tuple):
        return ",".join(map(shown, value))
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
