"""What training and evaluation read: the sections of each, what must hold across them, and the arithmetic that follows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from pods_jax.config.fields import Checked, ConfigError, Count, CountOrZero, Seed
from pods_jax.config.sections import (
    AdvantageConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    LoraConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SelectionConfig,
    TuningConfig,
    UpdateConfig,
    VerifyConfig,
)


@dataclass(frozen=True)
class Config(Checked):
    """PODS: many rollouts for each prompt, the most informative few trained."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def kept(self) -> int:
        """Rollouts trained of each group: n under the rule "all", m under any other."""
        return self.rollout.n if self.selection.rule == "all" else self.selection.m

    def __post_init__(self):
        super().__post_init__()
        _check_groups(self)
        _check_micro_batch(self)
        if self.optimizer.schedule != "constant" and self.optimizer.warmup_steps >= self.run.steps:
            raise ConfigError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} leaves nothing of run.steps={self.run.steps} "
                f"for optimizer.schedule={self.optimizer.schedule}"
            )


@dataclass(frozen=True)
class EvaluateConfig(Checked):
    """Accuracy of a model on held-out problems: greedy, and over sampled completions."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    samples: CountOrZero = 4
    """Completions sampled for each problem besides the greedy one (k of pass@k and maj@k); 0 is greedy alone."""
    batch: Count = 64
    """Problems generated at once, over all devices."""
    seed: Seed = 0
    """Seed of sampling."""
    out: str | None = None
    """JSONL file to write, one completion and its verdict a line; unset writes none."""
    compile_cache: str = "auto"
    """Where compiled programs are kept for the next start, as run.compile_cache of training."""

    unread: ClassVar[Mapping[str, str]] = {
        "data.prompts_per_step": "batch is the number of problems generated at once",
        "data.train_problems": "nothing is trained",
        "rollout.n": "samples is the number of completions of each problem",
        "tuning.update_rungs": "nothing is trained",
        "tuning.logit_chunk": "nothing is trained",
    }

    def __post_init__(self):
        super().__post_init__()
        if self.samples and self.rollout.greedy_by:
            raise ConfigError(f"{self.rollout.greedy_by} makes all samples={self.samples} of a problem equal; set samples=0")


def _check_groups(config: Config) -> None:
    """Refuse groups that cannot be filled, kept, or learned from."""
    n, m, rule = config.rollout.n, config.selection.m, config.selection.rule
    if rule != "all" and m > n:
        raise ConfigError(f"selection.m={m} cannot exceed rollout.n={n}")
    if config.kept == 1:
        key = "rollout.n=1 with selection.rule=all" if rule == "all" else "selection.m=1"
        raise ConfigError(f"{key} keeps one rollout of a group, whose advantage is always 0; keep at least 2")
    if config.rollout.greedy_by:
        raise ConfigError(f"{config.rollout.greedy_by} makes all rollouts of a group equal, so nothing is learned from them")
    prompts, problems = config.data.prompts_per_step, config.data.train_problems
    if 0 < problems < prompts:
        raise ConfigError(f"data.train_problems={problems} cannot fill data.prompts_per_step={prompts}")
    _require_even({"data.prompts_per_step": prompts}, config.mesh.data, max(config.mesh.fsdp, 1))


def _check_micro_batch(config: Config) -> None:
    """Refuse a micro-batch that no number of shards allows; ``check_devices`` knows the number when fsdp is -1."""
    prompts, data, fsdp = config.data.prompts_per_step, config.mesh.data, config.mesh.fsdp
    shards = [data * rest for rest in ([fsdp] if fsdp > 0 else _divisors(prompts // data))]
    _require_size(config, sorted({size for count in shards for size in micro_batch_sizes(prompts, config.kept, count)}))


def _require_even(sizes: dict[str, int], data: int, fsdp: int) -> None:
    over = f"mesh.data={data}" + (f" x mesh.fsdp={fsdp}" if fsdp > 1 else "")
    for key, size in sizes.items():
        if size % (data * fsdp):
            raise ConfigError(f"{key}={size} does not divide over {over} = {data * fsdp} shards")


def _require_size(config: Config, sizes: list[int]) -> None:
    size, prompts = config.update.micro_batch, config.data.prompts_per_step
    if size and size not in sizes:
        nearest = [*[s for s in sizes if s < size][-1:], *[s for s in sizes if s > size][:1]]
        raise ConfigError(
            f"update.micro_batch={size} does not cut data.prompts_per_step={prompts} groups of {config.kept} kept rollouts "
            f"into whole groups or equal parts of a group on each shard; nearest: {' or '.join(map(str, nearest))}"
        )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def micro_batch_sizes(prompts: int, kept: int, shards: int) -> list[int]:
    """Sizes, in rollouts over all devices, into which an update of ``prompts x kept`` rollouts can be cut.

    Each of the ``shards`` holds ``prompts / shards`` groups and takes an equal part of a micro-batch: some whole groups, or an
    equal part of one group.
    """
    parts = {*_divisors(kept), *(kept * groups for groups in _divisors(prompts // shards))}
    return sorted(shards * part for part in parts)


def check_devices(config: Config | EvaluateConfig, device_count: int) -> tuple[int, int, int]:
    """Check the mesh against the devices there are, and what is spread over them.

    Args:
        config: The run's or the evaluation's configuration.
        device_count: Devices of all processes.

    Returns:
        The sizes of the mesh axes data, fsdp and tensor; they may use fewer devices than there are, if all three are set.

    Raises:
        ConfigError: The mesh does not fit the devices, or prompts, problems or micro-batches do not divide over it.
    """
    mesh = config.mesh
    fixed = mesh.data * mesh.tensor
    if mesh.fsdp == -1 and device_count % fixed:
        raise ConfigError(f"mesh.data={mesh.data} x mesh.tensor={mesh.tensor} = {fixed} does not divide {device_count} devices")
    fsdp = device_count // fixed if mesh.fsdp == -1 else mesh.fsdp
    if fixed * fsdp > device_count:
        sizes = f"mesh.data={mesh.data} x mesh.fsdp={fsdp} x mesh.tensor={mesh.tensor}"
        raise ConfigError(f"{sizes} needs {fixed * fsdp} devices; there are {device_count}")
    if isinstance(config, EvaluateConfig):
        _require_even({"batch": config.batch}, mesh.data, fsdp)
    else:
        prompts, batch = config.data.prompts_per_step, config.eval.batch
        evaluated = {"eval.batch": batch} if config.eval.every else {}
        _require_even({"data.prompts_per_step": prompts} | evaluated, mesh.data, fsdp)
        _require_size(config, micro_batch_sizes(prompts, config.kept, mesh.data * fsdp))
    return mesh.data, fsdp, mesh.tensor


def arithmetic(config: Config) -> list[str]:
    """Lines that a run prints at its start: what each step generates and trains, and the most tokens that takes."""
    prompts, n, kept = config.data.prompts_per_step, config.rollout.n, config.kept
    length, epochs, steps = config.rollout.max_completion_length, config.update.epochs, config.run.steps
    generated, trained = prompts * n, prompts * kept
    parts = trained // config.update.micro_batch if config.update.micro_batch else 1
    cut = f"{parts} micro-batch{'es' if parts > 1 else ''} of {trained // parts}"
    tokens, kept_tokens = generated * length, trained * length * epochs
    return [
        f"generated a step: {prompts} prompts x {n} rollouts = {generated:,} completions, at most {tokens:,} tokens",
        f"trained a step: {prompts} prompts x {kept} kept = {trained:,} completions ({config.selection.rule}), "
        f"{cut}, {epochs} epoch{'s' if epochs > 1 else ''}, at most {kept_tokens:,} tokens",
        f"in {steps:,} steps: at most {steps * tokens:,} tokens generated and {steps * kept_tokens:,} trained; "
        f"prompts of at most {config.data.max_prompt_length:,} tokens are computed once per group",
    ]
