import json

import pytest

from pods_jax.data.gold import UnparsableError
from pods_jax.data.jsonl import read_question
from pods_jax.data.rows import Columns, Source
from pods_jax.data.tasks import load_splits
from pods_jax.problem import Problem
from pods_jax.rewards.answers import gold_fault, judge, vote
from pods_jax.rewards.choices import LETTERS


@pytest.mark.parametrize(
    ("kind", "value", "gold"),
    [
        ("math", r" \frac12 ", r"\frac12"),
        ("math", 0.5, "0.5"),
        ("number", "1,000", "1000"),
        ("number", 12, "12"),
        ("text", "Paris", "Paris"),
        ("exact", "ab c", "ab c"),
        ("choice", "B", "B"),
        ("equation", "2H2 + O2 = 2H2O", "2H2 + O2 = 2H2O"),
    ],
)
def test_the_named_columns_are_read_by_kind(kind, value, gold):
    columns = Columns(question="q", answer="a", solution="s", answer_kind=kind)
    question = read_question({"q": "What?", "a": value, "s": "Thus."}, columns)
    assert (question.text, question.answer, question.kind, question.solution) == ("What?", gold, kind, "Thus.")


def test_options_make_it_a_choice():
    question = read_question({"question": "Which?", "answer": 1, "o": ["x", "y"]}, Columns(choices="o"))
    assert (question.answer, question.kind, question.choices) == ("B", "choice", ("x", "y"))


@pytest.mark.parametrize("count", [2, 12, 26])
def test_as_many_options_as_there_are_letters_are_asked_and_their_answers_judged(tmp_path, count):
    options = [f"{index}0 g" for index in range(count)]
    rows = [{"question": f"Which is {i}0 g?", "answer": i, "o": options} for i in range(count)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = Source(path=str(tmp_path), columns=Columns(choices="o"))
    splits = load_splits("jsonl", train_problems=0, held_out_problems=0, seed=0, source=source, evaluation=True)
    assert [problem.answer for problem in splits.held_out] == list(LETTERS[:count])
    for problem, text in zip(splits.held_out, options, strict=True):
        assert gold_fault(problem) is None
        assert f"\n{problem.answer}. {text}" in problem.messages[0]["content"]
        for right in (problem.answer, f"({problem.answer.lower()})", text, f"{problem.answer}. {text}"):
            assert judge(problem, f"<answer>{right}</answer>") is True
            assert vote(problem, f"<answer>{right}</answer>") == problem.answer
        other = LETTERS[LETTERS.index(problem.answer) - 1]
        assert judge(problem, f"<answer>{other}</answer>") is False


@pytest.mark.parametrize("gold", ["B", "K", "k", "Z"])
def test_a_letter_without_options_is_asked_and_judged(gold):
    question = read_question({"question": "Which?", "answer": gold}, Columns(answer_kind="choice"))
    problem = Problem("own/0", (), question.answer, "jsonl", question.kind)
    assert gold_fault(problem) is None
    for right in (gold, f"({gold})", gold.lower()):
        assert judge(problem, f"<answer>{right}</answer>") is True
        assert vote(problem, f"<answer>{right}</answer>") == gold.upper()
    assert judge(problem, "<answer>C</answer>") is False


@pytest.mark.parametrize(
    ("kind", "value"),
    [("number", "many"), ("choice", "maybe"), ("equation", "x"), ("text", ""), ("text", True), ("text", None)],
)
def test_a_gold_answer_of_another_kind_is_refused(kind, value):
    with pytest.raises(UnparsableError):
        read_question({"question": "What?", "answer": value}, Columns(answer_kind=kind))


def test_a_file_of_ones_own_is_divided_and_a_wrong_column_named(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(json.dumps({"q": f"{i} + 1?", "a": i + 1}) for i in range(100)))
    columns = Columns(question="q", answer="a", answer_kind="number")
    source = Source(path=str(file), columns=columns)
    splits = load_splits("jsonl", train_problems=0, held_out_problems=0, seed=0, source=source)
    assert len(splits.train) + len(splits.held_out) == 100
    assert splits.held_out
    with pytest.raises(
        ValueError, match=r"no held_out problem; of 100 unparsable rows the first is .*'question'; there are: q, a"
    ):
        load_splits("jsonl", train_problems=0, held_out_problems=0, seed=0, source=Source(path=str(file)))
