"""The table ``TASKS``: where problems come from. ``prompts.py`` turns them into tokens."""

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
"""System prompt for tasks that are asked of instruct models, after the paper: reason in ``<think>``, answer in ``<answer>``."""


class LoadProblems(Protocol):
    """How a task gives the problems of one split."""

    def __call__(self, split: Split, *, count: int, seed: int, source: Source) -> Loaded:
        """Returns ``count`` generated problems, or all that the source has where the task reads rows, in a fixed order."""
        ...


@dataclass(frozen=True)
class Task:
    """An entry of ``TASKS``.

    Attributes:
        load: Gives the problems of a split.
        system_prompt: Put before every problem unless the configuration sets another; ``None`` puts none.
        generated: Whether problems are drawn from a generator: as many as asked for, and none in both splits.
        splits: The splits that the task has; ``("held_out",)`` is for evaluation alone.
        settings: Which of the source settings ``columns`` and ``options`` the task reads.
    """

    load: LoadProblems
    system_prompt: str | None
    generated: bool = False
    splits: tuple[Split, ...] = SPLITS
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadReport:
    """What became of the rows of one split; ``str()`` is the line to print.

    Attributes:
        split: ``"train"`` or ``"held_out"``.
        problems: How many problems are trained or evaluated on.
        available: How many could be read, of which ``problems`` are a choice.
        unparsable: The rows that could not be read, each with its id and what is wrong.
        duplicates: How many training problems were dropped because they are held out too.
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
    "arithmetic": Task(_arithmetic, None, generated=True, settings=("options",)),
    "gsm8k": Task(_from_rows("gsm8k", gsm8k.ORIGINS, gsm8k.read_question), THINK_ANSWER_PROMPT),
    "math": Task(_from_rows("math", hendrycks_math.ORIGINS, hendrycks_math.read_question), THINK_ANSWER_PROMPT),
    "sciknoweval_chemistry": Task(
        _from_rows("sciknoweval_chemistry", sciknoweval.ORIGINS, sciknoweval.read_question), THINK_ANSWER_PROMPT
    ),
    "amc23": Task(_from_rows("amc23", amc.ORIGINS, amc.read_question), THINK_ANSWER_PROMPT, splits=("held_out",)),
    "jsonl": Task(_from_rows("jsonl", {}, jsonl.read_question), THINK_ANSWER_PROMPT, settings=("columns",)),
}


def find_task(name: str) -> Task:
    """Returns an entry of ``TASKS``, or the task ``reasoning_gym:<dataset>``.

    Raises:
        ValueError: There is no such task or data set, or the package that generates it is not installed.
    """
    dataset = name.removeprefix(reasoning_gym.PREFIX)
    if dataset == name:
        return lookup(TASKS, name, "data.task", others=[f"{reasoning_gym.PREFIX}<dataset>"])
    reasoning_gym.check_dataset(dataset)
    load = partial(reasoning_gym.load_problems, dataset=dataset)
    return Task(load, THINK_ANSWER_PROMPT, generated=True, settings=("options",))


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
    """Loads the problems of a task; training problems, held-out problems and worked examples share none.

    Questions that a published data set has in both splits are dropped from training, and counted. A generator that draws one
    into both is at fault, which is an error.

    Args:
        name: Entry of ``TASKS``, or ``reasoning_gym:<dataset>``.
        train_problems: Most training problems; 0 takes all that the source has.
        held_out_problems: Most held-out problems; 0 takes all that the source has.
        seed: Seed of generation, and of the choice among more problems than asked for.
        source: Where the data is; ``None`` takes the task's own place.
        few_shot: Number of worked examples, taken out of the training problems.
        evaluation: Whether to load no training problems, but for the examples.

    Raises:
        ValueError: The task is unknown or does not read a setting; there is nothing to train or evaluate on; a problem repeats
            an id, has no gold answer, or was generated in both splits; or the source cannot be read.
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
