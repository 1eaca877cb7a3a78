# ruff: noqa: RUF001 - signs that models write are meant as they stand

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_jax.rewards.quantities import LONGEST_NUMBER, LONGEST_TEXT, Quantity, read_quantity, same_quantity

SAID = {
    "18": 18,
    "018": 18,
    "$18": 18,
    "18 dollars": 18,
    "$70,000": 70000,
    "70 000": 70000,
    "70{,}000": 70000,
    r"10,\!080": 10080,
    r"\$32,\!348": 32348,
    r"11,\! 111,\! 111,\! 100": 11111111100,
    "-5": -5,
    "−5": -5,
    "-$5": -5,
    "$-5": -5,
    "+3": 3,
    "27.0": 27,
    ".35625": Fraction("0.35625"),
    "13/4": Fraction(13, 4),
    "1 3/4": Fraction(7, 4),
    r"\frac{14}{3}": Fraction(14, 3),
    r"\dfrac{14}{3}": Fraction(14, 3),
    r"\frac43": Fraction(4, 3),
    r"\frac 59": Fraction(5, 9),
    r"\frac9{19}": Fraction(9, 19),
    r"-\frac{35}{9}": Fraction(-35, 9),
    r"1\frac{4}{5}": Fraction(9, 5),
    r"137 \frac{1}{2}": Fraction(275, 2),
    r"13 \(\frac{1}{3}\) cups": Fraction(40, 3),
    r"\frac{270}7\text{ degrees}": Fraction(270, 7),
    "½": Fraction(1, 2),
    "540 meters": 540,
    "540m": 540,
    r"864 \mbox{ inches}^2": 864,
    r"15\mbox{ cm}^2": 15,
    "33 cups/day": 33,
    "45°": 45,
    r"\(45^\circ\)": 45,
    r"90^{\circ}": 90,
    r"5.4 \text{ cents}": Fraction("5.4"),
    "1.5 million": 1_500_000,
    "**18**": 18,
    "The answer is **18**.": 18,
    "Answer: 18": 18,
    "x=5": 5,
    r"\boxed{18}": 18,
    "7 (not 18)": 7,
    "Josh made a profit of $70,000.": 70000,
    "27 miles from City A.": 27,
    "3 total bolts.": 3,
    "The number 196 has 9 positive whole-number divisors.": 9,
    "9 * 60 = 540": 540,
    "60 (the total) - 40 (the morning) = 20.": 20,
    r"$9 \times 2 = 18$ dollars": 18,
    "540 x 3 = 1620 meters. The answer is 1620.": 1620,
    "1e3": 1000,
    "2.5 × 10^7": 25_000_000,
    "2.5 x 10^7": 25_000_000,
    "2.5·10⁷": 25_000_000,
    r"2.5 \times 10^{7} \text{ kg}": 25_000_000,
    r"x = 2.5\cdot10^{-7}": Fraction("2.5e-7"),
    "-4.1 × 10⁻³": Fraction("-0.0041"),
    "3.2e-5 m": Fraction("3.2e-5"),
    "1.5E+6 dollars": 1_500_000,
    "10^7": 10_000_000,
    "10^{-3} mol": Fraction(1, 1000),
    r"0.1\overline{6}": Fraction(1, 6),
    r"0.\overline{142857}": Fraction(1, 7),
    r"-2.\bar{3} cm": Fraction(-7, 3),
    r"0.\dot 3": Fraction(1, 3),
    "0.1(6)": Fraction(1, 6),
    "0.333...": Fraction(1, 3),
    "0.1666…": Fraction(1, 6),
    "0.142857142857...": Fraction(1, 7),
    "3.14...": Fraction("3.14"),
    "１，０００．５": Fraction("1000.5"),
    "－５": -5,
    "２／３": Fraction(2, 3),
    "1⅔": Fraction(5, 3),
    "1⁄2": Fraction(1, 2),
    "9.8 m/s^2": Fraction("9.8"),
}

NOT_SAID = [
    "",
    "eighteen",
    "180 * 3",
    "9 × 60",
    "18 - 7",
    "= 16 - 3",
    "17 or 18",
    "x = 5 or x = 6",
    "x = 5, y = 6",
    "1,-2",
    "3, 5, 7",
    "3:4",
    "not 18",
    "It isn't 18",
    "18 is wrong",
    "less than 18",
    "at least 18",
    "18x",
    "2k",
    "12√3",
    "18π",
    r"2\sqrt{5}",
    "5!",
    "2^10",
    "52_8",
    "1e9999",
    "10^{99999}",
    "10^2^3",
    "5 × 10^2 + 1",
    "f(3)",
    "9^{9^{9^{9}}}",
    "18/0",
    "18 dollars and 50 cents",
    "18 and a half",
    "٣",
    "15 + 25 = 40 cups\nNow, we need to find out how much is left, and distribute it among 20 chickens.",
]


