import pytest

from pods_jax.data.gold import UnparsableError
from pods_jax.data.gsm8k import read_question
from pods_jax.data.rows import Columns, Source
from pods_jax.data.tasks import load_splits


def read(answer):
    return read_question({"question": " How many? ", "answer": answer}, Columns())


def test_the_answer_stands_after_the_mark_and_the_solution_before_it_without_calculator_marks():
    question = read("He has 48/2 = <<48/2=24>>24.\nAt $45 each: <<24*45=1080>>$1,080.\n#### 1,080")
    assert (question.text, question.answer, question.kind) == ("How many?", "1080", "number")
    assert question.solution == "He has 48/2 = 24.\nAt $45 each: $1,080."


@pytest.mark.parametrize("answer", ["72", "#### ", "#### many", "x\n#### 1,08", ""])
def test_an_answer_without_mark_or_number_is_refused(answer):
    with pytest.raises(UnparsableError):
        read(answer)


def test_all_real_rows_load_and_nothing_is_unparsable(real_data):
    splits = load_splits("gsm8k", train_problems=0, held_out_problems=0, seed=0, source=Source(path=str(real_data / "gsm8k")))
    assert [(r.split, r.problems, r.unparsable, r.duplicates) for r in splits.reports] == [
        ("train", 7473, (), 0),
        ("held_out", 1319, (), 0),
    ]
    assert splits.held_out[0].answer == "18"
    assert not any("<<" in p.solution or "####" in p.solution for p in splits.train)
    assert {p.answer for p in splits.train} >= {"109200000", "72"}
