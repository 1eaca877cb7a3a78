import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pods_jax.config.command_line import config_difference, from_yaml, leaf_kinds, parse, to_yaml
from pods_jax.config.entries import Config, EvaluateConfig
from pods_jax.config.fields import ConfigError, kinds, shown
from pods_jax.config.sections import RewardConfig, RolloutConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
CLASSES = [Config, EvaluateConfig]


def run(*argv, cls: Any = Config) -> Any:
    return parse(cls, argv, prog="train", description="Train a policy.")


def failure(capsys, *argv, cls: Any = Config):
    """The one line on stderr of a refused command line."""
    with pytest.raises(SystemExit) as caught:
        run(*argv, cls=cls)
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("train: error: ")
    return err.removeprefix("train: error: ").rstrip("\n")


def help_text(capsys, cls):
    with pytest.raises(SystemExit) as caught:
        run("--help", cls=cls)
    assert caught.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def write(tmp_path):
    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_no_arguments_give_the_defaults():
    assert run() == Config()
    assert run(cls=EvaluateConfig) == EvaluateConfig()


def test_dotted_options_override_in_both_spellings():
    config = run("--rollout.n", "64", "--selection.m=16", "--selection.rule", "percentile", "--optimizer.learning_rate=1e-5")
    assert (config.rollout.n, config.selection.m, config.selection.rule) == (64, 16, "percentile")
    assert config.optimizer.learning_rate == 1e-5
    assert config_difference(Config(), config) == ["rollout.n", "selection.rule", "selection.m", "optimizer.learning_rate"]


def test_the_last_of_repeated_options_wins():
    assert run("--rollout.n", "64", "--rollout.n", "48").rollout.n == 48


def test_later_files_win_over_earlier_ones_and_options_over_all_files(write):
    first = write("rollout: {n: 40, top_k: 3}\nselection: {m: 4}", "first.yaml")
    second = write("rollout:\n  n: 50\nselection:\n", "second.yaml")
    assert run("--config", first, "--config", second).rollout == RolloutConfig(n=50, top_k=3)
    config = run("--rollout.top_k", "9", "--config", second, "--config", first)
    assert (config.rollout, config.selection.m) == (RolloutConfig(n=40, top_k=9), 4)


def test_lists_are_read_from_commas_and_from_yaml(write):
    config = run("--reward.functions", "correct,format,my.module:fn", "--reward.weights", "1.0,0.1,2")
    wanted = RewardConfig(functions=["correct", "format", "my.module:fn"], weights=[1.0, 0.1, 2.0])
    assert config.reward == wanted
    assert run("--reward.functions=[correct, format, my.module:fn]", "--reward.weights=[1, 0.1, 2]").reward == wanted
    path = write("reward:\n  functions: [correct, format, 'my.module:fn']\n  weights: [1, 1e-1, 2]\n")
    assert run("--config", path).reward == wanted


def test_booleans_and_null_are_read(write):
    assert run("--run.resume", "false").run.resume is False
    assert run("--run.resume", "True").run.resume is True
    path = write("data: {path: here, system_prompt: ''}")
    config = run("--config", path, "--data.path", "null")
    assert (config.data.path, config.data.system_prompt) == (None, "")
    assert run("--data.path", "None").data.path is None
    assert run("--run.name", "null").run.name == "null"


def test_a_negative_value_may_follow_its_option():
    assert run("--log.texts_per_step", "-1").log.texts_per_step == -1


@pytest.mark.parametrize("number", ["1e-5", "1E-5", "1.0e-5", "0.00001", ".00001"])
def test_a_yaml_number_with_an_exponent_is_a_number(write, number):
    assert run("--config", write(f"optimizer: {{learning_rate: {number}}}")).optimizer.learning_rate == 1e-5


