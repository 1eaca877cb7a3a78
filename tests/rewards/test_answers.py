import json
from decimal import Decimal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pods_jax.rewards.answers import (
    KINDS,
    LONGEST_NUMBER,
    check_kind,
    gold_fault,
    judge,
    same_answer,
    same_number,
    same_text,
    vote,
)
from pods_jax.rewards.extraction import DEFAULT_SOURCES, extract_answer
from pods_jax.rewards.turns import own_turn
from pods_jax.rewards.workers import Job
from pods_jax.types import Problem

GOLD = {"exact": "18", "number": "18", "math": "18", "choice": "B", "equation": "2H2 + O2 = 2H2O", "text": "Evelyn"}


def problem(answer, kind="exact", **fields):
    return Problem("p/0", (), answer, "made_up", kind, **fields)


def is_correct(asked, completion, sources=DEFAULT_SOURCES):
    verdict = judge(asked, completion, sources)
    assert isinstance(verdict, bool)
    return verdict


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>1</think><answer>18</answer>", "18"),
        ("<answer>\n 18 </answer> done", "18"),
        ("<answer>18</answer><answer>17</answer>", "18"),
        ("<answer>17<answer>18</answer>", "18"),
        ("<answer>18</answer><answer>19", "18"),
        ("<answer>18</answer></answer>", "18"),
        ("<answer></answer>", ""),
        ("<answer>18", None),
        ("18</answer>", None),
        ("</answer>18<answer>", None),
        ("<ANSWER>18</ANSWER>", None),
        ("the answer is 18", None),
        ("", None),
    ],
)
def test_the_first_complete_block_is_the_answer(text, answer):
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


def test_the_bundled_kind_is_the_default_and_exact():
    assert problem("018").answer_kind == "exact"
    assert not is_correct(problem("018"), "<answer>18</answer>")
    assert is_correct(problem("018", "number"), "<answer>18</answer>")


@pytest.mark.parametrize("kind", GOLD)
class TestEveryKind:
    def test_the_gold_answer_is_right_and_another_or_none_is_wrong(self, kind):
        asked = problem(GOLD[kind], kind)
        assert judge(asked, f"<answer>{GOLD[kind]}</answer>") is True
        for completion in ("<answer>C</answer>", "<answer></answer>", "", GOLD[kind], f"<answer>{GOLD[kind]}"):
            assert judge(asked, completion) is False

    def test_the_gold_answer_can_be_read(self, kind):
        assert gold_fault(problem(GOLD[kind], kind)) is None

    def test_any_text_is_judged_and_spelled_without_an_error(self, kind):
        @given(text=st.text(st.characters(codec=None)) | st.text("0123456789.,/%$- =\\frac{}()ABC+"))
        def check(text):
            assert isinstance(judge(problem(GOLD[kind], kind), f"<answer>{text}</answer>"), bool | Job)
            assume(own_turn(text) == text)
            assert isinstance(vote(problem(GOLD[kind], kind), f"<answer>{text}</answer>"), str)

        check()

    @pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
    def test_hostile_completions_are_wrong(self, kind, text):
        verdict = judge(problem(GOLD[kind], kind), text, ["answer", "boxed", "last_number"])
        assert verdict is False or (kind == "math" and isinstance(verdict, Job))


def test_a_gym_answer_is_left_to_the_worker():
    extra = json.dumps({"dataset": "chain_sum", "options": {}, "entry": {}})
    asked = problem("", "reasoning_gym", extra=extra)
    assert judge(asked, "<answer>18</answer>") == Job("pods_jax.rewards.gym:score_answer", ("18", extra))
    assert judge(asked, "18") is False
    assert gold_fault(asked) is None


def test_all_kinds_are_tested():
    assert set(KINDS) == {*GOLD, "reasoning_gym"}


def test_an_unknown_kind_is_refused_with_the_nearest_and_all_names():
    words = "answer_kind='numbr' .*did you mean 'number'. valid: exact, number, math, choice, equation, text"
    for refuse in (lambda asked: judge(asked, "<answer>18</answer>"), gold_fault, lambda asked: check_kind(asked.answer_kind)):
        with pytest.raises(ValueError, match=words):
            refuse(problem("18", "numbr"))


