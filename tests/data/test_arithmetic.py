import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_jax.data.arithmetic import MAX_PROBLEMS, OPERATIONS, TIMES_SHARE, demonstration, generate, load_problems
from pods_jax.data.rows import Source
from pods_jax.data.splitting import HELD_OUT_SHARE, is_held_out
from pods_jax.data.tasks import load_splits

EXAMPLE = "+4*3+5-2*7+1="
FROZEN = ["+9*1-5+8+2*8=", "+1-2-9-7+8+2=", "+2+5*9+8+7*6=", "+2-1*5+2+3+9="]


def rng(seed=0):
    return np.random.default_rng(seed)


def question(problem):
    return problem.messages[0]["content"]


def test_hand_worked_example():
    assert demonstration(EXAMPLE, slip=0, rng=rng()) == "<think>+4=4*3=2+5=7-2=5*7=5+1=6</think><answer>556</answer>"


def test_a_slip_adds_where_it_should_multiply_and_carries_the_wrong_total_on():
    assert demonstration(EXAMPLE, slip=1, rng=rng()) == "<think>+4=4*3=7+5=2-2=0*7=7+1=8</think><answer>078</answer>"


def test_totals_below_zero_wrap_to_a_digit():
    assert demonstration("+1-2-9=", slip=0, rng=rng()) == "<think>+1=1-2=9-9=0</think><answer>190</answer>"


@pytest.mark.parametrize("text", ["", "=", "+4*3=", "+4*3+5", "4*3+5=", "+4*3+=", "+4/3+5=", "+4*²+5="])
def test_malformed_expressions_are_refused(text):
    with pytest.raises(ValueError, match="tally expression"):
        demonstration(text, slip=0, rng=rng())


def independently(expression):
    value, steps, totals = 0, "", ""
    for sign, digit in zip(expression[:-1:2], expression[1::2], strict=True):
        value = value + int(digit) if sign == "+" else value - int(digit) if sign == "-" else value * int(digit)
        steps, totals = f"{steps}{sign}{digit}={value % 10}", f"{totals}{value % 10}"
    return f"<think>{steps}</think><answer>{totals[-3:]}</answer>"


@given(operations=st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 9)), min_size=3, max_size=9))
def test_right_demonstrations_agree_with_an_independent_evaluation(operations):
    expression = "".join(f"{sign}{digit}" for sign, digit in operations) + "="
    assert demonstration(expression, slip=0, rng=rng()) == independently(expression)


@given(seed=st.integers(0, 2**32))
def test_expressions_are_drawn_in_their_form(seed):
    expression = generate(rng(seed))
    assert len(expression) == 2 * OPERATIONS + 1
    assert expression[0] == "+"
    assert "0" not in expression
    assert demonstration(expression, slip=0, rng=rng(seed)) == independently(expression)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
def test_share_of_multiplications_is_what_was_asked(share):
    source = rng()
    signs = [sign for _ in range(400) for sign in generate(source, times_share=share)[2:-1:2]]
    error = 5 * np.sqrt(share * (1 - share) / len(signs))
    assert signs.count("*") / len(signs) == pytest.approx(share, abs=error)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_both_splits_have_the_share_of_multiplications_asked_for(split):
    problems = load_problems(split, count=500, seed=0, times_share=0.6)
    signs = [sign for problem in problems for sign in question(problem)[2:-1:2]]
    assert signs.count("*") / len(signs) == pytest.approx(0.6, abs=5 * np.sqrt(0.6 * 0.4 / len(signs)))
    assert [is_held_out(question(problem)) for problem in problems] == [split == "held_out"] * 500


def test_a_run_asks_for_the_share_by_an_option_and_has_the_default_without():
    def asked(*options):
        splits = load_splits("arithmetic", train_problems=40, held_out_problems=10, seed=3, source=Source(options=options))
        return [question(problem) for problem in (*splits.train, *splits.held_out)]

    sizes = {"train": 40, "held_out": 10}
    expected = [load_problems(split, count=count, seed=3, times_share=0.4) for split, count in sizes.items()]
    assert asked("times_share=0.4") == [question(problem) for problems in expected for problem in problems]
    assert asked() == asked(f"times_share={TIMES_SHARE}") != asked("times_share=0.4")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("times_share=0.95", r"times_share=0\.95; it must be a number from 0 to 0\.9"),
        ("times_share=-0.1", r"times_share=-0\.1; it must be"),
        ("times_share=many", "times_share=many; it must be"),
        ("times_share=true", "times_share=True; it must be"),
        ("times_share=NaN", "times_share=nan; it must be"),
        ("divide_share=0.1", "'divide_share'; data.task='arithmetic' has times_share alone"),
        ("times_share", "must be key=value"),
    ],
)
def test_an_impossible_option_is_refused(option, message):
    with pytest.raises(ValueError, match=message):
        load_splits("arithmetic", train_problems=4, held_out_problems=4, seed=0, source=Source(options=(option,)))


def test_slips_happen_with_the_probability_asked():
    source = rng()
    slipped = ["2*3=5" in demonstration("+2*3+1=", slip=0.3, rng=source).replace("+2=2*", "2*") for _ in range(2000)]
    assert np.mean(slipped) == pytest.approx(0.3, abs=5 * np.sqrt(0.3 * 0.7 / 2000))


@given(seed=st.integers(0, 2**32), count=st.integers(1, 50), other=st.integers(0, 2**32))
def test_a_held_out_problem_is_never_generated_for_training(seed, count, other):
    train = {question(p) for p in load_problems("train", count=count, seed=seed)}
    held_out = {question(p) for p in load_problems("held_out", count=count, seed=other)}
    assert not any(map(is_held_out, train))
    assert all(map(is_held_out, held_out))
    assert len(train) == len(held_out) == count


def test_the_partition_does_not_change_between_versions():
    # Frozen: moving it would put problems that an older model was trained on among the held-out ones.
    assert [expression for expression in FROZEN if is_held_out(expression)] == FROZEN[-2:]


def test_the_held_out_share_is_what_is_documented():
    source = rng()
    drawn = [is_held_out(generate(source)) for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(HELD_OUT_SHARE, abs=5 * np.sqrt(HELD_OUT_SHARE * (1 - HELD_OUT_SHARE) / 4000))


def test_problems_are_distinct_the_same_for_a_seed_and_others_for_another():
    first = load_problems("train", count=300, seed=1)
    assert first == load_problems("train", count=300, seed=1)
    assert first[:100] == load_problems("train", count=100, seed=1)
    assert len({question(p) for p in first}) == len({p.id for p in first}) == 300
    assert {question(p) for p in first} != {question(p) for p in load_problems("train", count=300, seed=2)}
    assert all(f"<answer>{p.answer}</answer>" in independently(question(p)) for p in first)


def test_a_problems_solution_is_the_right_demonstrations_reasoning():
    [problem] = load_problems("train", count=1, seed=0)
    shown = demonstration(question(problem), slip=0, rng=rng())
    assert shown == f"<think>{problem.solution}</think><answer>{problem.answer}</answer>"


def test_no_answer_is_a_good_guess():
    answers = [p.answer for p in load_problems("train", count=3000, seed=0)]
    assert max(answers.count(answer) for answer in set(answers)) / len(answers) < 0.01


@pytest.mark.parametrize("count", [0, -1, MAX_PROBLEMS + 1])
def test_impossible_counts_are_refused(count):
    with pytest.raises(ValueError, match=f"{count} train problems .* 1 to {MAX_PROBLEMS}"):
        load_problems("train", count=count, seed=0)