def test_yaml_keys_may_be_dotted(write):
    assert run("--config", write("rollout.n: 64\nselection: {m: 4}")).rollout.n == 64


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rollout.nn", "4"], "unknown option --rollout.nn; the nearest is --rollout.n"),
        (["--rolout.n=4"], "unknown option --rolout.n; the nearest is --rollout.n"),
        (["--temperature", "0.9"], "unknown option --temperature; the nearest is --rollout.temperature"),
        (["--confg", "a.yaml"], "unknown option --confg; the nearest is --config"),
        (["--rollout.temp", "1"], "unknown option --rollout.temp; the nearest is --rollout.top_p"),
        (["train.yaml"], "unexpected argument train.yaml: options are --section.field VALUE"),
        (["--rollout.n", "x"], "rollout.n='x' must be: integer at least 1"),
        (["--rollout.n", "4.5"], "rollout.n='4.5' must be: integer at least 1"),
        (["--rollout.n", "-4"], "rollout.n=-4 must be: integer at least 1"),
        (["--rollout.top_p", "1.5"], "rollout.top_p=1.5 must be: number above 0 and at most 1"),
        (["--loss.beta", "nan"], "loss.beta=nan must be: number at least 0"),
        (["--run.resume", "1"], "run.resume='1' must be: true or false"),
        (["--update.remat", "first"], "update.remat='first' must be: one of none, layer"),
        (["--reward.weights", "1,a"], "reward.weights=1.0,a must be: list of number, or null"),
        (["--rollout.n", "8", "--selection.m", "16"], "selection.m=16 cannot exceed rollout.n=8"),
        (["--run.steps"], "argument --run.steps: expected one argument"),
        (["--config", "no/such.yaml"], "--config no/such.yaml: No such file or directory"),
        (["--config", "."], "--config .: Is a directory"),
    ],
)
def test_a_refused_command_line_gives_one_line_naming_key_value_and_limit(capsys, argv, message):
    assert failure(capsys, *argv) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout: {nn: 3}", ": unknown key rollout.nn; the nearest is rollout.n"),
        ("rolout: {n: 3}", ": unknown key rolout.n; the nearest is rollout.n"),
        ("run: {name: {a: 1}}", ": unknown key run.name.a; the nearest is run.name"),
        ("rollout: 4", ": rollout=4 must be a mapping of its fields"),
        ("rollout: {n: 3}\nrollout: {m: 3}", " line 2: key rollout stands twice"),
        ("rollout:\n  n: 3\n  chunk: 1\n  n: 4", " line 4: key n stands twice"),
        ("rollout: {n: 3}\nrollout.n: 4", ": key rollout.n stands twice"),
        ("- 1\n- 2", ": holds a list, not a mapping of sections to fields"),
        ("just text", ": holds a str, not a mapping of sections to fields"),
        ("rollout: {n: 3", " line 1: expected ',' or '}', but got '<stream end>'"),
        ("? [a, b]\n: 1", " line 1: found unhashable key"),
    ],
)
def test_a_refused_file_is_named_with_the_key(capsys, write, text, message):
    path = write(text)
    assert failure(capsys, "--config", path) == path + message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout: {n: '8'}", "rollout.n='8' must be: integer at least 1"),
        ("rollout: {n: true}", "rollout.n=true must be: integer at least 1"),
        ("run: {name: null}", "run.name=null must be: text"),
        ("run: {name: 12}", "run.name=12 must be: text"),
        ("run: {name: {}}", "run.name={} must be: text"),
        ("reward: {functions: correct}", "reward.functions='correct' must be: list of text"),
    ],
)
def test_yaml_values_of_a_wrong_type_are_refused(capsys, write, text, message):
    assert failure(capsys, "--config", write(text)) == message


def test_a_file_that_is_not_text_is_refused(capsys, tmp_path):
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"\xff\xfe\xfa")
    assert failure(capsys, "--config", str(path)) == f"--config {path}: not UTF-8 text"
    path.write_bytes(b"run: {name: \x07}")
    assert str(path) in failure(capsys, "--config", str(path))


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_file_changes_nothing(write, text):
    assert run("--config", write(text)) == Config()


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_stands_in_help_with_meaning_kind_and_default(capsys, cls):
    text = help_text(capsys, cls)
    for key, kind in leaf_kinds(cls).items():
        _, found, rest = text.partition(f" --{key} ")
        assert found, key
        metavar, _, meaning = rest.partition(" ")
        assert metavar.isupper()
        meaning, found, _ = meaning.partition(f" ({kind}; default ")
        assert found, key
        assert len(meaning) > 10, key
        assert meaning.endswith("."), key
        assert " --" not in meaning, key


@pytest.mark.parametrize("key", EvaluateConfig.unread)
def test_a_key_that_is_not_read_is_absent_and_refused_even_at_its_default(capsys, write, key):
    assert key in leaf_kinds(Config)
    assert f" --{key} " not in help_text(capsys, EvaluateConfig)
    assert key not in leaf_kinds(EvaluateConfig)
    section, leaf = key.split(".")
    assert leaf not in yaml.safe_load(to_yaml(EvaluateConfig()))[section]
    value = shown(getattr(getattr(Config(), section), leaf))
    words = f"{key} is not read here: {EvaluateConfig.unread[key]}"
    assert failure(capsys, f"--{key}", value, cls=EvaluateConfig) == f"--{words}"
    assert failure(capsys, f"--{key}={value}", cls=EvaluateConfig) == f"--{words}"
    path = write(f"{key}: {value}")
    assert failure(capsys, "--config", path, cls=EvaluateConfig) == f"{path}: {words}"


