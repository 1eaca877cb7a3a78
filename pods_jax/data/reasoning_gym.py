"""Generated problems of the optional package reasoning-gym, for the task ``reasoning_gym:<dataset>``.

A problem carries ``{"dataset", "options", "entry"}`` as JSON, from which the verifier rebuilds the package's scorer in its
worker process (``rewards/gym.py``).
"""

import importlib
import json
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

from pods_jax.data.questions import Loaded
from pods_jax.data.rows import Source, Split
from pods_jax.data.splitting import HELD_OUT_SHARE, is_held_out, without_order
from pods_jax.lookup import lookup
from pods_jax.problem import Problem

PREFIX = "reasoning_gym:"
KIND = "reasoning_gym"
SPARE_DRAWS = 1000
"""Draws beyond twice the expected number, after which a generator of few different questions is given up."""


def check_dataset(name: str) -> None:
    """Refuses a data set that the package does not have.

    Raises:
        ValueError: There is no such data set, or the package is not installed.
    """
    _package()  # says what to install where it is missing
    datasets = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    lookup(dict.fromkeys(datasets), name, f"data.task='{PREFIX}{name}': dataset")


def load_problems(split: Split, *, dataset: str, count: int, seed: int, source: Source) -> Loaded:
    """Generates different problems of one split, the same ones for the same seed and options.

    The text of a question decides whether it is held out (``is_held_out``). Questions that differ in the order of summands and
    factors alone count as one (``without_order``), and the first is kept. When the generator has no more different questions,
    fewer come than asked for. A problem whose own gold answer does not get the full score, once its entry has been through
    JSON, is reported as unparsable.

    Args:
        split: ``"train"`` or ``"held_out"``.
        dataset: The package's name of the data set.
        count: How many, at least 1.
        seed: The package's seed.
        source: Its ``options`` are the settings of the data set.

    Raises:
        ValueError: The package refuses the options, or ``count`` is 0.
    """
    if count < 1:
        raise ValueError(f"{count} {split} problems asked of {PREFIX}{dataset}; its problems have no end, so ask for a number")
    options = read_options(source.options)
    share = HELD_OUT_SHARE if split == "held_out" else 1 - HELD_OUT_SHARE
    generated = _create(dataset, seed=seed, size=int(2 * count / share) + SPARE_DRAWS, options=options)
    loaded, seen = Loaded([]), set()
    for index in range(generated.size):
        entry = generated[index]
        question = without_order(entry["question"].strip())
        if question in seen or is_held_out(question) != (split == "held_out"):
            continue
        seen.add(question)
        problem = _problem(f"{PREFIX}{dataset}/{split}/{index}", dataset, options, entry)
        if problem is not None and _gold_scores(generated, problem):
            loaded.problems.append(problem)
        else:
            loaded.unparsable.append(f"{PREFIX}{dataset}/{split}/{index}: its entry does not survive JSON")
        if len(seen) == count:
            break
    return loaded


def read_options(options: Sequence[str]) -> dict[str, Any]:
    """Reads ``key=value`` settings, with each value as JSON, or as a text where it is none.

    Raises:
        ValueError: A setting has no key or no ``=``, or a key is given twice.
    """
    read: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not (key.strip() and equals) or key.strip() in read:
            raise ValueError(f"data.options has {option!r}; each must be key=value, and each key once")
        try:
            read[key.strip()] = json.loads(value)
        except ValueError:
            read[key.strip()] = value.strip()
    return read


@cache
def _package() -> ModuleType:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ValueError(
            f"data.task={PREFIX}... needs the package reasoning-gym: pip install 'pods_jax[reasoning-gym]'"
        ) from error


def _create(dataset: str, *, seed: int, size: int, options: dict[str, Any]) -> Any:
    try:
        return _package().create_dataset(dataset, seed=seed, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning_gym refuses data.options={options} for {dataset!r}: {error}") from error


def _problem(problem_id: str, dataset: str, options: dict[str, Any], entry: dict[str, Any]) -> Problem | None:
    try:
        extra = json.dumps({"dataset": dataset, "options": options, "entry": entry})
    except (TypeError, ValueError):
        return None
    return Problem(
        id=problem_id,
        messages=({"role": "user", "content": entry["question"].strip()},),
        answer="" if entry["answer"] is None else str(entry["answer"]),  # some data sets have a scorer and no answer
        task=PREFIX + dataset,
        answer_kind=KIND,
        extra=extra,
    )


def _gold_scores(generated: Any, problem: Problem) -> bool:
    return not problem.answer or generated.score_answer(problem.answer, json.loads(problem.extra)["entry"]) >= 1.0
