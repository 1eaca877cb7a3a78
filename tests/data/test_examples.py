import pytest

from pods_jax.data.examples import take_examples, worked_turns
from pods_jax.problem import Problem


def problem(index, **fields):
    return Problem(
        f"p/{index}", ({"role": "user", "content": f"{index}?"},), fields.pop("answer", str(index)), "made_up", **fields
    )


@pytest.mark.parametrize(("count", "chosen"), [(0, []), (1, [0]), (2, [0, 5]), (3, [0, 3, 6]), (9, list(range(9)))])
def test_examples_come_from_equal_stretches_and_are_not_trained_on(count, chosen):
    problems = [problem(index) for index in range(10)]
    examples, rest = take_examples(problems, count)
    assert [problems.index(example) for example in examples] == chosen
    assert [p for p in problems if p not in examples] == rest


def test_the_shortest_of_the_first_few_of_a_stretch_is_the_example():
    problems = [problem(index, solution="long" * 9) for index in range(100)]
    for index in (3, 20, 56):  # the second lies beyond the first few of its stretch
        problems[index] = problem(index, solution="short")
    examples, rest = take_examples(problems, 2)
    assert [example.id for example in examples] == ["p/3", "p/56"]
    assert len(rest) == 98


def test_examples_that_leave_nothing_to_train_on_are_refused():
    with pytest.raises(ValueError, match=r"data\.few_shot=3 worked examples leave none of the 3 training problems"):
        take_examples([problem(index) for index in range(3)], 3)


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"solution": "1 + 1 = 2"}, "1 + 1 = 2"),
        ({"answer": "B", "choices": ("x", "y")}, "Of the options, B fits: y."),
        ({"answer": "9"}, "Working it out gives 9."),
    ],
)
def test_the_assistants_turn_is_right_and_in_think_answer_form(fields, reasoning):
    shown = problem(7, **fields)
    user, assistant = worked_turns(shown)
    assert user == {"role": "user", "content": "7?"}
    assert assistant == {"role": "assistant", "content": f"<think>{reasoning}</think>\n<answer>{shown.answer}</answer>"}


def test_a_problem_without_a_gold_answer_is_no_example():
    with pytest.raises(ValueError, match=r"problem p/1 has no gold answer .* data\.few_shot=0"):
        worked_turns(problem(1, answer="", extra="{}"))
