# ruff: noqa: RUF001 - marks of turns are meant as they stand

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_jax.rewards.extraction import (
    DEFAULT_SOURCES,
    SOURCES,
    answer_block,
    boxed,
    check_sources,
    extract_answer,
    last_number,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{18}.", "18"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{14}{3}}", r"\frac{14}{3}"),
        (r"\boxed{\left\{ 1, \{2\} \right\}}", r"\left\{ 1, \{2\} \right\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{a \boxed{5}}", "5"),
        (r"\boxed{6} and then \boxed{7", "6"),
        (r"\boxed{}", ""),
        (r"\boxed{18} \boxed{ }", "18"),
        (r"\boxed 8", "8"),
        (r"so $\boxed 12.$", "12"),
        (r"so \boxed -1.5, as asked", "-1.5"),
        (r"\(\boxed \frac{1}{2}\)", r"\frac{1}{2}"),
        (r"\boxed x", "x"),
        (r"\boxed{18}, as the box above says: \boxed above", "18"),
        (r"\boxed{3} or \boxed{5}", "3 or 5"),
        (r"$\boxed{3}$ or $\boxed{5}$.", "3 or 5"),
        (r"\boxed{3} \text{ or } \boxed{5}", "3 or 5"),
        (r"\(\boxed{1}\), \(\boxed{2}\), and \(\boxed{3}\)", "1, 2, 3"),
        (r"\boxed{5} or \boxed{5}", "5"),
        (r"\boxed{3} or rather \boxed{5}", "5"),
        ("boxed{9}", None),
        (r"\boxed{9", None),
        ("18", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_the_answer(text, answer):
    assert boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so it is 18.", "18"),
        ("5 apples and 7 pears", "7"),
        ("it is -5", "-5"),
        ("x = -3", "-3"),
        ("9 * 60 = 540 meters", "540"),
        ("a profit of $70,000.", "70,000"),
        (r"the answer is $\frac{14}{3}$.", r"\frac{14}{3}"),
        (r"\boxed{27}" + "\n</think>", "27"),
        (r"the angle is \(45^\circ\).", "45"),
        ("40%", "40%"),
        ("not 7 but 18", "18"),
        ("no number", None),
        ("7 (not 18)", None),
        ("it isn't 18", None),
        ("less than 18", None),
        ("180 * 3", None),
        ("16 - 3", None),
        (r"36 - 18\sqrt{3}", None),
        ("2^{10}", None),
        (r"\sqrt{49}", None),
        ("18!", None),
        ("1e3", "1e3"),
        ("it is 2.5 × 10^7 kg.", r"2.5 \times 10^7"),
        ("H2", None),
        ("9" * 3_000, None),
        ("12 " + " " * 1_998 + "9", "9"),
        ("1" * 100 + " " * 1_990, None),
    ],
)
def test_the_last_number_is_read_with_its_sign_and_only_where_it_is_said(text, answer):
    assert last_number(text) == answer


RIGHT_TURN = "<think>9 * 2</think><answer>18</answer>"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (RIGHT_TURN + "\nUser: 2 + 2?\n<think></think><answer>4</answer>", "18"),
        (RIGHT_TURN + "<answer>4</answer>", "18"),
        (RIGHT_TURN + " or <answer>4</answer>", "18 or 4"),
        ("<answer>18</answer><think>sure</think>", "18"),
        ("<think>say <answer>4</answer></think><answer>18</answer>", "18"),
        ("say <answer>4</answer></think><answer>18</answer>", "18"),  # the prompt has opened the reasoning
        ("<think>a</think><think><answer>4</answer></think><answer>18</answer>", "18"),
        ("<think>say <answer>4</answer></think>", None),
        ("<think>so <answer>18</answer>", "18"),
        ("<answer>18</answer></think>", "18"),
        ("2 + 2?\n<|im_end|>\n<|im_start|>assistant\n<answer>4</answer>", None),
        (r"<think>\boxed{4}</think> \boxed{18}", "18"),
        (r"\boxed{4}</think> \boxed{18}", "18"),
        (r"<think>it may be \boxed{4}", None),
        (r"<think>it may be \boxed{4}</think> eighteen", None),
        (r"\boxed{18}</think>", "18"),
        (r"\boxed{4}, so \boxed{18}", "18"),
        *(
            (rf"It is \boxed{{18}}.{turn} 2 + 2? \boxed{{4}}", "18")
            for turn in (
                *("\nUser:", "\n\nHuman:", "\n**User:**", "\n### Instruction:\n", "\nAssistant:", "\nQuestion:", "\nQ2:"),
                *("<|im_start|>user\n", "<|eot_id|><|start_header_id|>user<|end_header_id|>\n", "<|endoftext|>", "</s>"),
                *("<start_of_turn>user\n", "[INST]", "<|user|>", "<｜User｜>", "\n### Problem 2:"),
            )
        ),
        (r"Question: 9 * 2? \boxed{18}", "18"),
        (r"First,\nQuestion: 9 * 2?\nSolution: \boxed{18}", "18"),
        (r"<|im_start|>assistant" + "\n" + r"\boxed{18}", "18"),
        ("<think>\nUser: asks for twice nine.\nQuestion: how?</think><answer>18</answer>", "18"),
        ("Sure.\nUser: 2 + 2?\nAssistant: <answer>4</answer>", None),
    ],
)
def test_the_answer_stands_behind_the_reasoning_in_the_models_own_turn(text, answer):
    assert extract_answer(text, DEFAULT_SOURCES) == answer


