"""What a run leaves behind while it goes on: metrics.jsonl, rollouts.jsonl, the steps of its sinks and a live progress line.

The loop owns one :class:`RunLog` and hands it plain numbers and NumPy arrays after each step; the report reads the files back
with :func:`read_metrics` and :func:`read_rollouts`. Nothing here touches a device.

``metrics.jsonl`` holds one flat JSON object a step: ``step``, ``wall_seconds`` and the metrics by name. A number that is not
finite is written as ``null`` and counted under ``log/nonfinite``, a key that is absent when all are finite.

``rollouts.jsonl`` holds one JSON object a rollout: ``step``, ``group``, ``prompt_id``, ``index``, ``parts`` (reward parts by
name), ``total``, ``valid``, ``rank``, ``kept``, ``advantage`` (``null`` unless kept), ``length``, ``finished``, and ``text``
for the sampled few. The first rollout of a group that has any text also holds ``prompt`` and ``answer``.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from pods_jax.run.lines import Number, complete_lines, cut_after, json_line, parse_line, plain_number
from pods_jax.run.progress import ProgressLine
from pods_jax.run.rollouts import ROLLOUTS_FILE, RolloutRecords, rollout_rows
from pods_jax.run.sinks import RunFacts, Sinks

METRICS_FILE = "metrics.jsonl"


class RunLog:
    """Writes the record of a run; a context manager.

    A thread of its own writes, so that the next step need not wait. Call ``settle`` between logging step ``s`` and writing
    checkpoint ``s``: then whatever a resumed run finds beyond its checkpoint is cut off, and its files equal those of an
    uninterrupted run.

    Args:
        folder: The run folder; made if missing.
        total_steps: Steps of the whole run, for the progress line.
        resume_step: Step of the checkpoint that is continued; lines of later steps are cut off. ``None`` starts the files anew.
        texts_per_step: Completions whose text is kept at each step; -1 keeps all. Whole groups come first.
        progress: Show progress: one live line on a terminal, else a plain line every few seconds.
        sinks: Where metrics go besides the files: names of the SINKS table, or ``module:function``.
        name: Name of the run, for the sinks; that of the folder by default.
        config: The resolved configuration, for the sinks.
        enabled: False on every process but the first: nothing is read, written or shown.
        console: Where progress goes; standard output by default.

    Raises:
        ValueError: ``texts_per_step`` is below -1, or a sink is unknown or not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        resume_step: int | None = None,
        texts_per_step: int = 16,
        progress: bool = True,
        sinks: Sequence[str] = (),
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        enabled: bool = True,
        console: Console | None = None,
    ):
        if texts_per_step < -1:
            raise ValueError(f"log.texts_per_step={texts_per_step} must be -1 (all) or at least 0")
        self._enabled = enabled
        self._texts_per_step = texts_per_step
        self._last_step = -1 if resume_step is None else resume_step
        if not enabled:
            return
        self._writer = ThreadPoolExecutor(1, "run_log")
        self._writing: Future[None] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for file in (METRICS_FILE, ROLLOUTS_FILE):
            cut_after(folder / file, self._last_step)
        past = list(read_metrics(folder))
        self._metrics = (folder / METRICS_FILE).open("a", encoding="utf-8", newline="\n")
        self._rollouts = (folder / ROLLOUTS_FILE).open("a", encoding="utf-8", newline="\n")
        self._progress = ProgressLine(console or Console(), total_steps, max(self._last_step, 0)) if progress else None
        if self._progress:
            self._progress.recall(past)
        run = RunFacts(folder, name or folder.name, config or {}, self._last_step + 1)
        self._sinks = Sinks(sinks, run, self._progress.say if self._progress else Console(stderr=True, soft_wrap=True).print)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Ends the progress line and closes the files; called on leaving the context."""
        if not self._enabled:
            return
        try:
            self.settle()
        finally:
            self._close()

    def settle(self) -> None:
        """Waits until every logged step is on disk, and raises what went wrong in writing it."""
        self._settle_files()
        if self._enabled:
            self._sinks.settle()

    def _settle_files(self) -> None:
        if self._enabled and self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _close(self) -> None:
        self._writer.shutdown()
        self._sinks.close()
        if self._progress:
            self._progress.close()
        self._metrics.close()
        self._rollouts.close()

    def say(self, text: str) -> None:
        """Prints a line above the progress line; silent where progress is."""
        self._settle_files()
        if self._enabled and self._progress:
            self._progress.say(text)

    def log_step(
        self, step: int, metrics: Mapping[str, Number], *, wall_seconds: float, rollouts: RolloutRecords | None = None
    ) -> None:
        """Has one step written to the files and handed to the sinks; returns before it is, and waits for the step before.

        Args:
            step: Optimiser steps taken; 0 is the untrained policy. Must grow from call to call.
            metrics: Plain numbers by name (``reward/mean``, ``eval/accuracy``, ...).
            wall_seconds: The run's elapsed clock, interruptions excluded.
            rollouts: All rollouts of the step, or ``None`` (step 0).

        Raises:
            ValueError: The step does not grow, or a metric takes a reserved name.
            TypeError: A metric is not a plain number (a device array must be fetched first).
            OSError: The step before could not be written.
        """
        if not self._enabled:
            return
        if step <= self._last_step:
            raise ValueError(f"step={step} was logged already; the last logged step is {self._last_step}")
        if reserved := {"step", "wall_seconds", "log/nonfinite"} & metrics.keys():
            raise ValueError(f"metric names {sorted(reserved)} are reserved")
        row = {"step": step, "wall_seconds": round(wall_seconds, 3)}
        row |= {name: plain_number(value, name) for name, value in metrics.items()}
        if nonfinite := sum(value is None for value in row.values()):
            row["log/nonfinite"] = nonfinite
        self._last_step = step
        self._settle_files()
        self._writing = self._writer.submit(self._write, step, row, rollouts)

    def _write(self, step: int, row: Mapping[str, float | None], rollouts: RolloutRecords | None) -> None:
        rows = [] if rollouts is None else list(rollout_rows(step, rollouts, self._texts_per_step))
        self._rollouts.writelines(json_line(one) for one in rows)
        self._rollouts.flush()
        self._metrics.write(json_line(row))
        self._metrics.flush()
        self._sinks.log(step, row, rows)
        if self._progress:
            self._progress.show(row)


def read_metrics(folder: Path) -> Iterator[dict]:
    """Yields the rows of ``metrics.jsonl`` in order; a torn last line is left out.

    Raises:
        FileNotFoundError: The folder has no ``metrics.jsonl``.
    """
    for line in complete_lines(folder / METRICS_FILE):
        if (row := parse_line(line)) is not None:
            yield row