@dataclasses.dataclass(frozen=True)
class Without(Config):
    """Reads nothing of a whole section."""

    unread: ClassVar[Mapping[str, str]] = {"log": "nothing is logged"}


def test_a_whole_section_can_be_left_out(capsys, write):
    assert not any(key.startswith("log.") for key in leaf_kinds(Without))
    assert "log:" not in help_text(capsys, Without)
    assert "log" not in yaml.safe_load(to_yaml(Without()))
    assert from_yaml(Without, to_yaml(Without())) == Without()
    assert failure(capsys, "--log.progress", "true", cls=Without) == "--log.progress is not read here: nothing is logged"
    path = write("log: {progress: true}")
    assert failure(capsys, "--config", path, cls=Without) == f"{path}: log.progress is not read here: nothing is logged"


@pytest.mark.parametrize("cls", CLASSES)
def test_every_section_has_its_own_meaning_in_help(capsys, cls):
    text = help_text(capsys, cls)
    sections = {name: kind.type.__doc__ or "" for name, kind in kinds(cls).items() if dataclasses.is_dataclass(kind.type)}
    assert len(set(sections.values())) == len(sections) > 3
    for name, meaning in sections.items():
        assert f"{name}: {' '.join(meaning.split())} --{name}." in text


def test_print_config_prints_what_a_run_would_use_and_exits(capsys, write):
    with pytest.raises(SystemExit) as caught:
        run("--config", write("rollout: {n: 40}"), "--print_config", "--selection.m", "4")
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert from_yaml(Config, printed) == run("--rollout.n", "40", "--selection.m", "4")
    assert set(yaml.safe_load(printed)) == set(kinds(Config))


def test_print_config_refuses_what_a_run_would_refuse(capsys):
    assert failure(capsys, "--print_config", "--selection.m", "64").startswith("selection.m=64 cannot exceed")


def values_of(kind):
    if kind.choices:
        values = st.sampled_from(kind.choices)
    elif kind.item:
        values = st.lists(values_of(kind.item), min_size=3, max_size=3, unique=True)
    elif kind.type is bool:
        values = st.booleans()
    elif kind.type is str:
        values = st.text(min_size=1) | st.sampled_from(["null", "1e-5", "true", "12", "~", " a ", "a: b", "# c", "2001-01-01"])
    elif kind.type is int:
        values = st.integers(2, 1000)
    else:
        values = st.floats(0, 1, exclude_min=True, exclude_max=True)
    return st.none() | values if kind.optional else values


@st.composite
def section(draw, name, cls):
    read = sorted(leaf for leaf in kinds(cls) if f"{name}.{leaf}" in leaf_kinds(EvaluateConfig))
    names = draw(st.sets(st.sampled_from(read)))
    return cls(**{name: draw(values_of(kinds(cls)[name])) for name in names if name not in ("name", "functions", "weights")})


@st.composite
def configs(draw):
    parts = {
        name: draw(section(name, kind.type)) for name, kind in kinds(EvaluateConfig).items() if kind.type not in (int, str)
    }
    return EvaluateConfig(**parts, out=draw(values_of(kinds(EvaluateConfig)["out"])))


@settings(max_examples=60, deadline=None)
@given(configs())
def test_yaml_gives_back_an_equal_configuration(config):
    again = from_yaml(EvaluateConfig, to_yaml(config))
    assert again == config
    assert config_difference(config, again) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(min_size=1), min_size=1, unique=True).flatmap(
        lambda names: st.tuples(
            st.just(names), st.none() | st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=len(names))
        )
    )
)
def test_yaml_gives_back_equal_lists(reward):
    functions, weights = reward
    config = Config(reward=RewardConfig(functions, weights[: len(functions)] if weights else None))
    assert from_yaml(Config, to_yaml(config)) == config


def test_from_yaml_names_its_source():
    with pytest.raises(ConfigError, match=r"^runs/a/config\.yaml: unknown key rollout\.k; the nearest is rollout\.n$"):
        from_yaml(Config, "rollout: {k: 3}", source="runs/a/config.yaml")


def test_config_difference_lists_every_key_that_changed():
    config = run("--run.steps", "7", "--data.path", "here", "--reward.functions", "correct")
    assert config_difference(config, Config()) == ["run.steps", "data.path", "reward.functions"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_bundled_file_says_only_what_differs_from_the_default(path):
    config = run("--config", str(path))
    written = {f"{name}.{leaf}" for name, leaves in yaml.safe_load(path.read_text()).items() for leaf in leaves}
    assert set(config_difference(Config(), config)) == written
    assert config.run.name == path.stem
    assert path.read_text().startswith("# ")


def test_the_command_line_starts_no_jax():
    code = (
        "import sys, pods_jax.config.command_line, pods_jax.config.entries; "
        "print(sorted({'jax', 'numpy', 'flax'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
