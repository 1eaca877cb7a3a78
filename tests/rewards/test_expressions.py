# ruff: noqa: RUF001 - signs that models write are meant as they stand

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_jax.rewards.algebra import same_expression
from pods_jax.rewards.expressions import LONGEST_EXPRESSION, same_mathematics, stated_expression
from pods_jax.rewards.workers import Job

POLAR = r"\left( 3, \frac{\pi}{2} \right)"

RIGHT_BY_TEXT = [
    (POLAR, r"(3, \(\frac{\pi}{2}\))"),
    (POLAR, r"\((3, \dfrac{\pi}{2})\)"),
    (POLAR, r"$\left(3, \frac{π}{2}\right)$"),
    (POLAR, r"The polar coordinates are \((3, \frac{\pi}{2})\)."),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{Evelyn}", "evelyn."),
    (r"\text{Evelyn}", "The answer is **Evelyn**"),
    (r"\text{(C)}", "C"),
    (r"\text{(C)}", "(C) 18"),
    (r"\text{(K)}", "(k)"),
    ("(M)", "The answer is M"),
    (r"\frac{14}{3}", "14/3"),
    (r"\frac{14}{3}", r"\[\frac{14}{3}\]"),
    (r"\frac{14}{3}", r"To add $2$ we write $$\frac{6}{3} = 2$$ Therefore, the answer is $\frac{14}{3}$."),
    (r"90^\circ", "90 degrees"),
    (r"10,\!080", "10080"),
    ("9", "The number 196 has 9 divisors."),
    ("x=5", "5"),
    ("52_8", "52_{8}"),
    ("52_8", "52"),
    (r"\sqrt{51}", "√51"),
    (r"11\sqrt2", r"11 \sqrt{2}"),
    ("p - q", r"\(p-q\)"),
    (".0000672", r"6.72 \times 10^{-5}"),
    (r"\frac16", r"0.1\overline{6}"),
]
WRONG_BY_TEXT = [
    ("5", "-5"),
    ("2.6e-15", "2.7e-15"),
    ("3 g", "3 kg"),
    ("18", "7 (not 18)"),
    ("9", ""),
    (r"\text{Evelyn}", "Carla"),
    (r"\text{Evelyn}", "Not Evelyn"),
    (r"\text{(C)}", "B"),
    (r"\text{(K)}", "J"),
    ("52_8", "52_9"),
    ("52_8", "53"),
    (r"\sqrt{5}", r"the answer is not $\sqrt{5}$"),
    (r"\sqrt{5}", r"Either $\sqrt{5}$ or $\sqrt{7}$"),
    ("p - q", "x" * (LONGEST_EXPRESSION + 1)),
]
RIGHT_BY_ALGEBRA = [
    (POLAR, "(3, π/2)"),
    (POLAR, r"(3, \(\pi/2\))"),
    (POLAR, "The polar coordinates are (3, pi/2)."),
    (POLAR, r"r = 3, \theta = \frac{\pi}{2}"),
    (POLAR, r"$\left(\sqrt{3^2}, \frac{\pi}{2} \right) = \left(3, \frac{\pi}{2}\right).$"),
    ("p - q", "-q + p"),
    ("6 - 5i", "-5i + 6"),
    ("1,-2", "-2, 1"),
    ("1,-2", "x = -2 or x = 1"),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
    (r"\{1\pm\sqrt{5},-2\}", r"-2, 1+\sqrt5, 1-\sqrt5"),
    (r"x \in [-2,7]", "[-2,7]"),
    ("(5,\\infty)", "x > 5"),
    ("y = 2x + 3", "y = 3 + 2x"),
    ("y = 2x + 3", "2x + 3"),
    ("5x - 7y + 11z + 4 = 0", "5x - 7y + 11z = -4"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{bmatrix} -\frac13 \\[2pt] \frac23 \end{bmatrix}"),
    (r"\frac{20000}{\pi}", r"20,000/\pi"),
    ("8n^2 + 4n + 1", "f(n) = 1 + 4n + 8n^2"),
    (r"\cot x", r"\frac{\cos x}{\sin x}"),
    (r"(2,12) \cup (12,102)", r"(12, 102) \cup (2, 12)"),
    ("(12,102)", "(12, 204/2)"),
    (r"\frac{20000}{\pi}", r"\frac{20{,}000}{\pi}"),
    (r"3\sqrt{2}, -3\sqrt{2}", r"\pm 3\sqrt{2}"),
    (r"(0,9) \cup (9,36)", "(9,36) ∪ (0,9)"),
]
WRONG_BY_ALGEBRA = [
    (POLAR, r"(\frac{\pi}{2}, 3)"),
    (POLAR, r"(3, \(\frac{3\pi}{2}\))"),
    (POLAR, "[3, π/2]"),
    (POLAR, r"\theta = \frac{\pi}{2}, r = 3"),
    ("(2,4)", "2, 4"),
    ("(2,4)", r"\{2, 4\}"),
    ("(2,4)", "[2,4]"),
    ("(6,31,-1)", "(6,31)"),
    ("p - q", "q - p"),
    ("p - q", "q^2"),
    ("1,-2", "1"),
    ("1,-2", "1, 2"),
    ("3, 5, 7", "3, 5, 5"),
    ("2", r"\pm 2"),
    ("9", "9x"),
    ("9", r"9\pi"),
    ("2k", "2n"),
    (r"\pi", "3.14"),
    (r"\sqrt{51}", "51"),
    ("y = 2x + 3", "x = 2y + 3"),
    ("5x - 7y + 11z + 4 = 0", "5x - 7y + 11z = 4"),
]


@pytest.mark.parametrize(("gold", "answer"), RIGHT_BY_TEXT)
def test_text_alone_finds_the_same_answer_in_another_spelling(gold, answer):
    assert same_mathematics(answer, gold) is True


@pytest.mark.parametrize(("gold", "answer"), WRONG_BY_TEXT)
def test_text_alone_refuses_another_answer(gold, answer):
    assert same_mathematics(answer, gold) is False


def by_algebra(answer, gold):
    verdict = same_mathematics(answer, gold)
    assert isinstance(verdict, Job)
    return same_expression(*verdict.args)


@pytest.mark.parametrize(("gold", "answer"), RIGHT_BY_ALGEBRA)
def test_algebra_finds_the_same_answer_in_another_form(gold, answer):
    assert by_algebra(answer, gold) is True


@pytest.mark.parametrize(("gold", "answer"), WRONG_BY_ALGEBRA)
def test_algebra_refuses_another_answer(gold, answer):
    assert by_algebra(answer, gold) is False


def test_a_gold_answer_that_cannot_be_read_is_reported():
    assert same_mathematics("5", " ") is None
    assert same_expression("x + 1", r"\frac{") is None


def test_two_plain_numbers_never_need_algebra():
    @given(answer=st.integers(), gold=st.integers())
    def check(answer, gold):
        assert same_mathematics(f"{answer:,}", str(gold)) is (answer == gold)

    check()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("p - q", "p - q"),
        (r"It is \(p - q\).", r"\(p - q\)"),
        (r"$a = 1$, so it is $b$ in total", "$b$"),
        (r"$a = 1$ beside $b$", None),
        ("It is not $b$", None),
        ("the sum is x + 1", "x + 1"),
        (r"\(7\) cm", r"\(7\)"),
    ],
)
def test_the_stated_expression_is_found_among_words(answer, said):
    assert stated_expression(answer) == said


@given(text=st.text(st.characters(codec=None)) | st.text("$\\()[]{}^_=, is.xπ√frac0123"))
def test_any_text_is_compared_without_an_error(text):
    assert isinstance(same_mathematics(text, POLAR), bool | Job)
