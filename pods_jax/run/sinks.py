"""Where the metrics of a run go besides its own files: TensorBoard, Weights & Biases, Trackio, or a sink of the user's own.

``run/log.py`` writes metrics.jsonl and rollouts.jsonl itself, for a run is continued from them; every other destination is a
sink: one entry of :data:`SINKS`. Sinks work on threads of their own. One that fails, or falls far behind, is given up with one
warning, and the run goes on without it.
"""

import importlib.util
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tensorboardX import SummaryWriter

from pods_jax.lookup import lookup

FILES = "jsonl"  # metrics.jsonl and rollouts.jsonl, which are always written
PROJECT = "pods_jax"
TABLE_COLUMNS = ("prompt_id", "index", "prompt", "answer", "text", "total", "kept", "advantage", "length", "finished")
BACKLOG = 100
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class RunFacts:
    """What a sink is told about the run when it is opened.

    Attributes:
        folder: The run folder.
        name: Name of the run.
        config: The resolved configuration, section by section.
        first_step: Step from which this process logs; 0 is a new run.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    first_step: int


class Sink(Protocol):
    """A destination of metrics. Whatever its methods raise ends the sink, and not the run."""

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Takes one step.

        Args:
            step: Optimiser steps taken; 0 is the untrained policy.
            metrics: Finite numbers by name, with ``wall_seconds``, the run's clock.
            rollouts: One row for each rollout of the step, with the keys of rollouts.jsonl; empty at step 0.
        """
        ...

    def close(self) -> None:
        """Writes what is left; called once, after the last step."""
        ...


class TensorBoard:
    """Writes event files to ``<run>/tensorboard``: scalars, and histograms of rewards and lengths."""

    def __init__(self, run: RunFacts):
        # The suffix keeps a run that resumes within the same second from overwriting the events before it.
        suffix = f".from{run.first_step}"
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step, filename_suffix=suffix)

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Writes the events of one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for name, values in distributions(rollouts).items():
            self._writer.add_histogram(name, values, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WeightsAndBiases:
    """Logs to Weights & Biases, with histograms and a table of the rollouts whose text is kept.

    The usual environment variables choose the account, WANDB_PROJECT (default pods_jax) and WANDB_MODE (offline writes below
    ``<run>/wandb`` alone). A continued run goes on under its id, which the run folder keeps.
    """

    def __init__(self, run: RunFacts):
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=_kept_id(run.folder / "wandb" / "run_id", new=run.first_step == 0),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(console="off"),  # the progress line is not for its log
        )

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Sends one step; rows of steps that an interrupted run had sent before are ignored there, and are the same."""
        media: dict[str, Any] = {n: self._wandb.Histogram(values) for n, values in distributions(rollouts).items()}
        if rows := table_rows(rollouts):
            media["rollouts"] = self._wandb.Table(columns=list(TABLE_COLUMNS), data=rows)  # pyright: ignore[reportArgumentType]
        self._run.log({**metrics, **media}, step=step)

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()


class Trackio:
    """Logs to Trackio, with histograms and a table of the rollouts whose text is kept.

    Writes to its local store (TRACKIO_DIR), or to the space that TRACKIO_SPACE_ID names; the project is TRACKIO_PROJECT
    (default pods_jax). A continued run goes on under its name.
    """

    def __init__(self, run: RunFacts):
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run.name,
            config=dict(run.config),
            resume="never" if run.first_step == 0 else "allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Stores one step."""
        media: dict[str, Any] = {n: self._trackio.Histogram(values) for n, values in distributions(rollouts).items()}
        if rows := table_rows(rollouts):
            media["rollouts"] = self._trackio.Table(columns=list(TABLE_COLUMNS), data=rows)
        self._run.log({**metrics, **media}, step=step)

    def close(self) -> None:
        """Stores what is left."""
        self._run.finish()


SINKS: dict[str, Callable[[RunFacts], Sink]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}
EXTRAS = ("wandb", "trackio")  # packages that the extra of the same name installs


def check_sinks(names: Sequence[str]) -> dict[str, Callable[[RunFacts], Sink]]:
    """Returns the named sinks, not opened yet.

    Raises:
        ValueError: A sink is unknown, named twice, or its package is not installed.
    """
    if len(set(names)) < len(names):
        raise ValueError(f"log.sinks={','.join(names)} names a sink twice")
    found = {}
    for name in names:
        if name == FILES:
            continue
        found[name] = lookup(SINKS, name, "log.sinks", own=(), takes=("run",), others=(FILES,))
        if name in EXTRAS and importlib.util.find_spec(name) is None:
            raise ValueError(f"log.sinks={name} needs a package that is not installed: pip install 'pods_jax[{name}]'")
    return found


