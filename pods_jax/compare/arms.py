"""Which runs are compared: the table of arms, the sweeps, and the configuration of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pods_jax.assembly.inputs import check_names
from pods_jax.config.entries import Config, check_devices, micro_batch_sizes
from pods_jax.config.fields import Checked, ConfigError, Count, CountOrZero, PositiveFraction, Seed, shown

NO_ARMS = ["none"]
C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Attributes:
        description: One line for people.
        changes: From the user's configuration to the dotted keys that the arm sets.
    """

    description: str
    changes: Callable[[Config], Mapping[str, Any]]


def _kept_by(rule: str) -> Callable[[Config], Mapping[str, Any]]:
    return lambda config: {"selection.rule": rule}


def _few(config: Config, *, skip: bool) -> Mapping[str, Any]:
    return {"rollout.n": config.selection.m, "selection.rule": "all", "update.skip_no_signal": skip}


def _all(config: Config, *, skip: bool) -> Mapping[str, Any]:
    return {"selection.rule": "all", "update.skip_no_signal": skip}


ARMS: dict[str, Arm] = {
    "pods": Arm("PODS: n rollouts, the m of maximum variance trained", _kept_by("max_variance")),
    "grpo": Arm("GRPO on m rollouts, as published: groups without signal are trained too", partial(_few, skip=False)),
    "grpo_skip": Arm("GRPO on m rollouts, groups without signal skipped", partial(_few, skip=True)),
    "grpo_ga": Arm("GRPO on all n with gradient accumulation, as published", partial(_all, skip=False)),
    "grpo_ga_skip": Arm("GRPO on all n with gradient accumulation, groups without signal skipped", partial(_all, skip=True)),
    "random": Arm("n rollouts, m of them drawn at random", _kept_by("random")),
    "percentile": Arm("n rollouts, m at evenly spaced ranks of reward", _kept_by("percentile")),
    "max_reward": Arm("n rollouts, the m of highest reward", _kept_by("max_reward")),
}
DEFAULT_ARMS = ["pods", "grpo", "grpo_skip", "grpo_ga", "grpo_ga_skip", "random"]


@dataclass(frozen=True)
class CompareOptions(Checked, key="compare"):
    """What is compared, and where it is kept."""

    arms: list[str] = field(default_factory=lambda: list(DEFAULT_ARMS))
    """Entries of the ARMS table (pods, grpo, grpo_skip, grpo_ga, grpo_ga_skip, random, percentile, max_reward), separated by
    commas; all are compared with the first. "none" only shows compare.imports."""
    seeds: list[Seed] = field(default_factory=lambda: [0])
    """Seeds, separated by commas; each is added to run.seed and to data.seed, and all arms run once with each."""
    out: str | None = None
    """Folder of the comparison: <out>/<arm>/seed<s> is an arm's run, <out>/compare.html the page; unset takes
    <run.dir>/compare/<run.name>."""
    level: PositiveFraction = 0.99
    """The time to a level is the time to this share of the baseline's best accuracy."""
    eval_every: Count = 5
    """Steps between evaluations, in place of eval.every; evaluation is not timed."""
    extra_steps: CountOrZero = 0
    """Steps that the first arm takes beyond run.steps once the others have ended. A cheap step ends its run early on the clock:
    with these it goes on to levels that dearer arms reach late. Needs optimizer.schedule=constant."""
    interleave: Literal["step", "run"] = "step"
    """Step k of all arms in turn, so that noise of the machine falls on all alike; or one run after another, which holds the
    training state of one arm at a time."""
    imports: list[str] = field(default_factory=list)
    """Folders of other runs in this project's form to compare with, as of another machine or trainer: a run, an arm of runs
    (one for each seed), or a comparison; separated by commas."""

    def __post_init__(self):
        super().__post_init__()
        for key in ("arms", "seeds"):
            values = getattr(self, key)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"compare.{key}={shown(values)} must name at least one, and none twice")
        unknown = [name for name in self.arms if name not in ARMS]
        if unknown and self.arms != NO_ARMS:
            raise ConfigError(
                f"compare.arms={shown(self.arms)}: {unknown[0]} is no arm; valid: {', '.join(ARMS)}, or none alone"
            )


@dataclass(frozen=True)
class SweepOptions(Checked, key="sweep"):
    """PODS over several values of one setting, in place of compare.arms."""

    n: list[Count] = field(default_factory=list)
    """Values of rollout.n, separated by commas."""
    m: list[Count] = field(default_factory=list)
    """Values of selection.m, separated by commas."""
    rule: list[str] = field(default_factory=list)
    """Values of selection.rule, separated by commas."""

    KEYS: ClassVar[dict[str, str]] = {"n": "rollout.n", "m": "selection.m", "rule": "selection.rule"}

    def __post_init__(self):
        super().__post_init__()
        for name in self.KEYS:
            if len(set(values := getattr(self, name))) < len(values):
                raise ConfigError(f"sweep.{name}={shown(values)} must name none twice")
        if len(self.chosen) > 1:
            raise ConfigError(f"sweep.{' and sweep.'.join(self.chosen)} cannot be swept at once: compare one after the other")

    @property
    def chosen(self) -> list[str]:
        """What is swept: n, m or rule; nothing, or one."""
        return [name for name in self.KEYS if getattr(self, name)]


