"""A pool of processes for what must not run in the training process: algebra on untrusted text, and own rewards.

Every call has a wall-clock limit and a memory limit. The parent enforces the first: it kills a process that is late and starts
another. A call that is late, dies or fails gives an outcome without a value; no other call is lost, and the run goes on.

The processes are plain ``python -m pods_jax.rewards.worker_process``, spoken to over a socket pair. Forking is unsafe next to
the threads of jax; multiprocessing would import the trainer's main module, and jax with it, into every worker; and a time-out
by signal works in the main thread alone and does not interrupt a long operation in C. Replies are JSON: nothing that a worker
sends is unpickled.
"""

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Pipe, wait
from numbers import Real
from typing import Any, Literal

import numpy as np

START_SECONDS = 120.0
"""Limit for starting a process and importing what a job runs, which no answer is at fault for."""
MOST_WORKERS = 8
"""Most processes of a pool that is not told a number."""

Fault = Literal["time", "memory", "crash", "error"]


@dataclass(frozen=True)
class Job:
    """A call for a worker.

    Attributes:
        target: ``"module:function"``, imported in the worker.
        args: Arguments of the function; they must pickle.
    """

    target: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        value: The number that the function returned; ``None`` for "cannot score", and after a fault.
        fault: Why there is no value: out of ``time`` or ``memory``, its process died (``crash``), or it raised (``error``).
        detail: For people: the traceback of an error, or the name of a wrong type.
        wrong_type: Whether the function returned something else than a number or ``None``.
    """

    value: float | None = None
    fault: Fault | None = None
    detail: str = ""
    wrong_type: bool = False


def outcome_of(score: object) -> Outcome:
    """Returns the outcome of a function that returned ``score``."""
    if score is None:
        return Outcome()
    if not isinstance(score, Real | np.bool_):
        return Outcome(detail=type(score).__name__, wrong_type=True)
    try:
        return Outcome(float(score))
    except OverflowError:  # an integer beyond any float
        return Outcome(math.nan)


class WorkerPool:
    """Processes that run jobs; they start with the first job and stay until ``close``.

    Args:
        time_limit: Seconds of wall-clock time for each job.
        memory_limit_mb: MiB of address space that a job may add to what its process holds at first (enforced on Linux).
        workers: Number of processes; 0 takes one for each CPU core, at most ``MOST_WORKERS``.
    """

    def __init__(self, *, time_limit: float = 5.0, memory_limit_mb: int = 1024, workers: int = 0):
        if time_limit <= 0 or memory_limit_mb < 1 or workers < 0:
            raise ValueError(
                f"verify.time_limit={time_limit} and verify.memory_limit_mb={memory_limit_mb} must be positive, "
                f"verify.workers={workers} not negative"
            )
        self._limits = (time_limit, memory_limit_mb)
        self._size = workers or min(MOST_WORKERS, os.cpu_count() or 1)
        self._workers: list[_Worker] = []
        self._stop = weakref.finalize(self, _stop_all, self._workers)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Runs the jobs, equal ones once, and returns the outcome of each in the order given.

        Raises:
            RuntimeError: A process cannot start, or cannot import the target of a job.
        """
        payloads = [pickle.dumps((job.target, job.args)) for job in jobs]
        waiting = dict(zip(reversed(payloads), reversed(jobs), strict=True))
        done: dict[bytes, Outcome] = {}
        try:
            while waiting or any(worker.payload for worker in self._workers):
                self._hand_out(waiting)
                self._collect(done)
        except BaseException:
            self.close()
            raise
        return [done[payload] for payload in payloads]

    def close(self) -> None:
        """Ends all processes; a later ``run`` starts new ones."""
        _stop_all(self._workers)

    def _hand_out(self, waiting: dict[bytes, Job]) -> None:
        while waiting:
            worker = next((worker for worker in self._workers if not worker.payload), None)
            if worker is None:
                if len(self._workers) == self._size:
                    return
                worker = _Worker(*self._limits)
                self._workers.append(worker)
            payload, job = waiting.popitem()
            try:
                worker.take(payload, job)
            except OSError as error:  # it died while idle, as for the system's want of memory; the job has not run
                self._drop(worker)
                if not worker.loaded:
                    raise RuntimeError("a worker process cannot start") from error
                waiting[payload] = job

    def _collect(self, done: dict[bytes, Outcome]) -> None:
        busy = {worker.connection: worker for worker in self._workers if worker.payload}
        patience = min(worker.deadline for worker in busy.values()) - time.monotonic()
        for connection in wait(list(busy), max(0.0, patience)):
            worker = busy[connection]  # pyright: ignore[reportArgumentType]
            outcome = worker.receive()
            if outcome is not None:
                done[worker.payload] = outcome
                worker.payload = b""
                if outcome.fault in ("crash", "memory"):  # a process short of memory may not recover
                    self._drop(worker)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.payload and worker.deadline <= now]:
            done[worker.payload] = worker.late()
            self._drop(worker)

    def _drop(self, worker: "_Worker") -> None:
        self._workers.remove(worker)
        worker.kill()


class _Worker:
    """One process, this end of its connection, and the job that it has."""

    def __init__(self, time_limit: float, memory_limit_mb: int):
        self.connection, theirs = Pipe()
        arguments = [str(theirs.fileno()), str(time_limit), str(memory_limit_mb)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pods_jax.rewards.worker_process", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what an own reward prints goes to stderr: the last line of some commands' stdout is data
                env=_environment(),
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.time_limit = time_limit
        self.loaded: set[str] = set()
        self.payload, self.target, self.deadline = b"", "", 0.0

    def take(self, payload: bytes, job: Job) -> None:
        limit = self.time_limit if job.target in self.loaded else START_SECONDS
        self.connection.send_bytes(payload)
        self.payload, self.target, self.deadline = payload, job.target, time.monotonic() + limit

    def receive(self) -> Outcome | None:
        """Reads a message; ``None`` when it only says that the target is imported, so that the job's own time begins."""
        try:
            message = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self._require_loaded("its process died")
            return Outcome(fault="crash", detail="the process died")
        if "loaded" in message:
            self._require_loaded(message["loaded"], failed=bool(message["loaded"]))
            self.loaded.add(self.target)
            self.deadline = time.monotonic() + self.time_limit
            return None
        return Outcome(**message)

    def late(self) -> Outcome:
        self._require_loaded(f"more than {START_SECONDS:g} s")
        return Outcome(fault="time", detail=f"more than {self.time_limit:g} s")

    def kill(self) -> None:
        """Ends the process and whatever it has started."""
        self.connection.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _require_loaded(self, reason: str, failed: bool = True) -> None:
        if failed and self.target not in self.loaded:
            raise RuntimeError(f"a worker process cannot import {self.target}: {reason}")


def message_of(outcome: Outcome) -> bytes:
    """Returns an outcome as a worker sends it."""
    return json.dumps(asdict(outcome)).encode()


def _stop_all(workers: "list[_Worker]") -> None:
    while workers:
        workers.pop().kill()


def _environment() -> dict[str, str]:
    # An own reward that uses jax must not reach for the trainer's accelerator; libraries' threads would only fight for the
    # cores.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return os.environ | threads | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
