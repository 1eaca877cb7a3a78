r"""Plain numbers: signs, thousands separators, currency, percent, units, fractions, powers of ten, repeating decimals; exactly.

A text is read as a number only when it says one: ``7 (not 18)`` says 7, ``-5`` is not 5, and ``180 * 3`` says none, because
the multiplication is not carried out. What has a variable, a root or a power is an expression (``expressions.py``).
"""

# ruff: noqa: RUF001 - signs that models write are meant as they stand

import re
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from itertools import islice

from pods_jax.rewards.spelling import tidy
from pods_jax.rewards.units import Unit, read_unit

LONGEST_NUMBER = 64
"""Characters up to which digits are read as a number."""
LONGEST_TEXT = 2_000
"""Characters up to which a text is searched for the number that it says."""

_PLAIN = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+)?")
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)(?![0-9])(?:\.[0-9]+)?|\.[0-9]+)"
# At most three digits, so that a value can be written out.
_TO_THE = r" ?\^ ?(?:\{ ?[+-]?[0-9]{1,3} ?\}|[+-]?[0-9]{1,3}(?![0-9]))"
_POWER = rf"(?:[eE][+-]?[0-9]{{1,3}}(?![0-9A-Za-z])| ?(?:\\times|\\cdot|[x*]) ?10{_TO_THE})"
_REPEATED = r"(?:\\(?:overline|bar|dot) ?(?:\{[0-9]+\}|[0-9])|\([0-9]+\))"
_LATEX_RATIO = rf"\\frac\{{-?{_DIGITS}\}}\{{{_DIGITS}\}}"
_RATIO = rf"{_DIGITS} ?/ ?{_DIGITS}"
NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)}}%])[-+] ?)?(?:(?P<currency>[$€£]) ?)?(?P<late_sign>(?<=[$€£])[-+])?"
    rf"(?:(?P<whole>[0-9]+)(?:(?: | and )(?P<part>{_RATIO})| ?(?P<latex_part>{_LATEX_RATIO}))"
    rf"|(?P<ratio>{_LATEX_RATIO}|{_RATIO})|(?P<ten>(?<![0-9.,])10{_TO_THE})|(?P<decimal>[0-9]*\.[0-9]*){_REPEATED}"
    rf"|(?P<plain>{_DIGITS})(?P<power>{_POWER})?)"
    r"(?P<percent> ?%| percent\b)?"
)
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"\s*({'|'.join(_SCALES)})\b")

# A number that directly follows the last of these is what a text with several numbers says.
_SAYS = re.compile(
    r"(?<![!<>\\])=|\\approx|:(?=\s)|\b(?:is|are|was|were|be|equals|has|have|makes|gives|earns|totals)\b", re.ASCII
)
_LEADING = re.compile(r"\s*(?:(?:only|exactly|about|approximately|roughly|equal to|indeed|also|now|just|thus|a|the)\s+)*\Z")
_OTHERWISE = re.compile(
    r"\b(?:not|never|cannot|wrong|incorrect|false|or|and a half|dozen|half|plus|minus|squared|cubed|between|"
    r"(?:less|more|fewer|greater|smaller|larger|higher|lower) than|at (?:least|most)|up to|under|over)\b|n't\b",
    re.IGNORECASE,
)
_REMARK = re.compile(r"(?<!\\)\((?=[^()]*[A-Za-z]{2})[^()]*\)")
_UNIT_POWER = re.compile(r"(?<![\\A-Za-z])([A-Za-z]{2,}|m|(?<=/)[sh]) ?\^ ?([23]|\{[23]\})")
_PROSE = re.compile(r"[A-Za-z²³\s.,;:'\"“”’()/&#?-]*")
_LONE_LETTER = re.compile(r"(?<![A-Za-z'’])[b-hj-z](?![A-Za-z'’])")
_UNIT_LETTERS = frozenset("mghsl")
_ELLIPSIS = re.compile(r"(?<=\.)([0-9]{0,40}?)(?:([0-9])\2\2\2*|([0-9]{2,9})\3\3*)(?:\.\.\.|…|\\[lc]?dots(?![a-z]))(?!\w)")
_ATTACHED_UNITS = re.compile(
    r"(?:m|g|h|s|L|[cmk]m|[mk]g|m[lL]|ft|in|mi|yd|hrs?|mins?|sec|deg|lbs?|oz|mph|km?ph|kmh|USD|cents)?(?![A-Za-z])"
)
_ASSIGNED = re.compile(r"(?<![A-Za-z\\])([A-Za-z])\s*=")


def decimal_of(text: str) -> Decimal | None:
    """Returns the value of digits with an optional sign, thousands separators and decimals; ``None`` for any other text."""
    return Decimal(text.replace(",", "")) if _PLAIN.fullmatch(text) else None


