import json

import pytest

from pods_jax.data.questions import Loaded
from pods_jax.data.rows import Columns, Source
from pods_jax.data.tasks import TASKS, LoadReport, Task, find_task, load_splits
from pods_jax.problem import Problem

GENERATED = sorted(name for name, task in TASKS.items() if task.generated)
READ = sorted(set(TASKS) - set(GENERATED))
ROWS = {
    "gsm8k": lambda i: {"question": f"{i} + 1?", "answer": f"So {i + 1}.\n#### {i + 1}"},
    "math": lambda i: {"problem": f"${i} + 1$?", "solution": rf"$\boxed{{{i + 1}}}$"},
    "sciknoweval_chemistry": lambda i: {
        "question": f"How heavy is {i}?",
        "type": "mcq-4-choices",
        "domain": "Chemistry",
        "details": {"level": "L3"},
        "answerKey": "B",
        "choices": {"text": list("wxyz"), "label": list("ABCD")},
    },
    "amc23": lambda i: {"question": f"{i} + 1?", "answer": i + 1.0},
    "jsonl": lambda i: {"question": f"{i} + 1?", "answer": str(i + 1)},
}


def problem(problem_id, question="1+1", answer="2"):
    return Problem(problem_id, ({"role": "user", "content": question},), answer, "made_up")


def load(name="made_up", train_problems=0, held_out_problems=0, seed=0, **settings):
    return load_splits(name, train_problems=train_problems, held_out_problems=held_out_problems, seed=seed, **settings)


@pytest.fixture
def made_up(monkeypatch):
    """Splits of a task for tests, to change; a second task generates the same."""
    splits = {"train": [problem("a", "1+1")], "held_out": [problem("b", "1+2")]}

    def load(split, *, count, seed, source):
        return Loaded(splits[split], [f"row {i}: broken" for i in range(5)])

    monkeypatch.setitem(TASKS, "made_up", Task(load, None))
    monkeypatch.setitem(TASKS, "generated", Task(load, None, generated=True))
    return splits


def write(folder, name, train, held_out):
    for split, numbers in (("train", train), ("test", held_out)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(ROWS[name](i)) + "\n" for i in numbers))
    return Source(path=str(folder))


@pytest.mark.parametrize("name", GENERATED)
def test_every_generated_task_yields_disjoint_reproducible_problems_of_its_name(name):
    splits = load(name, 50, 20, seed=3)
    assert (len(splits.train), len(splits.held_out)) == (50, 20)
    assert {p.task for p in splits.train + splits.held_out} == {name}
    assert splits == load(name, 50, 20, seed=3)
    assert splits.train[:30] == load(name, 30, 20, seed=3).train


def test_every_task_that_reads_rows_is_tried_here():
    assert set(READ) == set(ROWS)


@pytest.mark.parametrize("name", READ)
def test_every_task_reads_rows_into_problems_of_its_name(name, tmp_path):
    evaluation = "train" not in TASKS[name].splits
    splits = load(name, source=write(tmp_path, name, range(40), range(40, 60)), evaluation=evaluation)
    problems = splits.train + splits.held_out
    assert [p.id for p in splits.held_out] == [f"{name}/held_out/{i}" for i in range(20)]
    assert len(splits.train) == (0 if evaluation else 40)
    assert {p.task for p in problems} == {name}
    assert all(p.answer and p.answer_kind != "exact" for p in problems)
    assert len({p.messages[0]["content"] for p in problems}) == len(problems)
    assert find_task(name).system_prompt


@pytest.mark.parametrize("name", [name for name in READ if "train" in TASKS[name].splits])
def test_questions_of_both_published_splits_are_dropped_from_training_and_counted(name, tmp_path):
    splits = load(name, source=write(tmp_path, name, range(10), range(7, 20)))
    assert len(splits.train) == 7
    assert len(splits.held_out) == 13
    assert [(r.split, r.problems, r.available, r.duplicates) for r in splits.reports] == [
        ("train", 7, 10, 3),
        ("held_out", 13, 13, 0),
    ]


