"""What compiling costs: the seconds it takes, and the cache that spares them at the next start."""

import os
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


def keep_compiled(setting: str) -> Path | None:
    """Keeps compiled programs on disk from now on, so that the next start need not compile them again.

    Args:
        setting: "auto" for the user's cache folder, or what JAX itself has been told (``JAX_COMPILATION_CACHE_DIR``); "off"; or
            a folder.

    Returns:
        The folder; None where nothing is kept.
    """
    if setting == "off":
        return None
    chosen = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if setting != "auto" or not chosen:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        chosen = str(home / "pods_jax" / "compiled" if setting == "auto" else Path(setting).expanduser())
        jax.config.update("jax_compilation_cache_dir", chosen)
        compilation_cache.reset_cache()
    # Nothing is too small: a run has many programs that each take a moment.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return Path(chosen)
