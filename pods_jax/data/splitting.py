"""Which questions are held out, where a data set has no split of its own."""

import hashlib
import re

_NUMBER = r"-?\d+(?:\.\d+)?"
_PRODUCT = rf"{_NUMBER}(?:\s*[*×/]\s*{_NUMBER})*"  # noqa: RUF001 (the multiplication sign)
_EXPRESSION = re.compile(rf"{_NUMBER}(?:\s*[-+*×/]\s*{_NUMBER})+")  # noqa: RUF001
_TERM = re.compile(rf"[-+]?\s*{_PRODUCT}")
_FACTOR = re.compile(r"(/?)[\s-]*(\d+(?:\.\d+)?)")

HELD_OUT_SHARE = 1 / 8
"""Share of all questions that is held out."""


def is_held_out(question: str) -> bool:
    """Returns whether a question is held out, by a stable hash of its text.

    Nothing else plays a part, so no seed, no size and no order of rows can bring a held-out question into training.
    """
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def without_order(question: str) -> str:
    """Returns a form, for comparison alone, that questions share when they differ in the order of summands and factors alone.

    The terms of every expression of numbers, ``+``, ``-``, ``*`` and ``/`` are sorted, and so are the factors of each term:
    "What is 7 + 3?" and "What is 3 + 7?" become one, "7 - 3" and "3 - 7" do not. Brackets are not read, so that now and then
    two questions become one that differ by more; that only makes the separation of splits stricter.
    """
    return _EXPRESSION.sub(lambda found: "".join(sorted(map(_term, _TERM.findall(found[0])))), question)


def _term(term: str) -> str:
    sign = "-" if term.count("-") % 2 else "+"
    # A divisor stays one: "6 / 2 * 3" has the factors 6, /2 and 3.
    return sign + "*".join(sorted(divides + number for divides, number in _FACTOR.findall(term)))
