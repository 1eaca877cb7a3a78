"""Gold answers as data sets write them, brought into the form that verifiers compare with."""

import re
from decimal import Decimal

from pods_jax.rewards.extraction import BOX, boxed
from pods_jax.rewards.quantities import decimal_of

_FORMULA = re.compile(r"[0-9]*\s*[A-Z(\[][A-Za-z0-9()\[\]{}.·*^+-]*")
_UNBRACED_END = re.compile(r"\$|\\\)|\\\]|\n|[.,;:]?(?:\s|$)")


class UnparsableError(ValueError):
    """A row without a readable question or gold answer; the message says what is wrong with it."""


def number(value: object) -> str:
    """Returns a number, or the text of one, in plain digits: ``1,080`` becomes ``1080``, and ``$27.0`` becomes ``27``.

    Raises:
        UnparsableError: The value is no number as a whole, is not finite, or has misplaced thousands separators.
    """
    text = format(Decimal(str(value)), "f") if type(value) in (int, float) else value
    plain = text.strip().removeprefix("$").strip() if isinstance(text, str) else ""
    said = decimal_of(plain)
    if said is None:
        raise UnparsableError(f"{str(value)[:60]!r} is not a number")
    whole = said.to_integral_value()
    return str(whole) if said == whole else format(said.normalize(), "f")


def last_boxed(solution: str) -> str:
    r"""Returns what stands in the last ``\boxed{...}`` or ``\fbox{...}`` of a solution, or behind a last ``\boxed 5``.

    Raises:
        UnparsableError: There is no box, or the last one is empty or never closed.
    """
    found = list(re.finditer(BOX, solution))
    if not found:
        raise UnparsableError(r"no \boxed{...} in the solution")
    start, end = found[-1].span()
    braced = solution.startswith("{", end)
    content = boxed(solution[start:]) if braced else _UNBRACED_END.split(solution[end:], maxsplit=1)[0].strip()
    if content is None:
        raise UnparsableError(r"the brace of the last \boxed{ is never closed")
    if not content:
        raise UnparsableError(r"the last \boxed holds nothing")
    return content


def equation(text: str) -> str:
    """Returns a chemical equation with single blanks.

    Raises:
        UnparsableError: There are not two sides joined by ``=``, or a term is no formula behind an optional whole coefficient.
    """
    plain = " ".join(text.split())
    sides = plain.split("=")
    if len(sides) != 2:
        raise UnparsableError(f"{plain[:60]!r} is not an equation of two sides")
    for term in (term.strip() for side in sides for term in side.split(" + ")):
        if not _FORMULA.fullmatch(term):
            raise UnparsableError(f"{term[:60]!r} in {plain[:60]!r} is no formula behind an optional whole coefficient")
    return plain