def test_a_last_number_is_not_that_of_another_turn():
    assert extract_answer("The answer is 18.\n\nQuestion: 2 + 2?\nThe answer is 4.", ["last_number"]) == "18"
    assert extract_answer("It is 18.\nUser: 2 + 2?\nAssistant: 4", ["last_number"]) == "18"


def test_the_first_source_that_is_there_decides_in_the_order_of_the_table():
    everything = r"<answer>1</answer> \boxed{2} 3"
    assert list(SOURCES) == ["answer", "boxed", "last_number"]
    assert extract_answer(everything, ["last_number", "boxed", "answer"]) == "1"
    assert extract_answer(everything, ["last_number", "boxed"]) == "2"
    assert extract_answer(everything, ["last_number"]) == "3"
    assert extract_answer("<answer></answer> 3", ["answer", "last_number"]) == ""
    assert extract_answer("only 3", ["answer", "boxed"]) is None


def test_a_last_number_counts_only_where_it_is_asked_for():
    assert "last_number" not in DEFAULT_SOURCES
    assert extract_answer("it is 18") is None


@pytest.mark.parametrize(
    ("sources", "message"), [(["box"], "'box' .*did you mean 'boxed'. valid: answer, boxed, last_number"), ([], "at least")]
)
def test_unknown_or_no_sources_are_refused(sources, message):
    with pytest.raises(ValueError, match=r"^verify\.sources.*" + message):
        check_sources(sources)
    with pytest.raises(ValueError, match="each once"):
        check_sources(["answer", "answer"])


HOSTILE = {
    "boxes": r"\boxed{" * 100_000,
    "closed boxes": r"\boxed{" * 50_000 + "}" * 50_000,
    "braces": "{" * 500_000 + r"\boxed{",
    "fractions": r"\frac{" * 100_000,
    "blanks": r"\boxed" + " " * 500_000,
    "digits": "9" * 500_000,
    "commas": "1," * 250_000,
    "slashes": "1/" * 250_000,
    "backslashes": "\\" * 500_000,
    "dollars": "$" * 500_000,
    "nulls": "\x00" * 500_000,
    "bare boxes": r"\boxed" * 100_000,
    "bare letters": r"\boxed x or " * 40_000,
    "joints": r"\boxed{1} , " * 40_000 + ", " * 100_000 + r"\boxed{1}",
    "turns": "\nUser" * 100_000,
    "reasoning": "<think>" * 50_000 + "</think>" * 50_000,
    "reasonings": "<think></think>" * 50_000,
    "closings": "</answer>" * 100_000,
    "tags": "<answer>" * 50_000 + "</answer>" * 50_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_extraction_is_linear_in_the_length(name):
    start = time.process_time()
    extract_answer(HOSTILE[name], list(SOURCES))
    assert time.process_time() - start < 3  # a quadratic search would take minutes


@pytest.mark.parametrize("find", [answer_block, boxed, last_number])
@given(text=st.text(st.characters(codec=None)) | st.text(r"\boxed{}123,./-<answer> "))
def test_any_text_is_searched_without_an_error(find, text):
    found = find(text)
    assert found is None or isinstance(found, str)
