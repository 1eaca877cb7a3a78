import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_jax.data.gold import UnparsableError, equation, last_boxed, number


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("72", "72"),
        (" 1,080 ", "1080"),
        ("109,200,000", "109200000"),
        ("$12", "12"),
        ("-5", "-5"),
        ("27.0", "27"),
        (27.0, "27"),
        (-1, "-1"),
        (1e-05, "0.00001"),
        ("3.50", "3.5"),
        ("1,080.25", "1080.25"),
        ("007", "7"),
        ("100", "100"),
    ],
)
def test_numbers_become_plain_digits(written, plain):
    assert number(written) == plain


@given(st.integers(-(10**18), 10**18))
def test_any_integer_is_itself_with_separators_or_a_decimal_zero(value):
    assert number(f"{value:,}") == number(f"{value}.0") == number(value) == str(value)


@pytest.mark.parametrize(
    "written", ["", " ", "x", "1,08", "10,80,0", "5 apples", "1/2", "--5", "٣", float("nan"), float("inf"), None, True]
)
def test_what_is_no_number_is_refused_and_shown(written):
    with pytest.raises(UnparsableError, match="is not a number"):
        number(written)


@pytest.mark.parametrize(
    ("solution", "boxed"),
    [
        (r"so $\boxed{5}$.", "5"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"$\boxed{\left\{ \frac{a_{1}}{2} \right\}}$ and {more}", r"\left\{ \frac{a_{1}}{2} \right\}"),
        (r"$\boxed{1}$ or rather $\boxed{2}$", "2"),
        (r"$\fbox{7}$", "7"),
        (r"$\boxed{\text{a \} b}}$", r"\text{a \} b}"),
        (r"$\boxed 5$ is it", "5"),
        (r"\boxed 12.", "12"),
        (r"\boxed{ x = 3 }", "x = 3"),
        (r"\(\boxed {9}\)", "9"),
        (r"$\boxed \frac{1}{2}$", r"\frac{1}{2}"),
        (r"$\boxed{\boxed{4}}$", "4"),
    ],
)
def test_the_last_box_is_read_with_braces_matched(solution, boxed):
    assert last_boxed(solution) == boxed


@pytest.mark.parametrize(
    ("solution", "message"),
    [
        ("the answer is 5", "no .boxed"),
        (r"\boxedness{5}", "no .boxed"),
        (r"$\boxed{\frac{1}{2}$", "never closed"),
        (r"$\boxed{}$", "holds nothing"),
        (r"$\boxed $", "holds nothing"),
        (r"$\boxed{5\}$", "never closed"),
    ],
)
def test_a_missing_open_or_empty_box_is_refused(solution, message):
    with pytest.raises(UnparsableError, match=message):
        last_boxed(solution)


PARTS = st.sampled_from(["x", r"\{", r"\}", r"\frac", " 1 "])


@given(st.recursive(PARTS, lambda inner: st.lists(inner).map(lambda parts: "{" + "".join(parts) + "}")))
def test_whatever_is_balanced_comes_back_whole(content):
    assert last_boxed(rf"see \boxed{{1}}, then \boxed{{a{content}}} so }}") == f"a{content}".strip()


def test_every_box_of_math500_is_its_published_answer(real_data):
    rows = [json.loads(line) for line in (real_data / "math500/test.jsonl").read_text().splitlines()]
    assert len(rows) == 500
    assert [last_boxed(row["solution"]) for row in rows] == [row["answer"] for row in rows]


def test_an_equation_keeps_its_text():
    written = "Na2CrO4(aq) +  2LiBr(aq) = Li2CrO4(aq) + 2 NaBr(s)"
    assert equation(written) == "Na2CrO4(aq) + 2LiBr(aq) = Li2CrO4(aq) + 2 NaBr(s)"
    assert equation("Na[Al(OH)4] + (NH4)2SO4 = CuSO4·5H2O + Fe3+")


@pytest.mark.parametrize("written", ["", "H2 + O2", "H2 = O2 = H2O", "H2 + = H2O", "2 = H2O", "x + H2 = H2O", "1.5H2 = H3"])
def test_what_is_no_equation_is_refused(written):
    with pytest.raises(UnparsableError):
        equation(written)
