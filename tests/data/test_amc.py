import pytest

from pods_jax.data.amc import read_question
from pods_jax.data.gold import UnparsableError
from pods_jax.data.rows import Columns, Source
from pods_jax.data.tasks import load_splits


@pytest.mark.parametrize(("answer", "gold"), [(27.0, "27"), ("27.0", "27"), (-1.0, "-1"), ("3159", "3159")])
def test_floats_become_whole_numbers(answer, gold):
    question = read_question({"question": "How far?", "answer": answer}, Columns())
    assert (question.answer, question.kind) == (gold, "number")


@pytest.mark.parametrize("answer", [None, "", "E", float("nan")])
def test_an_answer_that_is_no_number_is_refused(answer):
    with pytest.raises(UnparsableError):
        read_question({"question": "How far?", "answer": answer}, Columns())


def test_the_real_forty_load_for_evaluation_alone(real_data):
    source = Source(path=str(real_data / "amc23"))
    splits = load_splits("amc23", train_problems=0, held_out_problems=0, seed=0, source=source, evaluation=True)
    assert len(splits.held_out) == 40
    assert not splits.reports[0].unparsable
    assert splits.held_out[0].answer == "27"


@pytest.mark.parametrize(
    ("settings", "cause"), [({}, "cannot be trained on"), ({"evaluation": True, "few_shot": 1}, "few_shot=1")]
)
def test_training_on_it_is_refused_before_anything_is_read(settings, cause):
    with pytest.raises(ValueError, match=rf"data\.task='amc23' is for evaluation alone.*{cause}"):
        load_splits("amc23", train_problems=0, held_out_problems=0, seed=0, source=Source(path="/none"), **settings)
