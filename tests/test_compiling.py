import jax
import jax.numpy as jnp

from pods_jax.compiling import CompileWatch, keep_compiled, watch_compiling

TRACE, COMPILE = "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration"


def test_what_is_compiled_inside_the_block_is_counted_and_nothing_else():
    f = jax.jit(lambda x: jnp.sin(x) * 3)
    x, y = jnp.ones(7), jnp.ones(11)
    with watch_compiling() as watch:
        f(x)
    assert watch.programs == 1
    assert watch.seconds > 0
    f(y)
    assert watch.programs == 1
    with watch_compiling() as watch:
        f(x)
    assert (watch.programs, watch.seconds) == (0, 0)


def test_seconds_inside_one_another_count_once(monkeypatch):
    now = iter([2.0, 3.0, 4.0, 9.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    watch = CompileWatch()
    watch._record(TRACE, 1.0)  # 1 to 2
    watch._record(TRACE, 0.5)  # 2.5 to 3
    watch._record(TRACE, 3.5)  # 0.5 to 4, around both
    watch._record("/jax/other", 100.0)
    watch._record(COMPILE, 2.0)  # 7 to 9
    assert watch.seconds == 5.5
    assert watch.programs == 1


def test_programs_are_kept_for_the_next_process(tmp_path):
    before = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    try:
        keep_compiled(tmp_path)
        jax.jit(lambda x: jnp.cos(x) * 5)(jnp.ones(13))
        assert any(tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
