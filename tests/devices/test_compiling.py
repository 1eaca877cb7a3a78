import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pods_jax.devices.compiling import CompileWatch, keep_compiled, use_32_bits, watch_compiling

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


SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def settings_restored():
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_something(number):
    jax.jit(lambda x: jnp.cos(x) * number)(jnp.ones(13)).block_until_ready()


@pytest.mark.usefixtures("settings_restored")
def test_programs_are_kept_in_the_folder_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert keep_compiled("off") is None
    compile_something(2)
    assert not any(tmp_path.iterdir())
    assert keep_compiled("auto") == str(tmp_path / "home" / "pods_jax" / "compiled")
    compile_something(3)
    assert any((tmp_path / "home" / "pods_jax" / "compiled").iterdir())
    assert keep_compiled(str(tmp_path / "own")) == str(tmp_path / "own")
    compile_something(5)
    assert any((tmp_path / "own").iterdir())


@pytest.mark.usefixtures("settings_restored")
def test_what_jax_has_been_told_stands(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "told"))
    assert keep_compiled("auto") == str(tmp_path / "told")


@pytest.mark.usefixtures("settings_restored")
def test_an_address_stays_as_it_is_and_thresholds_that_were_given_stand(monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "7")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    assert keep_compiled("gs://bucket/folder") == "gs://bucket/folder"
    assert getattr(jax.config, SETTINGS[0]) == "gs://bucket/folder"
    assert getattr(jax.config, SETTINGS[1]) == 7.0


@pytest.mark.usefixtures("settings_restored")
def test_several_processes_keep_programs_only_where_they_are_told_to(monkeypatch, tmp_path):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    assert keep_compiled("auto") is None
    assert keep_compiled(str(tmp_path)) == str(tmp_path)


def test_64_bit_types_are_switched_off_and_that_is_said(capsys):
    use_32_bits()
    assert capsys.readouterr().err == ""
    try:
        jax.config.update("jax_enable_x64", True)
        use_32_bits()
        assert jnp.arange(1).dtype == jnp.int32
    finally:
        jax.config.update("jax_enable_x64", False)
    assert "JAX_ENABLE_X64 is set: switched off" in capsys.readouterr().err