@dataclass(frozen=True)
class CompareConfig(Config):
    """Several ways to train, from the same checkpoint over the same prompts, timed in turns."""

    compare: CompareOptions = field(default_factory=CompareOptions)
    sweep: SweepOptions = field(default_factory=SweepOptions)

    unread: ClassVar[Mapping[str, str]] = {
        "run.export": "a comparison exports no model",
        "selection.rule": "every arm has its own rule; compare.arms and sweep.rule choose",
        "eval.every": "compare.eval_every takes its place",
        "log": "the runs of a comparison record their metrics alone",
    }

    def __post_init__(self):
        super().__post_init__()
        if self.sweep.chosen and self.compare.arms != DEFAULT_ARMS:
            raise ConfigError(f"compare.arms={shown(self.compare.arms)} and sweep.{self.sweep.chosen[0]} exclude each other")
        if self.compare.extra_steps and (self.sweep.chosen or self.optimizer.schedule != "constant"):
            other = f"sweep.{self.sweep.chosen[0]}" if self.sweep.chosen else f"optimizer.schedule={self.optimizer.schedule}"
            raise ConfigError(f"compare.extra_steps={self.compare.extra_steps} and {other} exclude each other")
        if self.compare.arms == NO_ARMS and not self.compare.imports:
            raise ConfigError("compare.arms=none leaves nothing to compare: give compare.imports")


ROLLOUT_RUNGS, UPDATE_RUNGS = 1, 2


def out_folder(config: CompareConfig) -> Path:
    """Folder of the comparison."""
    return Path(config.compare.out or Path(config.run.dir) / "compare" / config.run.name)


def arms_of(config: CompareConfig) -> dict[str, Arm]:
    """The arms by name, in order; of a sweep one for each value, and none for ``compare.arms=none``."""
    if config.compare.arms == NO_ARMS:
        return {}
    if not config.sweep.chosen:
        return {name: ARMS[name] for name in config.compare.arms}
    [swept] = config.sweep.chosen
    arms = {}
    for value in getattr(config.sweep, swept):
        changes = {"selection.rule": "max_variance", SweepOptions.KEYS[swept]: value}
        arms[f"{swept}={value}"] = Arm(f"PODS with {SweepOptions.KEYS[swept]}={value}", lambda _, changes=changes: changes)
    return arms


def arm_configs(config: CompareConfig, device_count: int) -> dict[str, Config]:
    """Configuration of each arm's run with seed 0, all with one micro-batch.

    Raises:
        ConfigError: an arm cannot be; the message names the arm, or the swept key and value.
    """
    plain = Config(**{item.name: getattr(config, item.name) for item in fields(Config)})
    common = {
        "run.export": False,
        "log.progress": False,
        "log.sinks": [],
        "eval.every": config.compare.eval_every,
        "run.dir": str(out_folder(config)),
        # Compiling is not timed, so no arm has a reason to compute padding.
        "tuning.rollout_rungs": ROLLOUT_RUNGS if config.tuning.rollout_rungs is None else config.tuning.rollout_rungs,
        "tuning.update_rungs": UPDATE_RUNGS if config.tuning.update_rungs is None else config.tuning.update_rungs,
    }
    configs: dict[str, Config] = {}
    for name, arm in arms_of(config).items():
        given = f"sweep.{name}" if config.sweep.chosen else f"compare.arms={name}"
        try:
            steps = {"run.steps": plain.run.steps + (0 if configs else config.compare.extra_steps)}
            configs[name] = with_values(plain, common | steps | dict(arm.changes(plain)))
            check_names(configs[name])
            check_devices(configs[name], device_count)
        except ValueError as error:
            raise ConfigError(f"{given}: {error}") from error
    if plain.update.micro_batch or not configs:
        return configs
    size = common_micro_batch(list(configs.values()), device_count)
    return {name: with_values(one, {"update.micro_batch": size}) for name, one in configs.items()}


def common_micro_batch(configs: Sequence[Config], device_count: int) -> int:
    """Largest micro-batch that cuts every arm's update and is no larger than the smallest update of all."""
    shared: set[int] | None = None
    for config in configs:
        data, fsdp, _ = check_devices(config, device_count)
        sizes = set(micro_batch_sizes(config.data.prompts_per_step, config.kept, data * fsdp))
        shared = sizes if shared is None else shared & sizes
    smallest = min(config.data.prompts_per_step * config.kept for config in configs)
    return max(size for size in shared or {smallest} if size <= smallest)


def of_seed(config: Config, name: str, seed: int) -> Config:
    """The run of an arm with one of ``compare.seeds``."""
    seeds = {"run.seed": (config.run.seed + seed) % 2**32, "data.seed": (config.data.seed + seed) % 2**32}
    return with_values(config, seeds | {"run.dir": str(Path(config.run.dir) / name), "run.name": f"seed{seed}"})


def with_values(config: C, values: Mapping[str, Any]) -> C:
    """The configuration with other values of some dotted keys, all changed at once."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, leaf = key.partition(".")
        sections.setdefault(section, {})[leaf] = value
    return replace(config, **{name: replace(getattr(config, name), **changes) for name, changes in sections.items()})
