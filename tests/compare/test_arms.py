import pytest

from pods_jax.compare.__main__ import main
from pods_jax.compare.arms import (
    ARMS,
    DEFAULT_ARMS,
    CompareConfig,
    CompareOptions,
    SweepOptions,
    arm_configs,
    common_micro_batch,
    of_seed,
    out_folder,
    with_values,
)
from pods_jax.config.command_line import config_difference, from_yaml, leaf_kinds, parse, to_yaml
from pods_jax.config.entries import Config
from pods_jax.config.fields import ConfigError
from pods_jax.config.sections import OptimizerConfig, RolloutConfig, SelectionConfig, UpdateConfig

# What every arm's run has otherwise than a training run of its own.
COMMON = {
    "tuning.rollout_rungs",
    "tuning.update_rungs",
    "run.export",
    "run.dir",
    "log.progress",
    "log.sinks",
    "eval.every",
    "update.micro_batch",
}


def configured(*argv):
    return parse(CompareConfig, argv, prog="compare", description="Compare.")


def arms(*argv, devices=1):
    return arm_configs(configured(*argv), devices)


def trained(config):
    """What an arm generates and trains: n, kept, rule, whether groups without signal are skipped."""
    return config.rollout.n, config.kept, config.selection.rule, config.update.skip_no_signal


def test_each_arm_is_what_its_line_says():
    every = ",".join(ARMS)
    configs = arms("--compare.arms", every, "--rollout.n", "64", "--selection.m", "16")
    assert {name: trained(config) for name, config in configs.items()} == {
        "pods": (64, 16, "max_variance", True),
        "grpo": (16, 16, "all", False),
        "grpo_skip": (16, 16, "all", True),
        "grpo_ga": (64, 64, "all", False),
        "grpo_ga_skip": (64, 64, "all", True),
        "random": (64, 16, "random", True),
        "percentile": (64, 16, "percentile", True),
        "max_reward": (64, 16, "max_reward", True),
    }


def test_the_default_arms_are_named_in_order_with_pods_first():
    assert list(arms()) == DEFAULT_ARMS == ["pods", "grpo", "grpo_skip", "grpo_ga", "grpo_ga_skip", "random"]


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_changes_nothing_but_rollouts_selection_and_skipping(name):
    [config] = arms("--compare.arms", name, "--optimizer.learning_rate", "1e-4", "--loss.beta", "0.1").values()
    base = Config()
    differing = set(config_difference(config, base))
    assert {"optimizer.learning_rate", "loss.beta"} <= differing
    allowed = {"rollout.n", "selection.rule", "update.skip_no_signal", "optimizer.learning_rate", "loss.beta"}
    assert differing - COMMON <= allowed
    assert from_yaml(Config, to_yaml(config)) == config


OTHER_VALUES = {
    "update.micro_batch": 16,
    "optimizer.schedule": "linear",
    "rollout.temperature": 0.5,
    "data.train_problems": 100,
    "mesh.fsdp": 1,
    "mesh.data": 4,
    "reward.functions": ["correct"],
    "reward.weights": [1.0, 2.0, 3.0],
    "verify.sources": ["boxed"],
    "loss.name": "dapo",
    "lora.targets": ["q"],
    "loss.options": ["entropy_bonus=0.1"],
    "data.task": "gsm8k",
    "data.answer_kind": "exact",
    "selection.ties": "index",
    "advantage.over": "all",
    "run.name": "other",
}
ALONG = {"loss.options": {"loss.name": "grpo_entropy"}}
# The arms take no rule or advantage with a number of its own; without one, the key is refused with its reason.
WITHOUT_NUMBERS = ("selection.options", "advantage.options")


def other_value(key, kind, default):
    """A value that the key accepts, other than its default."""
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    if kind.choices:
        return next(choice for choice in kind.choices if choice != default)
    if kind.item:
        return ["other=1"]
    if kind.type is bool:
        return not default
    if kind.type is int:
        return 2 if default is None else default + 2
    return {str: "other", float: 0.5}[kind.type]


