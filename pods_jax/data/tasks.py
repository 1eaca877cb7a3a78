"""The table of tasks: where problems come from. The data layer's first stage; prompts.py turns problems into tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from pods_jax.data import amc, arithmetic, gsm8k, hendrycks_math, jsonl, reasoning_gym, sciknoweval
from pods_jax.data.examples import take_examples
from pods_jax.data.questions import Loaded, ReadQuestion, load_questions
from pods_jax.data.rows import Columns, Origin, Source, Split
from pods_jax.lookup import lookup
from pods_jax.problem import Problem

SPLITS: tuple[Split, ...] = ("train", "held_out")
SHOWN_IDS = 3

THINK_ANSWER_PROMPT = (
    "Solve the problem you are given. Reason first, step by step, between <think> and </think>; "
    "then write nothing but the final answer between <answer> and </answer>."
)
"""System prompt of the paper's set-up (reason in ``<think>``, answer in ``<answer>``), for tasks asked of instruct models."""


class LoadProblems(Protocol):
    """How a task yields the problems of one split."""

    def __call__(self, split: Split, *, count: int, seed: int, source: Source) -> Loaded:
        """Return ``count`` generated problems, or all that the source has where a task reads rows; always in the same order."""
        ...


@dataclass(frozen=True)
class Task:
    """One entry of ``TASKS``.

    Attributes:
        load: Yields the problems of a split.
        system_prompt: Put before every problem unless the configuration sets another; ``None`` puts none.
        description: One line for people.
        generated: Problems are drawn from a generator: as many as asked for, and none of both splits.
        splits: What the task has; ``("held_out",)`` is for evaluation alone.
        settings: Which of the source settings ``columns`` and ``options`` the task reads.
    """

    load: LoadProblems
    system_prompt: str | None
    description: str
    generated: bool = False
    splits: tuple[Split, ...] = SPLITS
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadReport:
    """What became of one split's rows; ``str()`` is the line to print.

    Attributes:
        split: ``"train"`` or ``"held_out"``.
        problems: Problems to train or evaluate on.
        available: Problems that could be read, of which ``problems`` are a choice.
        unparsable: Rows that could not be read, each its id and what is wrong.
        duplicates: Training problems dropped because they are held out too.
    """

    split: Split
    problems: int
    available: int
    unparsable: tuple[str, ...] = ()
    duplicates: int = 0

    def __str__(self) -> str:
        text = f"{self.split.replace('_', '-')}: {self.problems:,} of {self.available:,} problems"
        if self.duplicates:
            text += f"; {self.duplicates:,} dropped that are held out too"
        if self.unparsable:
            more = ", ..." if len(self.unparsable) > SHOWN_IDS else ""
            text += f"; {len(self.unparsable):,} rows unparsable ({', '.join(self.unparsable[:SHOWN_IDS])}{more})"
        return text


@dataclass(frozen=True)
class Splits:
    """The problems of a run: no question stands in both splits, and the worked examples stand in neither."""

    train: list[Problem]
    held_out: list[Problem]
    examples: list[Problem] = field(default_factory=list)
    reports: list[LoadReport] = field(default_factory=list)


def _arithmetic(split: Split, *, count: int, seed: int, source: Source) -> Loaded:
    options = reasoning_gym.read_options(source.options)
    if unknown := options.keys() - {"times_share"}:
        raise ValueError(f"data.options has {min(unknown)!r}; data.task='arithmetic' has times_share alone")
    return Loaded(arithmetic.load_problems(split, count=count, seed=seed, **options))


def _from_rows(task: str, origins: Mapping[Split, Origin], read: ReadQuestion) -> LoadProblems:
    def load(split: Split, *, count: int, seed: int, source: Source) -> Loaded:
        del count, seed
        return load_questions(split, task=task, source=source, origins=origins, read=read)

    return load


TASKS: dict[str, Task] = {
    "arithmetic": Task(
        load=_arithmetic,
        system_prompt=None,
        description="Chains of + - * evaluated from left to right modulo 10, generated; made for the bundled models.",
        generated=True,
        settings=("options",),
    ),
    "gsm8k": Task(
        load=_from_rows("gsm8k", gsm8k.ORIGINS, gsm8k.read_question),
        system_prompt=THINK_ANSWER_PROMPT,
        description="Grade-school word problems with whole-number answers.",
    ),
    "math": Task(
        load=_from_rows("math", hendrycks_math.ORIGINS, hendrycks_math.read_question),
        system_prompt=THINK_ANSWER_PROMPT,
        description="Competition problems with LaTeX answers; MATH-500 is held out.",
    ),
    "sciknoweval_chemistry": Task(
        load=_from_rows("sciknoweval_chemistry", sciknoweval.ORIGINS, sciknoweval.read_question),
        system_prompt=THINK_ANSWER_PROMPT,
        description="Chemistry at SciKnowEval's level 3: four-choice questions, and equations to balance.",
    ),
    "amc23": Task(
        load=_from_rows("amc23", amc.ORIGINS, amc.read_question),
        system_prompt=THINK_ANSWER_PROMPT,
        description="Forty competition problems of AMC 2023, for evaluation alone.",
        splits=("held_out",),
    ),
    "jsonl": Task(
        load=_from_rows("jsonl", {}, jsonl.read_question),
        system_prompt=THINK_ANSWER_PROMPT,
        description="Your own file, folder or Hub data set; data.question_column and its like name the columns.",
        settings=("columns",),
    ),
}


