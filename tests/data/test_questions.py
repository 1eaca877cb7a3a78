import json

import pytest

from pods_jax.data.gold import UnparsableError
from pods_jax.data.questions import Question, choices_of, letter_of, load_questions, text_of
from pods_jax.data.rows import Columns, Source
from pods_jax.data.splitting import is_held_out


def read(row, columns):
    if row["kind"] == "other":
        return None
    if row["kind"] == "broken":
        raise UnparsableError("no gold")
    return Question(row["text"], "1", "number", choices=tuple(row.get("choices", ())), instruction=row.get("instruction", ""))


def load(folder, split, rows, name="rows.jsonl"):
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return load_questions(split, task="made_up", source=Source(path=str(folder)), origins={}, read=read)


def test_unreadable_rows_are_reported_others_skipped_and_ids_count_the_rows(tmp_path):
    rows = [{"kind": kind, "text": f"question {index}"} for index, kind in enumerate(["good", "broken", "other", "good"])]
    loaded = load(tmp_path, "train", rows, "train.jsonl")
    assert [problem.id for problem in loaded.problems] == ["made_up/train/0", "made_up/train/3"]
    assert loaded.unparsable == ["made_up/train/1: no gold"]
    assert {(problem.task, problem.answer, problem.answer_kind) for problem in loaded.problems} == {("made_up", "1", "number")}


def test_shared_rows_are_divided_by_the_questions_hash_whatever_their_order(tmp_path):
    rows = [{"kind": "good", "text": f"question {index}"} for index in range(200)]
    train = load(tmp_path, "train", rows).problems
    held_out = load(tmp_path, "held_out", rows[::-1]).problems
    texts = {p.messages[0]["content"] for p in train}, {p.messages[0]["content"] for p in held_out}
    assert len(texts[0]) + len(texts[1]) == 200
    assert texts[1] == {row["text"] for row in rows if is_held_out(row["text"])}
    assert 10 < len(texts[1]) < 40


def test_options_and_instructions_follow_the_question(tmp_path):
    rows = [{"kind": "good", "text": "Which?", "choices": ["x", "y"], "instruction": "Be brief."}]
    [problem] = load(tmp_path, "train", rows, "train.jsonl").problems
    assert problem.messages[0]["content"] == "Which?\n\nA. x\nB. y\n\nAnswer with the letter of the right option.\n\nBe brief."
    assert problem.choices == ("x", "y")


@pytest.mark.parametrize("value", [None, 5, "", "  ", ["x"]])
def test_a_column_without_text_is_refused_by_name(value):
    with pytest.raises(UnparsableError, match="column 'q' holds"):
        text_of({"q": value}, "q")
    with pytest.raises(UnparsableError, match="no column 'question'; there are: q, r"):
        text_of({"q": 1, "r": 2}, "question")


def test_options_are_read_as_a_list_or_with_labels():
    assert choices_of(["x", " y "]) == choices_of({"text": ["x", "y"], "label": ["A", "B"]}) == ("x", "y")
    assert choices_of({"text": ["x", "y"]}) == ("x", "y")


@pytest.mark.parametrize(
    "value", [None, "xy", [], ["x"], ["x", ""], ["x", 1], {"text": ["x", "y"], "label": ["B", "A"]}, ["x"] * 27]
)
def test_impossible_options_are_refused(value):
    with pytest.raises(UnparsableError):
        choices_of(value)


@pytest.mark.parametrize(("value", "letter"), [("B", "B"), (" C ", "C"), (0, "A"), (2, "C")])
def test_the_right_option_is_a_letter_or_an_index(value, letter):
    assert letter_of(value, ("x", "y", "z")) == letter


@pytest.mark.parametrize("value", ["D", "b", "", "AB", 3, -1, True, None, 1.0])
def test_a_key_that_names_no_option_is_refused(value):
    with pytest.raises(UnparsableError, match="names none of the options A to C"):
        letter_of(value, ("x", "y", "z"))


def test_columns_have_the_names_of_most_data_sets():
    assert (Columns().question, Columns().answer) == ("question", "answer")