def keys_of_the_runs():
    return [k for k in leaf_kinds(CompareConfig) if k.split(".")[0] not in ("compare", "sweep") and k not in WITHOUT_NUMBERS]


@pytest.mark.parametrize("key", keys_of_the_runs())
def test_what_a_comparison_accepts_reaches_its_runs(key):
    section, leaf = key.split(".")
    value = other_value(key, leaf_kinds(Config)[key], getattr(getattr(Config(), section), leaf))
    config = with_values(
        CompareConfig(), {"run.steps": 200, "mesh.fsdp": 1, "mesh.data": 1} | ALONG.get(key, {}) | {key: value}
    )
    runs = [of_seed(run, name, 0) for name, run in arm_configs(config, 8).items()]
    if key in ("run.dir", "run.name"):
        assert value in runs[0].run.dir.split("/")
    else:
        assert value in [getattr(getattr(run, section), leaf) for run in runs]


@pytest.mark.parametrize("key", WITHOUT_NUMBERS)
def test_numbers_that_no_arm_has_are_refused(key):
    with pytest.raises(ConfigError, match=rf"{key}='other=1': the chosen entry has no number 'other'"):
        arms(f"--{key}", "other=1")


def test_every_arm_has_the_same_micro_batch_the_largest_that_all_allow():
    assert {config.update.micro_batch for config in arms().values()} == {32}
    found = arms("--data.prompts_per_step", "6", "--rollout.n", "10", "--selection.m", "4")
    # 6 groups of 4 are cut into 24, 12, 8, 4, 2, 1; 6 of 10 into 60, 30, 20, 10, 5, 2, 1.
    assert {config.update.micro_batch for config in found.values()} == {2}
    # Over two shards of 3 groups, sizes double: 3 groups of 4 are cut into 12, 4, 2, 1; 3 of 8 into 24, 8, 4, 2, 1.
    found = arms("--data.prompts_per_step", "6", "--rollout.n", "8", "--selection.m", "4", devices=2)
    assert {config.update.micro_batch for config in found.values()} == {8}


def test_the_users_micro_batch_stays_and_is_refused_where_an_arm_cannot_take_it():
    assert {config.update.micro_batch for config in arms("--update.micro_batch", "16").values()} == {16}
    with pytest.raises(ConfigError, match=r"compare\.arms=grpo_ga: update\.micro_batch=24"):
        arms("--update.micro_batch", "24", "--data.prompts_per_step", "6", "--rollout.n", "10", "--selection.m", "4")


def test_the_common_micro_batch_is_no_larger_than_the_smallest_update():
    few = Config(rollout=RolloutConfig(n=4), selection=SelectionConfig(m=2))
    many = Config(rollout=RolloutConfig(n=4), selection=SelectionConfig(rule="all"))
    assert common_micro_batch([few, many], 1) == 8
    assert common_micro_batch([many], 1) == 16


def test_the_first_arm_alone_takes_extra_steps_and_only_where_they_change_no_schedule():
    steps = [config.run.steps for config in arms("--run.steps", "50", "--compare.extra_steps", "30").values()]
    assert steps[0] == 80
    assert set(steps[1:]) == {50}
    more = CompareOptions(extra_steps=3)
    with pytest.raises(ConfigError, match=r"compare\.extra_steps=3 and optimizer\.schedule=cosine exclude each other"):
        CompareConfig(compare=more, optimizer=OptimizerConfig(schedule="cosine"))
    with pytest.raises(ConfigError, match=r"compare\.extra_steps=3 and sweep\.m exclude each other"):
        CompareConfig(compare=more, sweep=SweepOptions(m=[2, 4]))


