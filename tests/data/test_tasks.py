import pytest

from pods_jax.data.tasks import TASKS, Task, find_task, load_splits, load_task
from pods_jax.types import Problem


def problem(problem_id, question="1+1", answer="2"):
    return Problem(problem_id, ({"role": "user", "content": question},), answer, "made_up")


@pytest.fixture
def made_up(monkeypatch):
    splits = {"train": [problem("a", "1+1")], "held_out": [problem("b", "1+2")]}
    task = Task(load=lambda split, *, count, seed, path: splits[split], system_prompt=None, description="For tests.")
    monkeypatch.setitem(TASKS, "made_up", task)
    return splits


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_yields_disjoint_reproducible_problems_of_its_name(name):
    splits = load_splits(name, train_problems=50, held_out_problems=20, seed=3)
    assert (len(splits.train), len(splits.held_out)) == (50, 20)
    assert {p.task for p in splits.train + splits.held_out} == {name}
    assert splits.train == load_task(name, "train", count=50, seed=3)
    assert find_task(name).description


def test_an_unknown_task_is_refused_with_the_nearest_and_all_names():
    with pytest.raises(ValueError, match=r"data\.task='arithmetics' .*did you mean 'arithmetic'\? valid: arithmetic"):
        load_task("arithmetics", "train", count=1, seed=0)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="valid: train, held_out"):
        load_task("arithmetic", "test", count=1, seed=0)  # pyright: ignore[reportArgumentType]


def test_different_splits_pass(made_up):
    assert load_splits("made_up", train_problems=0, held_out_problems=0, seed=0).train == made_up["train"]


@pytest.mark.parametrize(("twin", "name"), [(problem("b", "5+5"), "b"), (problem("c", " 1+2\n"), "b")])
def test_an_id_or_a_question_in_both_splits_is_refused(made_up, twin, name):
    made_up["train"].append(twin)
    with pytest.raises(ValueError, match=f"training problem {twin.id} .* is held out too, as {name}"):
        load_splits("made_up", train_problems=0, held_out_problems=0, seed=0)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([], "has no train problem"),
        ([problem("a"), problem("a", "2+2")], "id a stands twice"),
        ([problem("a", answer=" ")], "problem a .* has no gold answer"),
    ],
)
def test_unusable_problems_are_refused(made_up, train, message):
    made_up["train"][:] = train
    with pytest.raises(ValueError, match=message):
        load_task("made_up", "train", count=0, seed=0)
