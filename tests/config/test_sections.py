import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_jax.config.command_line import leaf_kinds
from pods_jax.config.entries import Config, EvaluateConfig, arithmetic, check_devices, micro_batch_sizes
from pods_jax.config.fields import ConfigError, kinds, shown
from pods_jax.config.sections import (
    DataConfig,
    EvalConfig,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SelectionConfig,
    UpdateConfig,
    VerifyConfig,
)

SECTIONS = {name: kind.type for name, kind in kinds(Config).items()}
LEAVES = leaf_kinds(Config)
LIMITS = {key: kind.limit for key, kind in LEAVES.items() if kind.limit}


def section_with(key, value):
    name, leaf = key.split(".")
    return SECTIONS[name](**{leaf: value})


def refused_values(kind):
    wrong = [object(), {"a": 1}, b"x"]
    if kind.type is not bool:
        wrong += [True]
    if kind.type is not str:
        wrong += ["x", ""]
    if kind.type is not list:
        wrong += [[1]]
    if kind.type is int:
        wrong += [1.0]
    if kind.type is float:
        wrong += [math.nan, math.inf, -math.inf]
    if kind.choices:
        wrong += ["", "X", kind.choices[0] + " "]
    if not kind.optional:
        wrong += [None]
    return wrong


def outside(limit):
    """The nearest values on the wrong side of each bound of a limit."""
    beyond = [limit.at_least - 1, limit.at_least - 1e9] if limit.at_least is not None else []
    beyond += [limit.above, -1.0] if limit.above is not None else []
    beyond += [math.nextafter(limit.at_most, 2)] if limit.at_most is not None else []
    beyond += [limit.below] if limit.below is not None else []
    return [value for value in beyond if value != limit.also]


def test_defaults_run_on_one_device():
    assert check_devices(Config(), 1) == (1, 1, 1)
    assert check_devices(EvaluateConfig(), 1) == (1, 1, 1)


@pytest.mark.parametrize("key", LEAVES)
def test_every_field_refuses_wrong_types_and_names_itself(key):
    for value in refused_values(LEAVES[key]):
        with pytest.raises(ConfigError) as caught:
            section_with(key, value)
        assert str(caught.value).startswith(f"{key}=")
        assert str(caught.value).endswith(f"must be: {LEAVES[key]}")


@pytest.mark.parametrize("key", LIMITS)
def test_every_number_refuses_what_lies_beyond_its_limit(key):
    kind = LEAVES[key]
    values = outside(LIMITS[key])
    assert values
    for value in values:
        value = kind.type(value)
        with pytest.raises(ConfigError) as caught:
            section_with(key, value)
        assert str(caught.value) == f"{key}={value} must be: {kind}"


def test_every_number_has_a_limit():
    plain = [key for key, kind in LEAVES.items() if kind.type in (int, float) and not kind.limit]
    assert plain == []


@pytest.mark.parametrize("key", LIMITS)
def test_every_number_accepts_its_closed_bounds(key):
    kind = LEAVES[key]
    for bound in (LIMITS[key].at_least, LIMITS[key].at_most, LIMITS[key].also):
        if bound is not None:
            assert getattr(section_with(key, kind.type(bound)), key.split(".")[1]) == bound


def test_integers_become_floats_where_a_float_is_wanted():
    temperature = RolloutConfig(temperature=1).temperature
    assert type(temperature) is float
    assert RewardConfig(functions=["a"], weights=[1]).weights == [1.0]


def test_a_list_is_copied_so_that_the_config_cannot_change_under_the_run():
    names = ["correct"]
    config = RewardConfig(functions=names)
    names.append("format")
    assert config.functions == ["correct"]


def test_a_section_of_another_class_is_refused():
    with pytest.raises(ConfigError, match=r"^rollout=.* must be: RolloutConfig$"):
        Config(rollout=DataConfig())  # pyright: ignore[reportArgumentType]


def test_replace_checks_again():
    with pytest.raises(ConfigError, match=r"^rollout\.n=0 must be: integer at least 1$"):
        dataclasses.replace(RolloutConfig(), n=0)


