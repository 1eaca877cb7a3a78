"""The worker's side of ``workers.py``: it runs one job after another until the trainer is gone.

It is started as ``python -m pods_jax.rewards.worker_process <descriptor> <seconds> <MiB>``, and must not import jax.
"""

import importlib
import json
import logging
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pods_jax.rewards.workers import Outcome, message_of, outcome_of


def main(descriptor: int, time_limit: float, memory_limit_mb: int) -> None:
    """Answers each job with one message, after another one when its target had to be imported first."""
    # math-verify warns that its own time-outs are off, once for each process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    functions: dict[str, Callable[..., Any]] = {}
    with Connection(descriptor) as connection, suppress(EOFError, BrokenPipeError):
        while True:
            target, args = pickle.loads(connection.recv_bytes())
            if target not in functions:
                failure = _load(target, functions, memory_limit_mb)
                connection.send_bytes(json.dumps({"loaded": failure}).encode())
                if failure:
                    return
            # The trainer ends a late process. Should the trainer be gone, the system does: SIGALRM has no handler here.
            signal.setitimer(signal.ITIMER_REAL, 2 * time_limit + 1)
            outcome = _call(functions[target], args)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(message_of(outcome))


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
    try:
        return outcome_of(function(*args))
    except MemoryError:
        return Outcome(fault="memory", detail="out of memory")
    except Exception:
        return Outcome(fault="error", detail=traceback.format_exc(limit=-8)[-4_000:])


def _load(target: str, functions: dict[str, Callable[..., Any]], memory_limit_mb: int) -> str:
    """Imports a target without a limit, sets the limit on top of what the process then holds, and returns why it failed.

    The module's ``warm_up()``, where it has one, is called at once: what it loads or compiles is no answer's time.
    """
    _limit_memory(None)
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
        functions[target] = getattr(module, name)
        if "warm_up" in vars(module):
            module.warm_up()
    except Exception:
        return traceback.format_exc(limit=-8)
    _limit_memory(memory_limit_mb)
    return ""


def _limit_memory(mebibytes: int | None) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    statistics = Path("/proc/self/statm")
    if mebibytes is None or not statistics.exists():
        soft = most
    else:
        held = int(statistics.read_text().split()[0]) * resource.getpagesize()
        soft = held + mebibytes * 2**20
    if most != resource.RLIM_INFINITY:
        soft = min(soft, most)
    resource.setrlimit(resource.RLIMIT_AS, (soft, most))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
