"""What compiling costs: the seconds it takes, and the cache that spares them at the next start."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache

COMPILED = "/jax/core/compile/backend_compile_duration"
STAGES = {"/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration", COMPILED}

# Nothing is too small: a run has many programs that each take a moment.
KEEP_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


@dataclass
class CompileWatch:
    """What has been traced and compiled since the watch began.

    Attributes:
        programs: Programs that were compiled, or read from the persistent cache.
        seconds: Wall seconds of tracing, lowering and compiling; what happens inside one another counts once.
    """

    programs: int = 0
    seconds: float = 0.0
    _spans: list[tuple[float, float]] = field(default_factory=list)

    def _record(self, event: str, duration_secs: float, **_: object) -> None:
        if event not in STAGES:
            return
        self.programs += event == COMPILED
        end = time.perf_counter()
        start = end - duration_secs
        # Events arrive as they end, so an outer one comes after those inside it, and takes their place.
        while self._spans and self._spans[-1][0] >= start:
            inner = self._spans.pop()
            self.seconds -= inner[1] - inner[0]
        self._spans.append((start, end))
        self.seconds += duration_secs


@contextmanager
def watch_compiling() -> Iterator[CompileWatch]:
    """Counts programs and seconds of compiling inside the block."""
    watch = CompileWatch()
    monitoring.register_event_duration_secs_listener(watch._record)
    try:
        yield watch
    finally:
        monitoring.unregister_event_duration_listener(watch._record)


def use_32_bits() -> None:
    """Switches 64-bit types off where JAX_ENABLE_X64 has switched them on, and says so: programs are made of 32-bit ones."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        jax.config.update("jax_enable_x64", False)
        print("JAX_ENABLE_X64 is set: switched off, since everything here is computed in 32 bits", file=sys.stderr)


def keep_compiled(setting: str) -> str | None:
    """Keeps compiled programs from now on, so that the next start need not compile them again.

    Args:
        setting: "auto" for what JAX itself has been told (``JAX_COMPILATION_CACHE_DIR``), or else the user's cache folder, or
            none where several processes would not share it; "off"; or a folder or address (``gs://...``) that all can reach.

    Returns:
        Where they are kept; None where nothing is.
    """
    told = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    # Only the first process writes, and programs that one process reads and another compiles need not be alike.
    if setting == "off" or (setting == "auto" and not told and jax.process_count() > 1):
        return None
    if setting == "auto":
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        chosen = told or str(home / "pods_jax" / "compiled")
    else:
        chosen = setting if "://" in setting else str(Path(setting).expanduser())
    if chosen != told:
        jax.config.update("jax_compilation_cache_dir", chosen)
        compilation_cache.reset_cache()
    for name, value in KEEP_ALL.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    return chosen