def test_rows_have_every_kind_whose_gold_answer_is_written():
    for kind in GOLD:
        check_kind(kind)
    with pytest.raises(ValueError, match=r"^data\.answer_kind='reasoning_gym' .*valid: exact, number, math, choice, .*text$"):
        check_kind("reasoning_gym")


@pytest.mark.parametrize("kind", ["number", "choice", "equation", "math", "text", "reasoning_gym"])
def test_a_gold_answer_that_cannot_be_read_is_reported_and_never_scored(kind):
    assert gold_fault(problem("...", kind)) == f"'...' cannot be read as an answer of kind {kind}"
    if kind != "reasoning_gym":
        for completion in ("<answer>18</answer>", "<answer></answer>", "no answer"):  # the whole group is left out
            assert judge(problem("...", kind), completion) is None


@pytest.mark.parametrize("kind", ["number", "math", "choice", "text"])
def test_the_prompt_may_have_opened_the_reasoning(kind):
    asked = problem(GOLD[kind], kind, opened="<think>\n")
    assert judge(asked, f"twice nine</think><answer>{GOLD[kind]}</answer>") is True
    assert judge(asked, rf"twice nine</think> \boxed{{{GOLD[kind]}}}") is True
    assert judge(asked, rf"it may be \boxed{{{GOLD[kind]}}}") is False  # unfinished
    assert vote(asked, rf"it may be \boxed{{{GOLD[kind]}}}") is None
    assert judge(problem(GOLD[kind], kind, opened="<think>\n\n</think>\n\n<answer>"), f"{GOLD[kind]}</answer>") is True


def test_what_needs_a_worker_is_not_judged_without_one():
    job = Job("pods_jax.rewards.algebra:same_expression", ("-q + p", "p - q"))
    assert judge(problem("p - q", "math"), "<answer>-q + p</answer>") == job


@pytest.mark.parametrize("kind", ["number", "math"])
@pytest.mark.parametrize(
    "block",
    [
        "18</answer></answer>",
        "18\n</answer>\n</answer>",
        "$18</answer>",
        r"\boxed{18}</answer>",
        r"It is \(\boxed{18}\).</answer>",
    ],
)
def test_a_block_closed_twice_or_with_a_box_holds_its_answer(kind, block):
    assert is_correct(problem("18", kind), f"<think></think><answer>{block}")


@pytest.mark.parametrize(
    ("completion", "sources", "right"),
    [
        (r"\boxed{18}", ["answer", "boxed"], True),
        (r"\boxed{18}", ["answer"], False),
        (r"<answer>17</answer> \boxed{18}", ["answer", "boxed"], False),
        ("it is 18", ["answer", "boxed"], False),
        ("it is 18", ["last_number"], True),
        ("it is -18", ["last_number"], False),
        ("7 (not 18)", ["last_number"], False),
        ("18 apples less 11", ["last_number"], False),
    ],
)
def test_only_the_sources_asked_for_count(completion, sources, right):
    assert is_correct(problem("18", "number"), completion, sources) is right


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("$70,000", "70000", True),
        ("27", "27.0", True),
        ("-5", "5", False),
        ("7 (not 18)", "18", False),
        ("180 * 3", "540", False),
    ],
)
def test_numbers_are_compared_by_the_value_that_they_say(answer, gold, same):
    assert same_number(answer, gold) is same


@pytest.mark.parametrize(
    ("answer", "same"), [("evelyn", True), ("**Evelyn**.", True), ("The answer is: Evelyn", True), ("Evlyn", False)]
)
def test_text_is_compared_whatever_its_case_and_markup(answer, same):
    assert same_text(answer, r"\text{Evelyn}") is same


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("number", "$70,000", "70000 dollars"),
        ("math", r"\frac{14}{3}", "14/3"),
        ("math", r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        ("choice", "(B)", "B. 12"),
        ("text", "even", r"\text{even}"),
    ],
)
def test_equal_answers_vote_together(kind, one, other):
    asked = problem(GOLD[kind], kind)
    assert (
        vote(asked, f"<answer>{one}</answer>") == vote(asked, f"<answer>{other}</answer>") != vote(asked, "<answer>7</answer>")
    )
    assert vote(asked, "no answer") is None


def test_exact_answers_vote_as_they_are_written():
    assert vote(problem("018"), "<answer>018</answer>") == "018"
