import pytest

from pods_jax.rewards.choices import read_choice, same_choice

OPTIONS = ("12", "CCO", "1,400.0 g/mol", "Carbon dioxide")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "A",
            "(A)",
            "[A]",
            "A.",
            "A)",
            "A:",
            "a",
            "A. 12",
            "A) 12",
            "(A) 12",
            "A: 12",
            "**A**",
            "$A$",
            r"\text{(A)}",
            r"\boxed{A}",
        ),
        *("Option A", "The answer is A", "The correct answer is (A).", "answer: A", "A. CO or CO2"),
    ],
)
def test_a_letter_is_read_in_every_spelling(text):
    assert read_choice(text) == "A"


@pytest.mark.parametrize(
    "text",
    ["", "12", "A or B", "A. 12 or B. 13", "A and B", "(A) 12 (B) 13", "Not A", "AB", "A cat", "Z", "\x00A", "A" * 9_999],
)
def test_no_letter_or_several_are_none(text):
    assert read_choice(text) is None


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("12", "A"),
        ("cco", "B"),
        ("1400", "C"),
        ("carbon dioxide.", "D"),
        ("The answer is CCO", "B"),
        ("B", "B"),
        ("B. CCO", "B"),
        ("B: ethanol", "B"),
        ("B. 12", None),
        ("(B) Carbon dioxide", None),
        ("13", None),
        ("E", None),
    ],
)
def test_an_options_text_names_it_and_contradicts_another_letter(text, letter):
    assert read_choice(text, OPTIONS) == letter


def test_a_text_that_two_options_share_names_none():
    assert read_choice("12", ("12", "12")) is None


def test_verdicts_against_the_gold_letter():
    assert same_choice("(B)", "B") is True
    assert same_choice("A", "B") is False
    assert same_choice("none of them", "B") is False
    assert same_choice("B", "?") is None


FORMULAS = ("CC(C)(C)OC(=O)N1CCC(O)CC1", "C1CCCCC1", "c1ccccc1", "CC(B)O")


def test_formulas_of_other_letters_and_case_are_told_apart():
    for letter, formula in zip("ABCD", FORMULAS, strict=True):
        for text in (letter, formula, f"{letter}. {formula}", f"({letter}) {formula}", f"The answer is {letter}: {formula}"):
            assert read_choice(text, FORMULAS) == letter
        for other in set(FORMULAS) - {formula}:
            assert read_choice(f"{letter}. {other}", FORMULAS) is None
