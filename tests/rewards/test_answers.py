from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_jax.rewards.answers import LONGEST_NUMBER, extract_answer, is_correct, same_answer
from pods_jax.types import Problem


def problem(answer):
    return Problem("p/0", (), answer, "made_up")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>1</think><answer>18</answer>", "18"),
        ("<answer>\n 18 </answer> done", "18"),
        ("<answer>17</answer><answer>18</answer>", "18"),
        ("<answer>17<answer>18</answer>", "18"),
        ("<answer>18</answer><answer>19", "18"),
        ("<answer>18</answer></answer>", "18</answer>"),
        ("<answer></answer>", ""),
        ("<answer>18", None),
        ("18</answer>", None),
        ("</answer>18<answer>", None),
        ("<ANSWER>18</ANSWER>", None),
        ("the answer is 18", None),
        ("", None),
    ],
)
def test_the_last_complete_block_is_the_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("18", "18"),
        (" 18\n", "18"),
        ("18.0", "18"),
        ("+18", "18"),
        ("-0", "0"),
        ("1,234", "1234"),
        ("1,234,567.50", "1234567.5"),
        ("018", "018"),
        ("0.5", "0.50"),
        ("Evelyn", "Evelyn"),
        ("0.1000000000000000000000000000000000000001", "0.10000000000000000000000000000000000000010"),
    ],
)
def test_equal_answers(answer, gold):
    assert same_answer(answer, gold)
    assert same_answer(gold, answer)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("-5", "5"),
        ("7 (not 18)", "18"),
        ("18 apples", "18"),
        ("17 or 18", "18"),
        ("18.", "18"),
        ("1 8", "18"),
        ("12,34", "1234"),
        ("1,2345", "12345"),
        (",123", "123"),
        ("018", "18"),
        ("18", "018"),
        ("0,018", "18"),
        ("٣", "3"),
        ("³", "3"),
        ("1e1", "10"),
        ("nan", "NaN"),
        ("9**9", str(9**9)),
        ("evelyn", "Evelyn"),
        ("0.1", "0.1000000000000000000000000000000000000001"),
    ],
)
def test_different_answers(answer, gold):
    assert not same_answer(answer, gold)
    assert not same_answer(gold, answer)


def test_an_empty_answer_is_wrong_even_against_an_empty_gold():
    assert not same_answer(" ", "")


@given(
    value=st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12),
    other=st.integers(),
)
def test_numbers_are_equal_exactly_when_their_values_are(value, other):
    assert same_answer(f"{value:,f}", f"{value:f}")
    assert same_answer(str(other), f"{value:f}") == (Decimal(other) == value)


def test_numbers_too_long_to_parse_are_compared_as_text():
    longest = "1" * LONGEST_NUMBER
    assert same_answer("+" + longest[1:], longest[1:])
    assert not same_answer("+" + longest, longest)
    assert same_answer(longest * 9, longest * 9)


HOSTILE = [
    "9" * 1_000_000,
    "<answer>" + "9" * 1_000_000 + "</answer>",
    "<answer>9" + "0" * 1_000_000 + ".0</answer>",
    "<answer>" + "1," * 500_000 + "</answer>",
    "<answer>9**9**9**9</answer>",
    "<answer>__import__('os').getcwd()</answer>",
    "<think>" * 100_000,
    "<answer>" * 100_000,
    "<answer>" * 100_000 + "</answer>" * 100_000,
    "</answer>" * 100_000 + "<answer>" * 100_000,
    "<answer" * 100_000,
    "<answer>18\x00</answer>",
    "<answer>\x0018</answer>",
    "<answer>\ud80018</answer>",
    "\udfff<answer>\udfff</answer>",
    "<answer>18</answer" + "\x00" * 100_000,
    "<answer>" + " " * 1_000_000 + "17</answer>",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_completions_are_wrong(text):
    assert not is_correct(problem("18"), text)


def test_right_and_wrong_completions():
    assert is_correct(problem("556"), "<think>+4=4</think><answer>556</answer>")
    assert not is_correct(problem("556"), "<think>556</think><answer>555</answer>")
    assert not is_correct(problem("056"), "<think></think><answer>56</answer>")


@given(text=st.text(st.characters(codec=None)))
def test_any_text_is_judged_without_an_error(text):
    assert is_correct(problem("18"), f"<answer>{text}</answer>") in (False, True)
