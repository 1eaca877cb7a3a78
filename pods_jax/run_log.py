"""What a run leaves behind while it goes on: metrics.jsonl, rollouts.jsonl, TensorBoard events and a live progress line.

``loop.py`` owns one :class:`RunLog` and hands it plain numbers and NumPy arrays after each step; ``report.py`` reads the files
back with :func:`read_metrics` and :func:`read_rollouts`. Nothing here touches a device.

``metrics.jsonl`` holds one flat JSON object a step: ``step``, ``wall_seconds`` and the metrics by name. A number that is not
finite is written as ``null`` and counted under ``log/nonfinite``, a key that is absent when all are finite.

``rollouts.jsonl`` holds one JSON object a rollout: ``step``, ``group``, ``prompt_id``, ``index``, ``parts`` (reward parts by
name), ``total``, ``valid``, ``rank``, ``kept``, ``advantage`` (``null`` unless kept), ``length``, ``finished``, and ``text``
for the sampled few. The first rollout of a group that has any text also holds ``prompt`` and ``answer``.
"""

import json
import math
import re
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Bool, Float, Int
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from tensorboardX import SummaryWriter

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
PLAIN_LINE_SECONDS = 5.0
ETA_STEPS = 20

Number = bool | int | float | np.generic | np.ndarray


@dataclass(frozen=True)
class RolloutRecords:
    """All rollouts of one step, on the host.

    Attributes:
        prompt_id_P: Problem id of each group.
        prompt_P: Prompt text of each group, as a reader should see it.
        answer_P: Gold answer of each group.
        texts_PN: Completion text of each rollout.
        rewards_PN: Total reward (the weighted sum of the parts); ignored where ``valid_PN`` is false.
        parts: Unweighted score of each reward by name, not a number where it could not score.
        valid_PN: False for a rollout without a score.
        length_PN: Completion tokens, EOS included.
        finished_PN: False for a completion cut at the limit.
        index_PM: Kept rollouts of each group; -1 is an empty slot.
        advantage_PM: Advantage of each kept rollout, in the order of ``index_PM``.
    """

    prompt_id_P: Sequence[str]
    prompt_P: Sequence[str]
    answer_P: Sequence[str]
    texts_PN: Sequence[Sequence[str]]
    rewards_PN: Float[np.ndarray, "P N"]
    parts: Mapping[str, Float[np.ndarray, "P N"]]
    valid_PN: Bool[np.ndarray, "P N"]
    length_PN: Int[np.ndarray, "P N"]
    finished_PN: Bool[np.ndarray, "P N"]
    index_PM: Int[np.ndarray, "P M"]
    advantage_PM: Float[np.ndarray, "P M"]


