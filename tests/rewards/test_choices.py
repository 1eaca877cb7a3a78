import pytest

from pods_jax.rewards.choices import LETTERS, read_choice, same_choice

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


TWELVE = tuple(f"{index + 1}0 g/mol" for index in range(12))


@pytest.mark.parametrize(
    "text",
    ["K", "k", "(K)", "(k)", "K.", "K. 110 g/mol", "(K) 110", "k) 110", "The answer is K", "110 g/mol", "110", "K = 110"],
)
def test_the_eleventh_of_twelve_options_is_read_by_letter_and_by_text(text):
    assert read_choice(text, TWELVE) == "K"
    assert same_choice(text, "K", TWELVE) is True
    assert same_choice(text, "L", TWELVE) is False


@pytest.mark.parametrize("text", ["M", "(M)", "K or L", "K and L", "K. 110 (L) 120", "K. 120 g/mol", "Not K", "K L"])
def test_no_letter_of_twelve_or_several_are_none(text):
    assert read_choice(text, TWELVE) is None


def test_the_letters_are_a_to_z():
    assert "".join(map(chr, range(ord("A"), ord("Z") + 1))) == LETTERS


@pytest.mark.parametrize("count", range(2, 27))
def test_every_letter_of_an_option_is_read_and_no_other(count):
    options = tuple(f"option number {index}" for index in range(count))
    for letter, option in zip(LETTERS, options, strict=False):
        for text in (letter, letter.lower(), f"({letter})", f"{letter}. {option}", option, f"The answer is {letter}."):
            assert read_choice(text, options) == letter
    for letter in LETTERS[count:]:
        for text in (letter, letter.lower(), f"({letter})", f"{letter}. anything"):
            assert read_choice(text, options) is None


@pytest.mark.parametrize("gold", ["K", "k", "(K)", r"\text{(K)}", "The answer is K"])
def test_a_gold_letter_beyond_j_makes_all_letters_readable(gold):
    for right in ("K", "(k)", "K.", "K: 12", r"\text{(K)}"):
        assert same_choice(right, gold) is True
    for wrong in ("A", "(Z)", "K or L", "K. 12 (Z) 13", "12"):
        assert same_choice(wrong, gold) is False
    assert read_choice("Z", gold=gold) == "Z"


@pytest.mark.parametrize("text", ["K", "(K)", "x", "N. 12", "T = 298 K", "Z"])
def test_without_options_a_letter_beyond_j_is_none_unless_the_gold_answer_is_one(text):
    assert read_choice(text) is None
    assert read_choice(text, gold="B") is None
    assert read_choice(text, gold="T = 298 K") is None


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("T = 298 K", "C"),  # a letter that no option has labels nothing
        ("A cat and I", None),
        ("B. CO or N and K", "B"),
        ("C. I think so", "C"),
        ("I", None),
        ("A", "A"),
        ("N", "D"),
        ("K", None),
    ],
)
def test_words_and_formulas_of_one_letter_are_no_letters_beyond_the_options(text, letter):
    assert read_choice(text, ("12 K", "CO", "298 K", "N")) == letter