@dataclass(frozen=True)
class Quantity:
    """An exact value, whether a percent sign follows it, and its unit where that is known.

    The unit has no part in equality; ``same_quantity`` looks at it.
    """

    value: Fraction
    percent: bool = False
    unit: Unit | None = field(default=None, compare=False)


def same_quantity(answer: Quantity, gold: Quantity) -> bool:
    """Returns whether two quantities are equal; against one without a percent sign, 40% is both 40 and 0.4.

    Where the units of both are known, they must measure the same, and 3 kg are 3000 g; a unit may be left out.
    """
    if answer.unit and gold.unit:
        same_kind = answer.unit.dimensions == gold.unit.dimensions
        return same_kind and answer.value * answer.unit.size == gold.value * gold.unit.size
    if answer.percent == gold.percent:
        return answer.value == gold.value
    percent, plain = (answer, gold) if answer.percent else (gold, answer)
    return plain.value in (percent.value, percent.value / 100)


def read_quantity(text: str) -> Quantity | None:
    r"""Returns the one number that a text says; ``None`` when it says none, or more than one.

    A text says its only number, among words that neither deny nor compare it (``$70,000``, ``27 miles from City A``,
    ``45^\circ``, ``5.4 \text{ cents}``). Of several numbers it says the one right behind the last "=", "is", "has" and the
    like, when only words follow (``9 * 60 = 540 meters``). Remarks in parentheses are left out.
    """
    if len(text) > LONGEST_TEXT:
        return None
    tidied = tidy(_ELLIPSIS.sub(lambda found: rf"{found[1]}\overline{{{found[2] or found[3]}}}", text))
    remarked = _REMARK.sub(" ", tidied)
    tidied = _UNIT_POWER.sub(
        lambda found: found[1] + ("²" if "2" in found[2] else "³"), remarked if NUMBER.search(remarked) else tidied
    )
    alone = _only_number(tidied)
    if alone is not None:
        return alone
    said = list(_SAYS.finditer(tidied))
    if not said or re.search(r"\bor\b", tidied) or len(set(_ASSIGNED.findall(tidied))) > 1:
        return None
    return _only_number(tidied[said[-1].end() :], first=True)


def _only_number(text: str, *, first: bool = False) -> Quantity | None:
    found = list(islice(NUMBER.finditer(text), 2))
    if len(found) != 1:
        return None
    before, after = text[: found[0].start()], text[found[0].end() :]
    if first and not _LEADING.match(before):
        return None
    if not _ATTACHED_UNITS.match(after):
        return None
    scale, unit = _SCALE.match(after), read_unit(after)
    before, after = before.replace(r"^\circ", " "), after.replace(r"^\circ", " ")
    words = f"{before} {after}"
    if not _PROSE.fullmatch(words) or _OTHERWISE.search(words) or after.startswith(("/", "!")):
        return None
    if any(letter not in _UNIT_LETTERS for letter in _LONE_LETTER.findall(words)):
        return None
    quantity = _quantity(found[0])
    return quantity and Quantity(quantity.value * (_SCALES[scale[1]] if scale else 1), quantity.percent, unit)


def _quantity(found: re.Match[str]) -> Quantity | None:
    if len(found.group()) > LONGEST_NUMBER:
        return None
    ratio = found["ratio"] or found["part"] or found["latex_part"]
    if found["ten"]:
        value = Fraction(10) ** _exponent(found["ten"])
    elif found["decimal"]:
        value = _repeating(found["decimal"], found.group())
    else:
        value = _ratio(ratio) if ratio else _fraction(found["plain"])
    if found["power"] and value is not None:
        value *= Fraction(10) ** _exponent(found["power"])
    if value is None:
        return None
    value += int(found["whole"] or 0)
    negative = "-" in (found["sign"] or "") + (found["late_sign"] or "")
    return Quantity(-value if negative else value, percent=bool(found["percent"]))


def _ratio(text: str) -> Fraction | None:
    over, under = re.findall(rf"-?{_DIGITS}", text)
    if _fraction(under) == 0:
        return None
    return _fraction(over) / _fraction(under)


def _fraction(digits: str) -> Fraction:
    return Fraction(re.sub(r"[, ]", "", digits))


def _exponent(power: str) -> int:
    return int(re.findall(r"[+-]?[0-9]+", power)[-1])


def _repeating(decimal: str, written: str) -> Fraction | None:
    whole, _, fixed = decimal.partition(".")
    repeated = re.findall(r"[0-9]+", written)[-1]
    tail = Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return Fraction(f"{whole or '0'}.{fixed or '0'}") + tail
