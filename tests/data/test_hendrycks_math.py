import pytest

from pods_jax.data.gold import UnparsableError
from pods_jax.data.hendrycks_math import ORIGINS, read_question
from pods_jax.data.rows import Columns, Source
from pods_jax.data.tasks import load_splits


def test_a_training_row_has_its_answer_in_the_last_box():
    row = {
        "problem": "What?",
        "solution": r"First \boxed{1}, so $\boxed{\frac{\sqrt{3}}{2}}$.",
        "level": "Level 5",
        "type": "x",
    }
    question = read_question(row, Columns())
    assert (question.answer, question.kind) == (r"\frac{\sqrt{3}}{2}", "math")
    assert question.solution == row["solution"]


def test_a_published_answer_goes_before_the_box():
    assert read_question({"problem": "What?", "solution": r"\boxed{1}", "answer": "2"}, Columns()).answer == "2"


def test_a_solution_without_a_box_is_refused():
    with pytest.raises(UnparsableError, match=r"no \\boxed"):
        read_question({"problem": "What?", "solution": "It is 2."}, Columns())


def test_training_joins_the_seven_subjects_and_never_the_test_split():
    assert len(ORIGINS["train"].subsets) == 7
    assert ORIGINS["train"].split == "train"


def test_all_of_math500_loads_for_evaluation(real_data):
    source = Source(path=str(real_data / "math500"))
    splits = load_splits("math", train_problems=0, held_out_problems=0, seed=0, source=source, evaluation=True)
    assert [(r.split, r.problems, r.unparsable) for r in splits.reports] == [("held_out", 500, ())]
    with pytest.raises(ValueError, match="no file of the split 'train'"):
        load_splits("math", train_problems=0, held_out_problems=0, seed=0, source=source)