class Sinks:
    """The sinks of one run: opens them, feeds each on a thread of its own, and closes them.

    Args:
        names: ``log.sinks``.
        run: What the sinks are told.
        warn: Shows a line to the user.

    Raises:
        ValueError: As :func:`check_sinks`.
    """

    def __init__(self, names: Sequence[str], run: RunFacts, warn: Callable[[str], None]):
        self._feeds = [_Feed(name, opener, run, warn) for name, opener in check_sinks(names).items()]

    def __bool__(self) -> bool:
        return any(feed.alive for feed in self._feeds)

    def log(self, step: int, row: Mapping[str, float | None], rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Hands one step to every sink, and waits for none."""
        metrics = {name: value for name, value in row.items() if value is not None and name != "step"}
        for feed in self._feeds:
            feed.put((step, metrics, rollouts))

    def settle(self) -> None:
        """Waits until every sink has taken all steps, and gives up one that takes too long."""
        for feed in self._feeds:
            feed.settle()

    def close(self) -> None:
        """Closes every sink; one that does not come to its end is left to the process's."""
        for feed in self._feeds:
            feed.close()


class _Feed:
    """One sink, the thread that calls it, and the steps that wait for it."""

    def __init__(self, name: str, opener: Callable[[RunFacts], Sink], run: RunFacts, warn: Callable[[str], None]):
        self._name, self._warn = name, warn
        self._steps: queue.Queue[tuple | None] = queue.Queue(BACKLOG)
        self.alive = True
        try:
            self._sink = opener(run)
        except Exception as error:
            self._give_up(f"could not be opened ({_reason(error)})")
            return
        # A daemon: a sink that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name=f"sink_{name}", daemon=True)
        self._thread.start()

    def put(self, step: tuple) -> None:
        if self.alive:
            try:
                self._steps.put_nowait(step)
            except queue.Full:
                self._give_up(f"is {BACKLOG} steps behind")

    def settle(self) -> None:
        with self._steps.all_tasks_done:
            done = self._steps.all_tasks_done.wait_for(
                lambda: not (self.alive and self._steps.unfinished_tasks), PATIENCE_SECONDS
            )
        if not done:
            self._give_up(f"did not take a step in {PATIENCE_SECONDS:.0f} s")

    def close(self) -> None:
        if not self.alive:
            return
        self.settle()
        if self.alive:
            self._steps.put(None)
            self._thread.join(PATIENCE_SECONDS)
            if self._thread.is_alive():
                self._give_up(f"did not close in {PATIENCE_SECONDS:.0f} s")

    def _serve(self) -> None:
        while self.alive:
            step = self._steps.get()
            try:
                if step is None:
                    self._sink.close()
                    return
                self._sink.log(*step)
            except Exception as error:
                self._give_up(f"failed ({_reason(error)})")
            finally:
                self._steps.task_done()

    def _give_up(self, why: str) -> None:
        if self.alive:
            self.alive = False
            with self._steps.all_tasks_done:
                self._steps.all_tasks_done.notify_all()  # nobody waits any longer for steps that will not be taken
            self._warn(f"log.sinks: {self._name} {why}; the run goes on without it, and its files hold everything")


def distributions(rollouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the totals and lengths of a step's rollouts by the name of their histogram; none where no rollout has any."""
    totals = np.array([row["total"] for row in rollouts if row["total"] is not None], np.float64)
    lengths = np.array([row["length"] for row in rollouts], np.float64)
    return {name: values for name, values in (("reward/all", totals), ("completions/length", lengths)) if len(values)}


def table_rows(rollouts: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Returns a table of the rollouts whose text is kept, in the order of :data:`TABLE_COLUMNS`.

    Prompt and answer stand in every row here, and once for each group in rollouts.jsonl.
    """
    rows, asked = [], {}
    for row in rollouts:
        if "prompt" in row:
            asked = {"prompt": row["prompt"], "answer": row["answer"]}
        if "text" in row:
            rows.append([{**row, **asked}[column] for column in TABLE_COLUMNS])
    return rows


def _kept_id(path: Path, *, new: bool) -> str:
    """Returns the id that an earlier part of the run was logged under, or writes a new one."""
    if new or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{time.strftime('%Y%m%d')}{secrets.token_hex(4)}\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