def test_more_kept_than_generated_is_refused_unless_all_are_kept():
    with pytest.raises(ConfigError, match=r"^selection\.m=16 cannot exceed rollout\.n=8$"):
        Config(rollout=RolloutConfig(n=8), selection=SelectionConfig(m=16))
    config = Config(rollout=RolloutConfig(n=8), selection=SelectionConfig(m=16, rule="all"))
    assert config.kept == 8
    assert Config(rollout=RolloutConfig(n=8), selection=SelectionConfig(m=8)).kept == 8


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"selection": SelectionConfig(m=1)}, r"selection\.m=1 .*at least 2"),
        ({"selection": SelectionConfig(rule="all"), "rollout": RolloutConfig(n=1)}, r"rollout\.n=1 .*at least 2"),
        ({"rollout": RolloutConfig(temperature=0.0)}, r"rollout\.temperature=0 makes all rollouts of a group equal"),
        ({"rollout": RolloutConfig(top_k=1)}, r"rollout\.top_k=1 makes all rollouts of a group equal"),
        ({"data": DataConfig(train_problems=1)}, r"data\.train_problems=1 cannot fill data\.prompts_per_step=4"),
        ({"mesh": MeshConfig(data=3)}, r"data\.prompts_per_step=4 .*mesh\.data=3 = 3 shards"),
        ({"mesh": MeshConfig(data=2, fsdp=4)}, r"data\.prompts_per_step=4 .*mesh\.data=2 x mesh\.fsdp=4 = 8 shards"),
        (
            {"optimizer": OptimizerConfig(schedule="cosine", warmup_steps=9), "run": RunConfig(steps=9)},
            r"optimizer\.warmup_steps=9 .*run\.steps=9 .*cosine",
        ),
    ],
)
def test_impossible_arithmetic_is_refused_with_keys_and_numbers(parts, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        Config(**parts)


def test_a_short_run_at_constant_rate_may_end_within_warm_up():
    assert Config(run=RunConfig(steps=2)).optimizer.warmup_steps > 2


@pytest.mark.parametrize("name", ["", ".", "..", "a/.."])
def test_a_run_name_that_is_no_folder_of_its_own_is_refused(name):
    with pytest.raises(ConfigError, match=r"^run\.name="):
        RunConfig(name=name)


@pytest.mark.parametrize(
    ("functions", "weights", "message"),
    [
        ([], None, r"^reward\.functions= must name at least one"),
        (["correct", "correct"], None, r"^reward\.functions=correct,correct .*none twice"),
        (["correct", "format"], [1.0], r"^reward\.weights has 1 numbers for the 2"),
        (["correct"], [math.nan], r"^reward\.weights=nan must be: list of number, or null"),
        ([1], None, r"^reward\.functions=1 must be: list of text"),
        ("correct", None, r"^reward\.functions='correct' must be: list of text"),
    ],
)
def test_reward_lists_are_checked(functions, weights, message):
    with pytest.raises(ConfigError, match=message):
        RewardConfig(functions=functions, weights=weights)


@pytest.mark.parametrize("sources", [[], ["answer", "answer"]])
def test_no_source_of_an_answer_and_a_repeated_one_are_refused(sources):
    with pytest.raises(ConfigError, match=r"^verify\.sources=.* must name at least one source, and none twice"):
        VerifyConfig(sources=sources)


def test_a_last_number_is_no_answer_unless_it_is_asked_for():
    assert VerifyConfig().sources == EvaluateConfig().verify.sources == ["answer", "boxed"]


@given(prompts=st.integers(1, 12), kept=st.integers(2, 12), shards=st.integers(1, 6))
def test_micro_batch_sizes_are_those_that_cut_each_shard_evenly(prompts, kept, shards):
    prompts *= shards
    sizes = micro_batch_sizes(prompts, kept, shards)
    for size in range(1, prompts * kept + 1):
        part, left = divmod(size, shards)
        within_a_group = part and kept % part == 0
        whole_groups = part and part % kept == 0 and (prompts // shards) % (part // kept) == 0
        assert (size in sizes) == (left == 0 and bool(within_a_group or whole_groups))
    assert all(prompts * kept % size == 0 for size in sizes)


def micro_batched(size, data=1, fsdp=1):
    return Config(
        data=DataConfig(prompts_per_step=6),
        selection=SelectionConfig(m=8),
        update=UpdateConfig(micro_batch=size),
        mesh=MeshConfig(data=data, fsdp=fsdp),
        eval=EvalConfig(batch=60),
    )


def test_a_micro_batch_that_cuts_groups_unevenly_names_the_nearest_sizes():
    for size in (0, 1, 4, 8, 16, 24, 48):
        assert micro_batched(size).update.micro_batch == size
    with pytest.raises(ConfigError, match=r"^update\.micro_batch=12 .*prompts_per_step=6 groups of 8 .*nearest: 8 or 16$"):
        micro_batched(12)
    with pytest.raises(ConfigError, match=r"nearest: 48$"):
        micro_batched(96)


def test_a_micro_batch_is_checked_against_the_shards_once_they_are_known():
    config = micro_batched(3 * 4, fsdp=-1)
    assert check_devices(config, 3) == (1, 3, 1)
    with pytest.raises(ConfigError, match=r"^update\.micro_batch=12 .*nearest: 8 or 16$"):
        check_devices(config, 2)
    with pytest.raises(ConfigError, match=r"^update\.micro_batch=5 "):
        micro_batched(5, fsdp=-1)


@pytest.mark.parametrize(
    ("mesh", "devices", "shape"),
    [
        (MeshConfig(), 8, (1, 8, 1)),
        (MeshConfig(data=2), 8, (2, 4, 1)),
        (MeshConfig(tensor=4), 8, (1, 2, 4)),
        (MeshConfig(data=2, fsdp=2, tensor=2), 8, (2, 2, 2)),
        (MeshConfig(data=1, fsdp=2), 8, (1, 2, 1)),
    ],
)
def test_the_mesh_is_resolved_from_the_device_count(mesh, devices, shape):
    assert check_devices(Config(data=DataConfig(prompts_per_step=8), mesh=mesh), devices) == shape
    assert check_devices(EvaluateConfig(mesh=mesh), devices) == shape


@pytest.mark.parametrize(
    ("config", "devices", "message"),
    [
        (Config(mesh=MeshConfig(tensor=3)), 8, r"mesh\.data=1 x mesh\.tensor=3 = 3 does not divide 8 devices"),
        (Config(mesh=MeshConfig(fsdp=2, tensor=2)), 2, r"mesh\.data=1 x mesh\.fsdp=2 x mesh\.tensor=2 needs 4 .* are 2"),
        (Config(), 8, r"data\.prompts_per_step=4 does not divide over mesh\.data=1 x mesh\.fsdp=8 = 8 shards"),
        (Config(eval=EvalConfig(batch=63)), 2, r"eval\.batch=63 does not divide over .* = 2 shards"),
        (EvaluateConfig(batch=63), 2, r"batch=63 does not divide over .* = 2 shards"),
    ],
)
def test_devices_that_do_not_fit_are_refused_with_all_numbers(config, devices, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_devices(config, devices)


def test_eval_batch_need_not_divide_when_nothing_is_evaluated():
    assert check_devices(Config(eval=EvalConfig(batch=63, every=0)), 2) == (1, 2, 1)


def test_greedy_evaluation_takes_no_samples():
    with pytest.raises(ConfigError, match=r"^rollout\.temperature=0 .*samples=4"):
        EvaluateConfig(rollout=RolloutConfig(temperature=0.0))
    assert EvaluateConfig(rollout=RolloutConfig(temperature=0.0), samples=0).samples == 0


def test_arithmetic_states_counts_worked_by_hand():
    config = Config(
        run=RunConfig(steps=10),
        data=DataConfig(prompts_per_step=3, max_prompt_length=50),
        rollout=RolloutConfig(n=20, max_completion_length=70),
        selection=SelectionConfig(m=4),
        update=UpdateConfig(micro_batch=4, epochs=2),
    )
    generated, trained, run = arithmetic(config)
    assert "3 prompts x 20 rollouts = 60 completions, at most 4,200 tokens" in generated
    assert "3 prompts x 4 kept = 12 completions (max_variance), 3 micro-batches of 4, 2 epochs, at most 1,680 tokens" in trained
    assert "at most 42,000 tokens generated and 16,800 trained" in run
    assert "1 micro-batch of 32, 1 epoch," in arithmetic(Config())[1]


def test_records_are_frozen():
    config = LossConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.beta = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_values_are_shown_as_the_command_line_takes_them():
    given_values = [None, True, False, 3, 1e-5, "x", ["a", "b"], [1.0, 2.5]]
    assert [shown(value) for value in given_values] == ["null", "true", "false", "3", "1e-05", "x", "a,b", "1.0,2.5"]
