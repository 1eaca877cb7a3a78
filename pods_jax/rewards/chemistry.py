r"""Balanced chemical equations: the same species on each side with the same coefficients.

White space, phases such as ``(aq)``, the kind of arrow, the order of the species of a side, and how subscripts and charges are
typeset do not matter. Case does (``Co`` is not ``CO``), and coefficients are compared as they stand: a multiple of the balanced
equation is another one than that with the smallest whole numbers, which is asked for.
"""

# ruff: noqa: RUF001 - signs that models write are meant as they stand

import re
from fractions import Fraction

LONGEST_EQUATION = 2_000
"""Characters up to which a text is read as an equation."""

Side = dict[str, Fraction]

_SIGNS = str.maketrans("₀₁₂₃₄₅₆₇₈₉⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻−·⋅•∙→⟶⇌⟷↔⇄➝", "0123456789" + "0123456789+--****" + "=" * 7)
_TYPESETTING = re.compile(
    r"\\(?:ce|mathrm|text|mathbf|boxed)\s*\{|\\(?:left|right|displaystyle|rm)(?![a-zA-Z])|(?<!\\)\\[()\[\],;! ]|\$|\*\*|`"
)
_ARROW = re.compile(
    r"\s*(?:\\(?:x?(?:long)?(?:left)?rightarrow|to|(?:long)?leftrightarrow|rightleftharpoons)(?![a-zA-Z])|<?[-=]+>|<=>|==?)\s*",
    re.IGNORECASE,
)
_DOT = re.compile(r"\\(?:cdot|bullet|times)(?![a-zA-Z])")
_PHASE = re.compile(r"\((?:s|l|g|aq|cr|conc|dil)\)", re.IGNORECASE)
# A plus separates species unless it is a charge: within braces, or right behind a species that ends there.
_PLUS = re.compile(r"\{[^{}]*\}|(?<=[A-Za-z0-9)\]}])\+(?=\s*(?:\+|\Z))|(\s*\+\s*)")
_WHOLE = r"[0-9]{1,9}"
_COEFFICIENT = re.compile(
    rf"\(?\s*(?P<number>{_WHOLE}(?:\.{_WHOLE})?)(?:\s*/\s*(?P<under>{_WHOLE}))?\s*\)?\s*(?=[A-Za-z(\[])"
    rf"|\\frac\{{(?P<over>{_WHOLE})\}}\{{(?P<below>{_WHOLE})\}}\s*"
)
_SPECIES = re.compile(r"[A-Za-z0-9()\[\].*+-]+")
_CHARGE = re.compile(r"([+-])([0-9]+)\Z")


def read_equation(text: str) -> tuple[Side, Side] | None:
    """Returns both sides of an equation, each as coefficients by species; ``None`` when the text is no equation.

    Of several lines, the only one with an arrow is read, without any words up to a colon.
    """
    if len(text) > LONGEST_EQUATION:
        return None
    text = _DOT.sub("*", _TYPESETTING.sub(" ", text.translate(_SIGNS))).replace("^", "").replace("_", "")
    lines = [line for line in text.splitlines() if _ARROW.search(line)]
    if len(lines) != 1:
        return None
    sides = _ARROW.split(_PHASE.sub("", lines[0].rpartition(":")[2]).strip(" .,;"))
    if len(sides) != 2:
        return None
    left, right = _side(sides[0]), _side(sides[1])
    return None if left is None or right is None else (left, right)


def same_equation(answer: str, gold: str) -> bool | None:
    """Returns whether two equations are the same; ``None`` when the gold answer is none."""
    wanted = read_equation(gold)
    return None if wanted is None else read_equation(answer) == wanted


def _side(text: str) -> Side | None:
    side: Side = {}
    for term in _terms(text):
        found = _COEFFICIENT.match(term)
        species = re.sub(r"[\s{}]", "", term[found.end() :] if found else term)
        over, under = (found["number"] or found["over"], found["under"] or found["below"] or "1") if found else ("1", "1")
        if not _SPECIES.fullmatch(species) or not re.search(r"[A-Za-z]", species) or int(under) == 0:
            return None
        species = _CHARGE.sub(r"\2\1", species)
        side[species] = side.get(species, Fraction(0)) + Fraction(over) / int(under)
    return side


def _terms(text: str) -> list[str]:
    cuts = [found.span(1) for found in _PLUS.finditer(text) if found[1] is not None]
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
