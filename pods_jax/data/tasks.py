"""The table of tasks: where problems come from. The data layer's first stage; prompts.py turns problems into tokens."""

import difflib
from dataclasses import dataclass
from typing import Literal, Protocol

from pods_jax.data import arithmetic
from pods_jax.types import Problem

Split = Literal["train", "held_out"]

THINK_ANSWER_PROMPT = (
    "Solve the problem you are given. Reason first, step by step, between <think> and </think>; "
    "then write nothing but the final answer between <answer> and </answer>."
)
"""System prompt of the paper's set-up (reason in ``<think>``, answer in ``<answer>``), for tasks asked of instruct models."""


class LoadProblems(Protocol):
    """How a task yields the problems of one split; ``count`` 0 takes all that the source has."""

    def __call__(self, split: Split, *, count: int, seed: int, path: str | None) -> list[Problem]:
        """Return the problems, the same ones in the same order for the same arguments."""
        ...


@dataclass(frozen=True)
class Task:
    """One entry of ``TASKS``.

    Attributes:
        load: Yields the problems of a split.
        system_prompt: Put before every problem unless the configuration sets another; ``None`` puts none.
        description: One line for people.
    """

    load: LoadProblems
    system_prompt: str | None
    description: str


@dataclass(frozen=True)
class Splits:
    """The problems of a run; no question stands in both."""

    train: list[Problem]
    held_out: list[Problem]


TASKS: dict[str, Task] = {
    "arithmetic": Task(
        load=arithmetic.load_problems,
        system_prompt=None,
        description="Chains of + - * evaluated from left to right modulo 10, generated; made for the bundled model.",
    ),
}


def find_task(name: str) -> Task:
    """Look a task up.

    Raises:
        ValueError: No such task; the message names the nearest and all valid names.
    """
    if name in TASKS:
        return TASKS[name]
    near = difflib.get_close_matches(name, TASKS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"data.task={name!r} is no task; {hint}valid: {', '.join(TASKS)}")


def load_task(name: str, split: Split, *, count: int, seed: int, path: str | None = None) -> list[Problem]:
    """Load one split of a task.

    Args:
        name: Entry of ``TASKS``.
        split: ``"train"`` or ``"held_out"``.
        count: Number of problems; 0 takes all that the source has.
        seed: Seed of generation, or of the choice among more problems than asked for.
        path: Local file or folder of the data, where the task reads any.

    Raises:
        ValueError: Unknown task or split, no problem, a repeated id, or a problem without a gold answer.
    """
    task = find_task(name)
    if split not in ("train", "held_out"):
        raise ValueError(f"split {split!r} does not exist; valid: train, held_out")
    problems = task.load(split, count=count, seed=seed, path=path)
    _check_problems(name, split, problems)
    return problems


def load_splits(name: str, *, train_problems: int, held_out_problems: int, seed: int, path: str | None = None) -> Splits:
    """Load training and held-out problems of a task, and prove that they share none.

    Raises:
        ValueError: As ``load_task``; or an id or a question stands in both splits.
    """
    train = load_task(name, "train", count=train_problems, seed=seed, path=path)
    held_out = load_task(name, "held_out", count=held_out_problems, seed=seed, path=path)
    _check_disjoint(name, train, held_out)
    return Splits(train, held_out)


def _check_problems(name: str, split: str, problems: list[Problem]) -> None:
    if not problems:
        raise ValueError(f"data.task={name!r} has no {split} problem")
    seen: set[str] = set()
    for problem in problems:
        if not problem.answer.strip():
            raise ValueError(f"problem {problem.id} of data.task={name!r} has no gold answer")
        if problem.id in seen:
            raise ValueError(f"id {problem.id} stands twice in the {split} problems of data.task={name!r}")
        seen.add(problem.id)


def _check_disjoint(name: str, train: list[Problem], held_out: list[Problem]) -> None:
    ids = {problem.id for problem in held_out}
    questions = {_question(problem): problem.id for problem in held_out}
    for problem in train:
        twin = problem.id if problem.id in ids else questions.get(_question(problem))
        if twin is not None:
            raise ValueError(f"training problem {problem.id} of data.task={name!r} is held out too, as {twin}")


def _question(problem: Problem) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"].strip()) for message in problem.messages)