@dataclass(frozen=True)
class RolloutRows:
    """What :func:`read_rollouts` found: the rows of the chosen steps, and counts over the whole file."""

    by_step: dict[int, list[dict]]
    generated: int
    kept: int


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
        tensorboard: Write TensorBoard events under ``<folder>/tensorboard``.
        enabled: False on every process but the first: nothing is read, written or shown.
        console: Where progress goes; standard output by default.

    Raises:
        ValueError: ``texts_per_step`` is below -1.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        resume_step: int | None = None,
        texts_per_step: int = 16,
        progress: bool = True,
        tensorboard: bool = True,
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
        for name in (METRICS_FILE, ROLLOUTS_FILE):
            _cut_after(folder / name, self._last_step)
        past = list(read_metrics(folder))
        self._metrics = (folder / METRICS_FILE).open("a", encoding="utf-8", newline="\n")
        self._rollouts = (folder / ROLLOUTS_FILE).open("a", encoding="utf-8", newline="\n")
        self._tensorboard = _event_writer(folder, self._last_step + 1) if tensorboard else None
        self._progress = _Progress(console or Console(), total_steps, max(self._last_step, 0)) if progress else None
        if self._progress:
            self._progress.recall(past)

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
        """Waits until every logged step is on disk; raises what went wrong in writing it."""
        if self._enabled and self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _close(self) -> None:
        self._writer.shutdown()
        if self._progress:
            self._progress.close()
        self._metrics.close()
        self._rollouts.close()
        if self._tensorboard:
            self._tensorboard.close()

    def say(self, text: str) -> None:
        """Prints a line above the progress line; silent where progress is."""
        self.settle()
        if self._enabled and self._progress:
            self._progress.say(text)

    def log_step(
        self, step: int, metrics: Mapping[str, Number], *, wall_seconds: float, rollouts: RolloutRecords | None = None
    ) -> None:
        """Has one step written to every sink and flushed; returns before it is, and waits for the step before.

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
        row |= {name: _plain(value, name) for name, value in metrics.items()}
        if nonfinite := sum(value is None for value in row.values()):
            row["log/nonfinite"] = nonfinite
        self._last_step = step
        self.settle()
        self._writing = self._writer.submit(self._write, step, row, rollouts)

    def _write(self, step: int, row: Mapping[str, float | None], rollouts: RolloutRecords | None) -> None:
        if rollouts is not None:
            self._rollouts.writelines(_line(r) for r in _rollout_rows(step, rollouts, self._texts_per_step))
            self._rollouts.flush()
        self._metrics.write(_line(row))
        self._metrics.flush()
        self._write_events(step, row)
        if self._progress:
            self._progress.show(row)

    def _write_events(self, step: int, row: Mapping[str, float | None]) -> None:
        if self._tensorboard is None:
            return
        for name, value in row.items():
            if value is not None and name != "step":
                self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()


@dataclass
class _Progress:
    """The progress line: live on a terminal, printed now and then elsewhere."""

    console: Console
    total: int
    step: int
    accuracy: float | None = None
    clock: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=ETA_STEPS + 1))
    printed_at: float = -math.inf

    def __post_init__(self):
        self.bar = None
        if self.console.is_terminal:
            text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
            # The line alone just fits a terminal of 80 columns.
            ornaments = (SpinnerColumn(), TimeElapsedColumn(), BarColumn(bar_width=16)) if self.console.width >= 116 else ()
            columns = (*ornaments, text)
            self.bar = Progress(*columns, console=self.console, refresh_per_second=4)
            self.task = self.bar.add_task(f"step {self.step}/{self.total}", total=self.total, completed=self.step)
            self.bar.start()

    def recall(self, past: Sequence[Mapping]) -> None:
        for row in past:
            self.accuracy = row.get("eval/accuracy", self.accuracy)

    def show(self, row: Mapping) -> None:
        self.step = row["step"]
        self.accuracy = row.get("eval/accuracy", self.accuracy)
        self.clock.append((self.step, row["wall_seconds"]))
        line = self.line(row)
        if self.bar:
            self.bar.update(self.task, completed=self.step, description=line)
            return
        now = time.monotonic()
        if now - self.printed_at >= PLAIN_LINE_SECONDS or "eval/accuracy" in row or self.step == self.total:
            self.printed_at = now
            self.say(line)

    def line(self, row: Mapping) -> str:
        parts = [f"step {self.step}/{self.total}"]
        named = (
            ("reward {:.3f}", row.get("reward/mean")),
            ("held-out {:.1%}", self.accuracy),
            ("rollout {:.2f}s", row.get("time/rollout_seconds")),
            ("update {:.2f}s", row.get("time/update_seconds")),
        )
        parts += [text.format(value) for text, value in named if value is not None]
        (first, start), (last, end) = self.clock[0], self.clock[-1]
        if last > first:
            parts.append(f"ETA {_minutes((self.total - last) * (end - start) / (last - first))}")
        return "  ".join(parts)

    def say(self, text: str) -> None:
        # The bar's own console keeps printed text above the live line.
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


def read_metrics(folder: Path) -> Iterator[dict]:
    """Yields the rows of ``metrics.jsonl`` in order; a torn last line is left out.

    Raises:
        FileNotFoundError: The folder has no ``metrics.jsonl``.
    """
    for line in _complete_lines(folder / METRICS_FILE):
        if (row := _parse(line)) is not None:
            yield row


def read_rollouts(folder: Path, steps: Collection[int]) -> RolloutRows:
    """Streams ``rollouts.jsonl`` and parses the rows of ``steps`` alone; a missing file gives no rows."""
    by_step: dict[int, list[dict]] = {}
    generated = kept = 0
    path = folder / ROLLOUTS_FILE
    for line in _complete_lines(path) if path.exists() else ():
        generated += 1
        # Safe to look for as bytes: inside any JSON string the quotes would be escaped.
        kept += b'"kept": true' in line
        if _step_of(line) in steps and (row := _parse(line)) is not None:
            by_step.setdefault(row["step"], []).append(row)
    return RolloutRows(by_step=by_step, generated=generated, kept=kept)


def _event_writer(folder: Path, first_step: int) -> SummaryWriter:
    # The suffix keeps a run that resumes within the same second from overwriting the events before it.
    return SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=first_step, filename_suffix=f".from{first_step}")


def _line(row: Mapping) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _complete_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _step_of(line: bytes) -> int | None:
    """The step of a row, which is its first key, without parsing the rest."""
    match = re.match(rb'\{"step": (\d+)[,}]', line)
    return int(match[1]) if match else None


def _parse(line: bytes) -> dict | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _cut_after(path: Path, step: int) -> None:
    """Truncates the file behind the last row of ``step`` or earlier; the first unreadable row ends the file too."""
    path.touch()
    end = 0
    for line in _complete_lines(path):
        row = _parse(line)
        if row is None or row["step"] > step:
            break
        end += len(line)
    with path.open("rb+") as file:
        file.truncate(end)


def _plain(value: Number, name: str) -> float | int | None:
    """A Python number for JSON; ``None`` where not finite. A float32 keeps its own shortest digits: 0.1, not 0.10000000149."""
    if not isinstance(value, bool | int | float | np.generic | np.ndarray):
        raise TypeError(f"metric {name!r} is a {type(value).__name__}, not a plain number; fetch it from the device first")
    scalar = np.asarray(value)
    if scalar.size != 1 or scalar.dtype.kind not in "biuf":
        raise TypeError(f"metric {name!r} must be one number; got shape {scalar.shape}, dtype {scalar.dtype}")
    number = scalar.reshape(())[()]
    if scalar.dtype.kind != "f":
        return int(number)
    if not np.isfinite(number):
        return None
    return float(number) if number.dtype == np.float64 else float(str(number))


def _rollout_rows(step: int, rollouts: RolloutRecords, texts_per_step: int) -> Iterator[dict]:
    """One row a rollout, group by group."""
    kept_PN, advantage_PN = _scatter(rollouts)
    rank_PN = _rank(rollouts.rewards_PN, rollouts.valid_PN)
    shown_PN = _texts_shown(kept_PN, rank_PN, texts_per_step)
    for p, n in np.ndindex(kept_PN.shape):
        row = {
            "step": step,
            "group": p,
            "prompt_id": rollouts.prompt_id_P[p],
            "index": n,
            "parts": {name: _plain(part_PN[p, n], name) for name, part_PN in rollouts.parts.items()},
            "total": _plain(rollouts.rewards_PN[p, n], "total") if rollouts.valid_PN[p, n] else None,
            "valid": bool(rollouts.valid_PN[p, n]),
            "rank": int(rank_PN[p, n]) if rollouts.valid_PN[p, n] else None,
            "kept": bool(kept_PN[p, n]),
            "advantage": _plain(advantage_PN[p, n], "advantage") if kept_PN[p, n] else None,
            "length": int(rollouts.length_PN[p, n]),
            "finished": bool(rollouts.finished_PN[p, n]),
        }
        if n == 0 and shown_PN[p].any():
            row |= {"prompt": rollouts.prompt_P[p], "answer": rollouts.answer_P[p]}
        if shown_PN[p, n]:
            row["text"] = rollouts.texts_PN[p][n]
        yield row


def _scatter(rollouts: RolloutRecords) -> tuple[np.ndarray, np.ndarray]:
    """Which rollouts are kept, and their advantages, at their places among all N."""
    kept_PN = np.zeros(rollouts.rewards_PN.shape, bool)
    advantage_PN = np.zeros(rollouts.rewards_PN.shape, np.float32)
    p, m = np.nonzero(rollouts.index_PM >= 0)
    kept_PN[p, rollouts.index_PM[p, m]] = True
    advantage_PN[p, rollouts.index_PM[p, m]] = rollouts.advantage_PM[p, m]
    return kept_PN, advantage_PN


def _rank(rewards_PN: np.ndarray, valid_PN: np.ndarray) -> np.ndarray:
    """Rank by reward in the group: 1 is the highest, equal rewards share a rank, rollouts without a score come last."""
    scored_PN = np.where(valid_PN, rewards_PN, -np.inf)
    return np.stack([1 + len(scored_N) - np.searchsorted(np.sort(scored_N), scored_N, side="right") for scored_N in scored_PN])


def _texts_shown(kept_PN: np.ndarray, rank_PN: np.ndarray, budget: int) -> np.ndarray:
    """Which rollouts keep their text: whole groups while the budget lasts, then of one more the kept and a spread of ranks."""
    shown_PN = np.zeros(kept_PN.shape, bool)
    left = kept_PN.size if budget < 0 else budget
    for p in range(len(kept_PN)):
        by_rank = np.argsort(rank_PN[p], kind="stable")
        of_kept = _spread(by_rank[kept_PN[p][by_rank]], left)
        of_dropped = _spread(by_rank[~kept_PN[p][by_rank]], left - len(of_kept))
        shown_PN[p, of_kept] = shown_PN[p, of_dropped] = True
        left -= len(of_kept) + len(of_dropped)
    return shown_PN


def _spread(order: np.ndarray, count: int) -> np.ndarray:
    """``count`` entries of ``order`` at even distances, both ends included; all when there are fewer."""
    count = min(count, len(order))
    return order[np.linspace(0, len(order) - 1, count).round().astype(int)] if count else order[:0]


def _minutes(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
