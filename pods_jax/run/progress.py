"""The progress line: live on a terminal, printed now and then elsewhere."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

PLAIN_LINE_SECONDS = 5.0


ETA_STEPS = 20


@dataclass
class ProgressLine:
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
        """Takes what an earlier part of the run has logged into account."""
        for row in past:
            self.accuracy = row.get("eval/accuracy", self.accuracy)

    def show(self, row: Mapping) -> None:
        """Shows the row of a step."""
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
        """The words of the line."""
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
        """Prints a text above the line."""
        # The bar's own console keeps printed text above the live line.
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Ends the line."""
        if self.bar:
            self.bar.stop()


def _minutes(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
