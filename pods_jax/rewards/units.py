"""Units behind a number: which kind of quantity they measure, and how many of its base unit they are, exactly.

Units are compared only where both answers have one that is known, so that the tables need not be complete.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

_SYMBOL_PREFIXES = {
    "p": -12,
    "n": -9,
    "µ": -6,
    "μ": -6,
    "u": -6,
    "m": -3,
    "c": -2,
    "d": -1,
    "h": 2,
    "k": 3,
    "M": 6,
    "G": 9,
    "T": 12,
}
_WORD_PREFIXES = {
    "pico": -12, "nano": -9, "micro": -6, "milli": -3, "centi": -2, "deci": -1, "hecto": 2, "kilo": 3, "mega": 6, "giga": 9,
    "tera": 12,
}  # fmt: skip
# Symbol, words, dimension, its power, and how many of the dimension's base unit one is.
_DECIMAL = (
    ("m", "meter metre", "length", 1, 1), ("g", "gram gramme", "mass", 1, 1), ("s", "second sec", "time", 1, 1),
    ("L", "liter litre", "length", 3, Fraction(1, 1000)), ("l", "", "length", 3, Fraction(1, 1000)),
    ("W", "watt", "power", 1, 1), ("J", "joule", "energy", 1, 1), ("V", "volt", "voltage", 1, 1),
    ("A", "ampere amp", "current", 1, 1), ("N", "newton", "force", 1, 1), ("Pa", "pascal", "pressure", 1, 1),
    ("Hz", "hertz", "frequency", 1, 1), ("mol", "mole", "amount", 1, 1), ("K", "kelvin", "temperature", 1, 1),
    ("eV", "electronvolt", "electron energy", 1, 1), ("cal", "calorie", "heat", 1, 1),
)  # fmt: skip
_INCH = Fraction(254, 10_000)
_CUP = 231 * _INCH**3 / 16
_OTHER = (
    ("min mins minute minutes", "time", 1, 60), ("h hr hrs hour hours", "time", 1, 3_600), ("day days", "time", 1, 86_400),
    ("week weeks", "time", 1, 604_800), ("month months", "months", 1, 1), ("year years yr yrs", "months", 1, 12),
    ("in inch inches", "length", 1, _INCH), ("ft foot feet", "length", 1, 12 * _INCH),
    ("yd yard yards", "length", 1, 36 * _INCH),
    ("mi mile miles", "length", 1, 63_360 * _INCH), ("cup cups", "length", 3, _CUP), ("pint pints", "length", 3, 2 * _CUP),
    ("quart quarts", "length", 3, 4 * _CUP), ("gallon gallons gal", "length", 3, 16 * _CUP),
    ("tablespoon tablespoons tbsp", "length", 3, _CUP / 16), ("teaspoon teaspoons tsp", "length", 3, _CUP / 48),
    ("lb lbs pound pounds", "mass", 1, Fraction(45_359_237, 100_000)),
    ("oz ounce ounces", "mass", 1, Fraction(45_359_237, 1_600_000)),
    ("tonne tonnes", "mass", 1, 10**6), ("cent cents", "money", 1, Fraction(1, 100)), ("dollar dollars usd", "money", 1, 1),
    ("deg degree degrees", "degrees", 1, 1), ("rad radian radians", "radians", 1, 1),
)  # fmt: skip
_ABBREVIATED = {"mph": "miles per hour", "kmh": "km/h", "kph": "km/h", "kmph": "km/h"}

_TERM = re.compile(
    r" ?(?:(?P<word>square|sq\.?|cubic|cu\.?) )?(?P<name>\^\\circ ?[CF]?(?![A-Za-z])|[A-Za-zµμ]+)"
    r"(?:(?P<sign>[²³])| ?\^ ?\{?(?P<power>-?[1-9])\}?| (?P<later>squared|cubed)\b)?"
)
_JOINT = re.compile(r" ?(?:(?P<over>/|\bper\b)|\\cdot\b|\*) ?")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3, "²": 2, "³": 3}


@dataclass(frozen=True)
class Unit:
    """A unit: the powers of the dimensions that it measures, in order of their names, and its size in their base units."""

    dimensions: tuple[tuple[str, int], ...]
    size: Fraction


def read_unit(text: str) -> Unit | None:
    """Returns the unit that a text begins with, right behind a number; ``None`` for none, or one that is not known."""
    dimensions: dict[str, int] = {}
    size, place, sign = Fraction(1), 0, 1
    while True:
        found = _TERM.match(text, place)
        unit = _unit(found["name"]) if found else None
        if found is None or unit is None or (found["name"] == "in" and text[found.end() :].strip(" .,;:)")):
            return None
        power = sign * _power(found)
        for dimension, times in unit.dimensions:
            dimensions[dimension] = dimensions.get(dimension, 0) + power * times
        size, place = size * unit.size**power, found.end()
        joint = _JOINT.match(text, place)
        if joint is None:
            break
        sign, place = -1 if joint["over"] else 1, joint.end()
    following = _TERM.match(text, place)
    if following and following["name"] not in ("in", "a", "A") and _unit(following["name"]):
        return None  # "kg m" is one unit of two names, which is not read
    return Unit(tuple(sorted((name, power) for name, power in dimensions.items() if power)), size)


def _power(found: re.Match[str]) -> int:
    names = [(found["word"] or "").rstrip("."), found["sign"], found["later"]]
    power = next((_POWERS[name] for name in names if name), 1)
    return int(found["power"]) if found["power"] else power


def _unit(name: str) -> Unit | None:
    if name.startswith("^"):
        scale = name[-1] if name[-1] in "CF" else ""
        return Unit(((f"degrees {scale}".strip(), 1),), Fraction(1))
    if name in _UNITS:
        return _UNITS[name]
    lower = name.lower()
    if lower in _ABBREVIATED:
        return read_unit(_ABBREVIATED[lower])
    return _UNITS.get(lower) if len(name) > 1 else None


def _table() -> dict[str, Unit]:
    units: dict[str, Unit] = {}
    for names, dimension, power, size in _OTHER:
        units |= dict.fromkeys(names.split(), Unit(((dimension, power),), Fraction(size)))
    for symbol, words, dimension, power, size in _DECIMAL:
        for prefix, exponent in {"": 0, **_SYMBOL_PREFIXES}.items():
            units.setdefault(prefix + symbol, Unit(((dimension, power),), Fraction(size) * Fraction(10) ** exponent))
        for prefix, exponent in {"": 0, **_WORD_PREFIXES}.items():
            unit = Unit(((dimension, power),), Fraction(size) * Fraction(10) ** exponent)
            for word in words.split():
                units |= {prefix + word: unit, f"{prefix}{word}s": unit}
    return units


_UNITS = _table()
