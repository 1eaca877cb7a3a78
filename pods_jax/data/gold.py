"""Gold answers as data sets write them, brought into the form that verifiers compare with; what cannot be read is refused."""

import re
from decimal import Decimal

_NUMBER = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+)?")
_FORMULA = re.compile(r"[0-9]*\s*[A-Z(\[][A-Za-z0-9()\[\]{}.·*^+-]*")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_UNBRACED_END = re.compile(r"\$|\\\)|\\\]|\n|[.,;:]?(?:\s|$)")


class UnparsableError(ValueError):
    """A row without a question or a gold answer that can be read; the message says what is wrong with it."""


def number(value: object) -> str:
    """Return a number, or the text of one, in plain digits: ``1,080`` becomes ``1080``, ``$27.0`` becomes ``27``.

    Raises:
        UnparsableError: It is no number as a whole, is not finite, or has misplaced thousands separators.
    """
    text = format(Decimal(str(value)), "f") if type(value) in (int, float) else value
    plain = text.strip().removeprefix("$").strip() if isinstance(text, str) else ""
    if not _NUMBER.fullmatch(plain):
        raise UnparsableError(f"{str(value)[:60]!r} is not a number")
    value = Decimal(plain.replace(",", ""))
    whole = value.to_integral_value()
    return str(whole) if value == whole else format(value.normalize(), "f")


def last_boxed(solution: str) -> str:
    r"""Return what stands in the last ``\boxed{...}`` or ``\fbox{...}``, braces matched; or after the last ``\boxed 5``.

    Raises:
        UnparsableError: No box, an empty one, or one whose brace is never closed.
    """
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        raise UnparsableError(r"no \boxed{...} in the solution")
    start = boxes[-1].end()
    content = _braced(solution, start) if solution[start : start + 1] == "{" else _unbraced(solution, start)
    if not content.strip():
        raise UnparsableError(r"the last \boxed holds nothing")
    return content.strip()


def equation(text: str) -> str:
    """Return a chemical equation with its white space made single.

    Raises:
        UnparsableError: It has not two sides joined by ``=``, or a term is no formula behind an optional whole coefficient.
    """
    plain = " ".join(text.split())
    sides = plain.split("=")
    if len(sides) != 2:
        raise UnparsableError(f"{plain[:60]!r} is not an equation of two sides")
    for term in (term.strip() for side in sides for term in side.split(" + ")):
        if not _FORMULA.fullmatch(term):
            raise UnparsableError(f"{term[:60]!r} in {plain[:60]!r} is no formula behind an optional whole coefficient")
    return plain


def _braced(text: str, opening: int) -> str:
    depth, index = 0, opening
    while index < len(text):
        if text[index] == "\\":  # an escaped brace is a character, not a bracket
            index += 1
        elif text[index] in "{}":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return text[opening + 1 : index]
        index += 1
    raise UnparsableError(r"the brace of the last \boxed{ is never closed")


def _unbraced(text: str, start: int) -> str:
    end = _UNBRACED_END.search(text, start)
    return text[start : end.start()] if end else text[start:]
