import json
import sys
from types import SimpleNamespace

import pyarrow
import pytest
from pyarrow import parquet

from pods_jax.config.sections import DataConfig
from pods_jax.data.rows import Columns, Origin, Source, Split, make_source, read_rows

HUB: dict[Split, Origin] = {"train": Origin("org/set", "train", ("main",)), "held_out": Origin("org/set", "test", ("main",))}
ONE_SPLIT: dict[Split, Origin] = {"train": Origin("org/set", "test"), "held_out": Origin("org/set", "test")}
SPLITS: tuple[Split, ...] = ("train", "held_out")


def write(file, *names):
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"name": name} for name in names]
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)) + "\n")


def names(split, path, origins=HUB, **source):
    rows, divided = read_rows(split, source=Source(path=str(path), **source), origins=origins)
    return [row["name"] for row in rows], divided


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the Hub: records what is asked, and answers with one row."""
    asked = []

    def load_dataset(repository, subset, *, split, revision):
        asked.append((repository, subset, split, revision))
        if repository == "org/missing":
            raise FileNotFoundError("nothing of that name")
        return SimpleNamespace(to_list=lambda: [{"name": f"{repository}:{subset}:{split}"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train.jsonl", "test.jsonl"),
        ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
        ("main/train.jsonl", "main/test.parquet"),
        ("train/1.json", "test/1.json"),
    ],
)
def test_files_of_a_folder_belong_to_a_split_by_name(tmp_path, train, test):
    write(tmp_path / train, "a", "b")
    write(tmp_path / test, "c")
    assert names("train", tmp_path) == (["a", "b"], False)
    assert names("held_out", tmp_path) == (["c"], False)


def test_files_are_joined_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "train-1.jsonl", "b")
    write(tmp_path / "train-0.jsonl", "a")
    write(tmp_path / "training_notes.jsonl", "not of the split: another word")
    assert names("train", tmp_path)[0] == ["a", "b"]


def test_a_subset_is_a_folder_of_that_name(tmp_path):
    for subset in ("main", "socratic"):
        write(tmp_path / subset / "train.jsonl", subset)
    assert names("train", tmp_path)[0] == ["main"]
    assert names("train", tmp_path, subset="socratic")[0] == ["socratic"]


@pytest.mark.parametrize("file", ["own.jsonl", "folder/own.jsonl"])
def test_files_named_after_no_split_serve_both_and_must_be_divided(tmp_path, file):
    write(tmp_path / file, "a", "b")
    path = tmp_path / file.split("/")[0]
    assert names("train", path) == names("held_out", path) == (["a", "b"], True)


def test_a_single_file_named_after_a_split_is_that_split_alone(tmp_path):
    write(tmp_path / "test.jsonl", "a")
    assert names("held_out", tmp_path / "test.jsonl") == (["a"], False)
    with pytest.raises(ValueError, match=r"no file of the split 'train', only of 'test' \(test\.jsonl\)"):
        names("train", tmp_path / "test.jsonl")


def test_held_out_rows_of_another_place_leave_the_training_rows_undivided(tmp_path):
    write(tmp_path / "own.jsonl", "a")
    write(tmp_path / "other.jsonl", "b")
    held_out_path = str(tmp_path / "other.jsonl")
    assert names("train", tmp_path / "own.jsonl", held_out_path=held_out_path) == (["a"], False)
    assert names("held_out", tmp_path / "own.jsonl", held_out_path=held_out_path) == (["b"], False)


def test_a_task_of_one_split_takes_a_whole_file(tmp_path):
    write(tmp_path / "own.jsonl", "a")
    assert names("held_out", tmp_path / "own.jsonl", origins={"held_out": HUB["held_out"]}) == (["a"], False)


def test_split_names_can_be_others(tmp_path):
    write(tmp_path / "fit.jsonl", "a")
    write(tmp_path / "dev.jsonl", "b")
    assert names("train", tmp_path, train_split="fit", held_out_split="dev") == (["a"], False)
    assert names("held_out", tmp_path, train_split="fit", held_out_split="dev") == (["b"], False)


def test_a_task_that_the_hub_has_one_split_of_may_have_two_in_files(tmp_path):
    write(tmp_path / "train.jsonl", "a")
    write(tmp_path / "test.jsonl", "b")
    assert [names(split, tmp_path, origins=ONE_SPLIT) for split in SPLITS] == [(["a"], False), (["b"], False)]
    one = {"train_split": "test", "held_out_split": "test"}
    assert [names(split, tmp_path, origins=ONE_SPLIT, **one) for split in SPLITS] == [(["b"], True), (["b"], True)]


def test_json_may_hold_a_list_an_object_or_lines(tmp_path):
    (tmp_path / "train-0.json").write_text('[{"name": "a"},\n {"name": "b"}]')
    (tmp_path / "train-1.json").write_text('{\n"name": "c"\n}')
    (tmp_path / "train-2.json").write_text('{"name": "d"}\n{"name": "e"}')
    assert names("train", tmp_path)[0] == list("abcde")


def test_a_line_separator_within_a_text_ends_no_line(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"name": "a\u2028b"}\r\n\n{"name": "c"}', encoding="utf-8")
    assert names("train", tmp_path)[0] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": 1}\n{"name":', r"line 2 of '.*train\.jsonl' is not JSON"),
        ("[1]\n", r"row 0 of .* is list, not a JSON object"),
    ],
)
def test_broken_rows_are_refused_by_place(tmp_path, text, message):
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        names("train", tmp_path)


def test_a_folder_without_data_and_a_path_that_is_nothing_are_refused(tmp_path):
    (tmp_path / "train.txt").write_text("a")
    with pytest.raises(ValueError, match=r"data\.path='.*' holds no file that ends in \.jsonl, \.json, \.parquet"):
        names("train", tmp_path)
    with pytest.raises(ValueError, match=r"data\.path='.*/none' is no file, no folder and no id"):
        names("train", tmp_path / "none")
    with pytest.raises(ValueError, match=r"data\.held_out_path='a b' is no file"):
        names("train", tmp_path, held_out_path="a b")


def test_without_a_path_the_tasks_own_data_set_is_loaded_from_the_hub(hub):
    assert read_rows("train", source=Source(), origins=HUB) == ([{"name": "org/set:main:train"}], False)
    read_rows("held_out", source=Source(revision="v2"), origins=HUB)
    assert hub == [("org/set", "main", "train", None), ("org/set", "main", "test", "v2")]


def test_subsets_are_joined_and_one_can_be_chosen(hub):
    origins: dict[Split, Origin] = {"train": Origin("org/set", "train", ("a", "b")), "held_out": Origin("org/other", "test")}
    rows, _ = read_rows("train", source=Source(), origins=origins)
    assert [row["name"] for row in rows] == ["org/set:a:train", "org/set:b:train"]
    assert len(read_rows("train", source=Source(subset="b"), origins=origins)[0]) == 1


def test_a_revision_is_not_asked_of_another_repository(hub):
    origins: dict[Split, Origin] = {"train": Origin("org/set", "train"), "held_out": Origin("org/other", "test")}
    for split in SPLITS:
        read_rows(split, source=Source(revision="v2"), origins=origins)
    assert [revision for *_, revision in hub] == ["v2", None]


def test_a_data_set_with_one_split_must_be_divided(hub):
    assert [read_rows(split, source=Source(), origins=ONE_SPLIT)[1] for split in SPLITS] == [True, True]
    assert not read_rows("train", source=Source(train_split="train"), origins=ONE_SPLIT)[1]


def test_a_path_may_be_another_data_set_of_the_hub(hub):
    source = Source(path="me/mine", subset="s", held_out_split="validation")
    for split in SPLITS:
        read_rows(split, source=source, origins={})
    assert hub == [("me/mine", "s", "train", None), ("me/mine", "s", "validation", None)]


def test_what_the_hub_refuses_is_told_with_all_that_was_asked(hub):
    with pytest.raises(ValueError, match=r"'org/missing', subset None, split 'train', revision None cannot be loaded: nothing"):
        read_rows("train", source=Source(path="org/missing"), origins={})


def test_own_data_needs_a_path(hub):
    with pytest.raises(ValueError, match=r"data\.path must be set"):
        read_rows("train", source=Source(), origins={})


def test_real_datasets_objects_are_read(monkeypatch):
    import datasets

    made = datasets.Dataset.from_list([{"name": "a", "choices": {"text": ["x"], "label": ["A"]}}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    rows, _ = read_rows("train", source=Source(), origins=HUB)
    assert rows == [{"name": "a", "choices": {"text": ["x"], "label": ["A"]}}]


def test_the_source_is_gathered_from_the_configuration():
    data = DataConfig(
        path="p",
        held_out_path="h",
        subset="s",
        revision="r",
        train_split="t",
        held_out_split="o",
        question_column="q",
        answer_column="a",
        solution_column="w",
        choices_column="c",
        answer_kind="text",
        options=["k=1"],
    )
    assert make_source(data) == Source("p", "h", "s", "r", "t", "o", Columns("q", "a", "w", "c", "text"), ("k=1",))
    assert make_source(DataConfig()) == Source()