def test_a_seed_is_added_to_those_of_the_run_and_of_the_data():
    config = configured("--run.seed", "5", "--data.seed", "7", "--run.dir", "there", "--run.name", "tried")
    assert str(out_folder(config)) == "there/compare/tried"
    run = of_seed(arm_configs(config, 1)["grpo"], "grpo", 2)
    assert (run.run.seed, run.data.seed, run.run.dir, run.run.name) == (7, 9, "there/compare/tried/grpo", "seed2")


@pytest.mark.parametrize(
    ("sweep", "values", "expected"),
    [
        ("n", "16,32", {"n=16": (16, 8, "max_variance", True), "n=32": (32, 8, "max_variance", True)}),
        ("m", "2,8", {"m=2": (32, 2, "max_variance", True), "m=8": (32, 8, "max_variance", True)}),
        ("rule", "random,percentile", {"rule=random": (32, 8, "random", True), "rule=percentile": (32, 8, "percentile", True)}),
    ],
)
def test_a_sweep_takes_the_place_of_the_arms(sweep, values, expected):
    assert {name: trained(config) for name, config in arms(f"--sweep.{sweep}", values).items()} == expected


def test_several_values_change_at_once():
    changed = with_values(Config(), {"rollout.n": 4, "selection.m": 4, "update.skip_no_signal": False})
    assert (changed.rollout.n, changed.selection.m, changed.update) == (4, 4, UpdateConfig(skip_no_signal=False))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--compare.arms", "pods,gpro"], ["compare.arms=pods,gpro", "gpro is no arm", "grpo_ga_skip"]),
        (["--compare.arms", "pods,pods"], ["compare.arms=pods,pods", "none twice"]),
        (["--compare.arms", "none"], ["compare.arms=none", "compare.imports"]),
        (["--compare.seeds", "1,1"], ["compare.seeds=1,1", "none twice"]),
        (["--compare.seeds", "-1"], ["compare.seeds=-1", "at least 0"]),
        (["--compare.level", "0"], ["compare.level=0.0", "above 0"]),
        (["--compare.arm", "pods"], ["unknown option --compare.arm", "--compare.arms"]),
        (["--compare.arms", "grpo", "--selection.m", "1", "--rollout.n", "4"], ["selection.m=1"]),
        (["--sweep.m", "8,64"], ["sweep.m=64", "selection.m=64 cannot exceed rollout.n=32"]),
        (["--sweep.n", "4,32"], ["sweep.n=4", "selection.m=8 cannot exceed rollout.n=4"]),
        (["--sweep.rule", "best"], ["sweep.rule=best", "max_variance"]),
        (["--sweep.n", "16,16"], ["sweep.n=16,16", "none twice"]),
        (["--eval.every", "20"], ["--eval.every is not read here: compare.eval_every takes its place"]),
        (["--run.export", "true"], ["--run.export is not read here"]),
        (["--selection.rule", "random"], ["--selection.rule is not read here", "compare.arms and sweep.rule"]),
        (["--log.texts_per_step", "4"], ["--log.texts_per_step is not read here"]),
        (["--sweep.n", "16", "--sweep.m", "4"], ["sweep.n and sweep.m"]),
        (["--sweep.n", "16", "--compare.arms", "pods"], ["compare.arms=pods and sweep.n exclude each other"]),
        (["--compare.imports", "nowhere"], ["compare.imports=nowhere holds no metrics.jsonl"]),
        (["--compare.arms", "none", "--compare.imports", "nowhere"], ["compare.imports=nowhere"]),
        (["--model.path", "nowhere"], ["model.path=nowhere"]),
        (["--mesh.fsdp", "3"], ["data.prompts_per_step=4", "mesh.fsdp=3"]),
    ],
)
def test_the_impossible_is_refused_in_one_line_before_anything_is_made(argv, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["--mesh.fsdp", "1", *argv])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    message = capsys.readouterr().err.strip()
    assert message.count("\n") == 0
    assert all(word in message for word in words), message
    assert list(tmp_path.iterdir()) == []