@pytest.mark.parametrize("text", SAID)
def test_a_number_is_read_exactly(text):
    assert read_quantity(text) == Quantity(Fraction(SAID[text]))


@pytest.mark.parametrize("text", NOT_SAID)
def test_what_says_no_number_or_several_is_none(text):
    assert read_quantity(text) is None


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("40%", "40", True),
        (r"40\%", "0.4", True),
        ("0.4", "40%", True),
        ("40%", "40%", True),
        ("0.4%", "40%", False),
        ("4%", "40", False),
    ],
)
def test_a_percent_sign_may_be_left_out(answer, gold, same):
    left, right = read_quantity(answer), read_quantity(gold)
    assert left is not None
    assert right is not None
    assert same_quantity(left, right) is same


UNITS = [
    ("3 kg", "3 g", False),
    ("3 m", "3 g", False),
    ("3 cents", "3 dollars", False),
    ("3 MW", "3 mW", False),
    (r"3\,\mathrm{kg}", r"3\,\mathrm{g}", False),
    ("3 kg of rice", "3 g", False),
    ("50 cm^2", "50 m^2", False),
    ("50 cm", "50 cm^2", False),
    ("7 kJ/mol", "7 J/mol", False),
    ("20 °C", "20 °F", False),
    ("3", "3 g", True),
    ("3 g", "3", True),
    ("3 grams", "3 g", True),
    ("3000 mg", "3 g", True),
    (r"0.5\text{ kg}", r"500\text{ g}", True),
    (r"2.5 \times 10^3 g", "2.5 kg", True),
    ("2 million km", "2000000 km", True),
    ("3 km", "3000 meters", True),
    ("5000 square centimeters", r"0.5\mbox{ m}^2", True),
    ("1 L", "1000 cm³", True),
    ("36 km/h", "10 m/s", True),
    ("60 miles per hour", "60 mph", True),
    ("9.8 m/s^2", "9.8 m/s²", True),
    ("90 minutes", "1.5 hours", True),
    ("12 inches", "1 ft", True),
    (r"45^\circ", "45 degrees", True),
    ("27 miles from City A", "27 mi", True),
    ("5 in total", "5 cm", True),  # no unit is stated
    ("5 apples", "5 kg", True),  # one that is not known
]


@pytest.mark.parametrize(("answer", "gold", "same"), UNITS)
def test_units_that_both_state_are_compared(answer, gold, same):
    left, right = read_quantity(answer), read_quantity(gold)
    assert left is not None
    assert right is not None
    assert same_quantity(left, right) is same_quantity(right, left) is same


@given(value=st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12))
def test_every_spelling_of_a_decimal_has_its_value(value):
    for text in (
        f"{value:f}",
        f"{value:,f}",
        f"${value:,f}",
        f"${value:f}$",
        f"{value:f} meters",
        rf"\({value:f}\)",
        f"x = {value:f}",
    ):
        assert read_quantity(text) == Quantity(Fraction(value))


@given(over=st.integers(-999, 999), under=st.integers(1, 999))
def test_every_spelling_of_a_fraction_has_its_value(over, under):
    sign = "-" if over < 0 else ""
    for text in (f"{over}/{under}", rf"\frac{{{over}}}{{{under}}}", rf"{sign}\tfrac{{{abs(over)}}}{{{under}}}"):
        assert read_quantity(text) == Quantity(Fraction(over, under))


def test_digits_and_texts_beyond_the_limits_are_no_number():
    assert read_quantity("1" * LONGEST_NUMBER) == Quantity(Fraction("1" * LONGEST_NUMBER))
    assert read_quantity("1" * (LONGEST_NUMBER + 1)) is None
    assert read_quantity("18" + " " * LONGEST_TEXT) is None


@given(text=st.text(st.characters(codec=None)) | st.text("0123456789.,/%$- =isx\\frac{}^()"))
def test_any_text_is_read_without_an_error(text):
    quantity = read_quantity(text)
    assert quantity is None or isinstance(quantity.value, Fraction)
