"""Timing in turns, and the form in which every benchmark prints: a table, then one JSON line."""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Sample:
    """One measurement. CPU seconds are those of all threads of the process: they barely notice a busy machine."""

    seconds: float
    cpu_seconds: float


class Stopwatch:
    """Seconds of the named parts of one run."""

    def __init__(self):
        self.samples: dict[str, Sample] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Adds what is spent inside to ``part``."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        before = self.samples.get(part, Sample(0.0, 0.0))
        self.samples[part] = Sample(before.seconds + time.perf_counter() - wall, before.cpu_seconds + time.process_time() - cpu)


@dataclass(frozen=True)
class Spread:
    """Medians of repeated samples, and the fastest and slowest."""

    seconds: float
    seconds_min: float
    seconds_max: float
    cpu_seconds: float
    cpu_seconds_min: float
    cpu_seconds_max: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Spread":
        """The spread of at least one sample."""
        wall, cpu = [s.seconds for s in samples], [s.cpu_seconds for s in samples]
        return cls(statistics.median(wall), min(wall), max(wall), statistics.median(cpu), min(cpu), max(cpu))


Run = Callable[[Stopwatch], Any]
WHOLE = "whole"


def alternate(runs: Mapping[str, Run], repeats: int) -> dict[str, dict[str, Spread]]:
    """Measures several runs in turns, A B A B, after all have been warmed up by ``warm_up``.

    Args:
        runs: By name; each run times its own parts on the stopwatch and may return device arrays, which are waited for.
        repeats: Turns.

    Returns:
        For each run, the spread of each of its parts and of the ``whole``.
    """
    samples: dict[str, dict[str, list[Sample]]] = {name: {} for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            for part, sample in _once(run).items():
                samples[name].setdefault(part, []).append(sample)
    return {name: {part: Spread.of(each) for part, each in parts.items()} for name, parts in samples.items()}


def warm_up(runs: Mapping[str, Run]) -> dict[str, float]:
    """Seconds of each run's first call, compilation included."""
    return {name: _once(run)[WHOLE].seconds for name, run in runs.items()}


def _once(run: Run) -> dict[str, Sample]:
    inner, outer = Stopwatch(), Stopwatch()
    with outer(WHOLE):
        jax.block_until_ready(run(inner))
    return inner.samples | outer.samples


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, first column to the left, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=120, highlight=False).print(table)


SPREAD_COLUMNS = ("wall s", "min", "max", "CPU s", "min", "max")


def spread_cells(spread: Spread) -> list[str]:
    """Cells of the columns ``SPREAD_COLUMNS``."""
    wall = (spread.seconds, spread.seconds_min, spread.seconds_max)
    cpu = (spread.cpu_seconds, spread.cpu_seconds_min, spread.cpu_seconds_max)
    return [f"{x:.4f}" for x in (*wall, *cpu)]


def print_json(result: Mapping[str, Any]) -> None:
    """Prints the result as the one JSON line, numbers rounded to six significant digits."""
    print(json.dumps(_rounded(result)), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