def test_duplicates_are_sought_among_all_held_out_problems_not_those_chosen(tmp_path):
    splits = load("gsm8k", source=write(tmp_path, "gsm8k", range(10), range(5, 100)), held_out_problems=1)
    assert (len(splits.train), len(splits.held_out)) == (5, 1)


def test_fewer_problems_are_chosen_by_the_seed_and_kept_in_order(tmp_path):
    source = write(tmp_path, "gsm8k", range(100), range(100, 200))
    first, again, other = (load("gsm8k", 20, 10, seed=seed, source=source) for seed in (0, 0, 1))
    assert first == again
    assert first.train != other.train
    numbers = [int(p.id.split("/")[-1]) for p in first.train]
    assert numbers == sorted(numbers)
    assert len(numbers) == 20
    assert len(load("gsm8k", 1000, 1000, source=source).train) == 100


def test_worked_examples_come_from_training_alone_and_are_the_same_for_any_seed_and_count(tmp_path):
    source = write(tmp_path, "gsm8k", range(100), range(95, 150))
    cases = [load("gsm8k", count, seed=seed, source=source, few_shot=4) for count, seed in ((0, 0), (20, 1))]
    cases.append(load("gsm8k", source=source, few_shot=4, evaluation=True))
    assert {tuple(p.id for p in case.examples) for case in cases} == {tuple(f"gsm8k/train/{i}" for i in (0, 23, 47, 71))}
    for case in cases:
        assert not {p.id for p in case.examples} & {p.id for p in case.train}
        assert not {p.messages[0]["content"] for p in case.examples} & {p.messages[0]["content"] for p in case.held_out}
    assert [len(case.train) for case in cases] == [91, 20, 0]


def test_evaluation_reads_no_training_rows(made_up):
    made_up["train"][:] = []
    assert load(evaluation=True).held_out == made_up["held_out"]


def test_an_unknown_task_is_refused_with_the_nearest_and_all_names():
    with pytest.raises(
        ValueError, match=r"data\.task='arithmetics' .*did you mean 'arithmetic'\? valid: arithmetic, .*gym:<dataset>"
    ):
        load("arithmetics", 1, 1)


def test_different_splits_pass_and_unparsable_rows_are_shown(made_up):
    splits = load()
    assert splits.train == made_up["train"]
    assert str(splits.reports[0]) == (
        "train: 1 of 1 problems; 5 rows unparsable (row 0: broken, row 1: broken, row 2: broken, ...)"
    )
    assert str(LoadReport("held_out", 1000, 2000, duplicates=3)) == (
        "held-out: 1,000 of 2,000 problems; 3 dropped that are held out too"
    )


@pytest.mark.parametrize(("twin", "name"), [(problem("b", "5+5"), "b"), (problem("c", " 1+2\n"), "b")])
def test_an_id_or_a_question_in_both_generated_splits_is_refused(made_up, twin, name):
    made_up["train"].append(twin)
    with pytest.raises(ValueError, match=f"training problem {twin.id} .* is held out too, as {name}"):
        load("generated", 2, 1)
    assert load().train == made_up["train"][:1]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([], "has no train problem; of 5 unparsable rows the first is row 0: broken"),
        ([problem("a"), problem("a", "2+2")], "id a stands twice"),
        ([problem("a", answer=" ")], "problem a .* has no gold answer"),
        ([problem("b")], "all 1 training problems are held out, or worked examples"),
    ],
)
def test_unusable_problems_are_refused(made_up, train, message):
    made_up["train"][:] = train
    with pytest.raises(ValueError, match=message):
        load()


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("gsm8k", Source(columns=Columns(question="q")), r"data\.\*_column .* data\.task='gsm8k' knows its columns"),
        ("gsm8k", Source(options=("a=1",)), r"data\.options=\['a=1'\] is for reasoning_gym tasks"),
        ("arithmetic", Source(path="x"), r"data\.path='x': data\.task='arithmetic' generates"),
        ("arithmetic", Source(held_out_path="x"), r"data\.path='x': data\.task='arithmetic' generates"),
    ],
)
def test_settings_that_a_task_does_not_read_are_refused(name, source, message):
    with pytest.raises(ValueError, match=message):
        load(name, 5, 5, source=source)