def find_task(name: str) -> Task:
    """Look a task up: an entry of ``TASKS``, or ``reasoning_gym:<dataset>``.

    Raises:
        ValueError: No such task, where the message names the nearest and all valid names; or the package that generates it is
            not installed, or has no such data set.
    """
    dataset = name.removeprefix(reasoning_gym.PREFIX)
    if dataset == name:
        return lookup(TASKS, name, "data.task", others=[f"{reasoning_gym.PREFIX}<dataset>"])
    reasoning_gym.check_dataset(dataset)
    return Task(
        load=partial(reasoning_gym.load_problems, dataset=dataset),
        system_prompt=THINK_ANSWER_PROMPT,
        description=f"Problems and scorer of reasoning-gym's {dataset}.",
        generated=True,
        settings=("options",),
    )


def load_splits(
    name: str,
    *,
    train_problems: int,
    held_out_problems: int,
    seed: int,
    source: Source | None = None,
    few_shot: int = 0,
    evaluation: bool = False,
) -> Splits:
    """Load the problems of a task, so that training, held-out problems and worked examples share none.

    Questions that a published data set has in both splits are dropped from training, and counted. A generator that draws one
    into both is at fault, which is an error.

    Args:
        name: Entry of ``TASKS``, or ``reasoning_gym:<dataset>``.
        train_problems: Most training problems; 0 takes all that the source has.
        held_out_problems: Most held-out problems; 0 takes all that the source has.
        seed: Seed of generation, and of the choice among more problems than asked for.
        source: Where the data is; ``None`` takes the task's own place.
        few_shot: Worked examples, taken out of the training problems.
        evaluation: Load no training problems, but for the examples.

    Raises:
        ValueError: Unknown task; a setting it does not read; nothing to train or evaluate on; a repeated id; a problem without
            a gold answer; a generated problem in both splits; or what the source raises.
    """
    task, source = find_task(name), source or Source()
    _check_settings(name, task, source)
    train_wanted = not evaluation or few_shot > 0
    if train_wanted and "train" not in task.splits:
        cause = f"data.few_shot={few_shot} has nothing to take examples from" if evaluation else "it cannot be trained on"
        raise ValueError(f"data.task={name!r} is for evaluation alone, without training problems: {cause}")
    held_out = _load(name, task, "held_out", held_out_problems, seed, source)
    chosen_held_out = _choose(held_out.problems, held_out_problems, seed)
    reports = [_report("held_out", chosen_held_out, held_out)]
    if not train_wanted:
        return Splits([], chosen_held_out, [], reports)

    # The first few of a generator, of which there are always as many, or some of all rows: in both cases the same examples.
    count = few_shot if evaluation else train_problems + few_shot if train_problems else 0
    loaded = _load(name, task, "train", count, seed, source)
    distinct = _without_held_out(name, task, loaded.problems, held_out.problems)
    if task.generated:
        examples, rest = distinct[:few_shot], distinct[few_shot:]
    else:
        examples, rest = take_examples(distinct, few_shot)
    train = [] if evaluation else _choose(rest, train_problems, seed)
    if not train and not evaluation:
        raise ValueError(f"data.task={name!r}: all {len(loaded.problems)} training problems are held out, or worked examples")
    duplicates = len(loaded.problems) - len(distinct)
    return Splits(train, chosen_held_out, examples, [_report("train", train, loaded, duplicates), *reports])


def _report(split: Split, chosen: list[Problem], loaded: Loaded, duplicates: int = 0) -> LoadReport:
    return LoadReport(split, len(chosen), len(loaded.problems), tuple(loaded.unparsable), duplicates)


def _load(name: str, task: Task, split: Split, count: int, seed: int, source: Source) -> Loaded:
    loaded = task.load(split, count=count, seed=seed, source=source)
    if not loaded.problems:
        why = f"; of {len(loaded.unparsable)} unparsable rows the first is {loaded.unparsable[0]}" if loaded.unparsable else ""
        raise ValueError(f"data.task={name!r} has no {split} problem{why}")
    seen: set[str] = set()
    for problem in loaded.problems:
        if not problem.answer.strip() and not problem.extra:
            raise ValueError(f"problem {problem.id} of data.task={name!r} has no gold answer")
        if problem.id in seen:
            raise ValueError(f"id {problem.id} stands twice in the {split} problems of data.task={name!r}")
        seen.add(problem.id)
    return loaded


def _without_held_out(name: str, task: Task, train: list[Problem], held_out: list[Problem]) -> list[Problem]:
    ids = {problem.id for problem in held_out}
    questions = {_question(problem): problem.id for problem in held_out}
    kept = []
    for problem in train:
        twin = problem.id if problem.id in ids else questions.get(_question(problem))
        if twin is None:
            kept.append(problem)
        elif task.generated:
            raise ValueError(f"training problem {problem.id} of data.task={name!r} is held out too, as {twin}")
    return kept


def _question(problem: Problem) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], " ".join(message["content"].split())) for message in problem.messages)


def _choose(problems: list[Problem], count: int, seed: int) -> list[Problem]:
    if not 0 < count < len(problems):
        return problems
    chosen = np.random.default_rng(seed).choice(len(problems), size=count, replace=False)
    return [problems[index] for index in np.sort(chosen)]


def _check_settings(name: str, task: Task, source: Source) -> None:
    if source.columns != Columns() and "columns" not in task.settings:
        raise ValueError(f"data.*_column and data.answer_kind are for data.task=jsonl; data.task={name!r} knows its columns")
    if source.options and "options" not in task.settings:
        raise ValueError(
            f"data.options={list(source.options)} is for reasoning_gym tasks and arithmetic; data.task={name!r} has none"
        )
    place = source.path or source.held_out_path
    if place and task.generated:
        raise ValueError(f"data.path={place!r}: data.task={name!r} generates its problems and reads no file")
