from collections import Counter

import pytest

from pods_jax.data.gold import UnparsableError
from pods_jax.data.rows import Columns, Source
from pods_jax.data.sciknoweval import BALANCING, read_question
from pods_jax.data.tasks import load_splits


def row(**changes):
    details = {"level": "L3", "subtask": changes.pop("subtask", "s2w")}
    choices = {"text": ["1", "2", "3", "4"], "label": ["A", "B", "C", "D"]}
    made = {"question": "How heavy?", "answer": "", "answerKey": "C", "choices": choices, "type": "mcq-4-choices"}
    return {**made, "domain": "Chemistry", "details": details, **changes}


def filling(answer):
    return row(type="filling", subtask=BALANCING, answer=answer, answerKey="", choices={"text": [], "label": []})


def test_a_multiple_choice_has_its_options_and_the_letter():
    question = read_question(row(), Columns())
    assert question is not None
    assert (question.answer, question.kind, question.choices) == ("C", "choice", ("1", "2", "3", "4"))


def test_an_equation_is_asked_for_whole():
    question = read_question(filling("2H2 + O2 = 2H2O"), Columns())
    assert question is not None
    assert (question.answer, question.kind) == ("2H2 + O2 = 2H2O", "equation")
    assert "whole balanced equation" in question.instruction


@pytest.mark.parametrize(
    "other",
    [row(domain="Biology"), row(details={"level": "L2", "subtask": "x"}), row(type="true_or_false"), row(details=None)],
)
def test_rows_of_other_domains_levels_and_types_are_not_of_the_task(other):
    assert read_question(other, Columns()) is None


@pytest.mark.parametrize("broken", [row(answerKey="E"), row(answerKey=""), row(choices=None), filling("water"), filling("")])
def test_a_key_or_an_equation_that_is_none_is_refused(broken):
    with pytest.raises(UnparsableError):
        read_question(broken, Columns())


def test_all_real_rows_load_and_one_in_eight_is_held_out(real_data):
    source = Source(path=str(real_data / "sciknoweval_chemistry_l3"))
    splits = load_splits("sciknoweval_chemistry", train_problems=0, held_out_problems=0, seed=0, source=source)
    problems = splits.train + splits.held_out
    assert len(problems) == 2400
    assert all(not report.unparsable and not report.duplicates for report in splits.reports)
    assert len(splits.held_out) == pytest.approx(300, abs=50)
    assert Counter(p.answer_kind for p in problems) == {"choice": 2100, "equation": 300}
    assert {p.answer_kind for p in splits.held_out} == {"choice", "equation"}
