"""What a run is made of, found and checked before anything is allocated or written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from pods_jax.algorithm.advantages import find_advantage
from pods_jax.algorithm.losses import find_loss
from pods_jax.algorithm.selection import TIES, find_rule
from pods_jax.assembly.policy import find_folders
from pods_jax.config.command_line import config_difference, from_yaml
from pods_jax.config.entries import Config, EvaluateConfig, check_devices
from pods_jax.config.fields import ConfigError
from pods_jax.config.sections import DataConfig, RewardConfig, VerifyConfig
from pods_jax.data.generation import stop_lines
from pods_jax.data.prompts import build_prompts, eos_ids, load_tokenizer
from pods_jax.data.rows import make_source
from pods_jax.data.tasks import find_task, load_splits
from pods_jax.devices.sharding import make_mesh
from pods_jax.lookup import lookup
from pods_jax.models.families import read_spec
from pods_jax.models.spec import DecoderSpec
from pods_jax.rewards.answers import check_kind, gold_fault
from pods_jax.rewards.extraction import check_sources
from pods_jax.rewards.scoring import Scorer, make_scorer
from pods_jax.run.checkpoint import Checkpoints, Progress
from pods_jax.run.sinks import check_sinks
from pods_jax.types import Prompt
from pods_jax.update.optim import SCHEDULES

# What a continued run may change: how long, how often and where it runs, not what it learns from.
FREE_ON_RESUME = (
    "run.name",
    "run.dir",
    "run.steps",
    "run.resume",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.export",
    "run.compile_cache",
    "tuning.",
    "update.micro_batch",
    "update.remat",
    "verify.time_limit",
    "verify.memory_limit_mb",
    "verify.workers",
    "mesh.",
    "eval.",
    "log.",
)


@dataclass(frozen=True)
class Inputs:
    """What a run is made of, found and checked before anything is allocated or written.

    Attributes:
        folder: Run folder; not made yet when the run is a new one.
        mesh: Device mesh.
        scorer: Rewards.
        tokenizer: The policy's.
        train_prompts: Training prompts.
        held_out: Held-out prompts.
        resumed: Progress of the run that is continued, or None.
    """

    folder: Path
    mesh: Mesh
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    train_prompts: list[Prompt]
    held_out: list[Prompt]
    resumed: Progress | None


def find_inputs(config: Config) -> Inputs:
    """Looks up and checks what the configuration names.

    Raises:
        ValueError: a name, a number, a file or a folder that cannot be.
        OSError: a file that cannot be read.
    """
    check_names(config)
    scorer = make_verifier(config.verify, config.reward, max_completion_length=config.rollout.max_completion_length)
    mesh = find_mesh(config)
    folder = run_folder(config)
    resumed = progress_of(config)
    folders = find_folders(config.model.path, config.model.revision)
    spec = read_spec(folders.model)  # first, for reading a tokenizer also reads the config, and trips over a malformed one
    tokenizer = load_tokenizer(folders.tokenizer)
    for line in stop_lines(tokenizer, eos_ids(tokenizer, folders.generation), folders.generation):
        print(line)
    train_prompts, held_out = load_prompts(config.data, tokenizer)
    _check_fit(config, spec, [*train_prompts, *held_out])
    return Inputs(folder, mesh, scorer, tokenizer, train_prompts, held_out, resumed)


def find_mesh(config: Config | EvaluateConfig) -> Mesh:
    """Returns the device mesh.

    Raises:
        ConfigError: it does not fit the devices, or leaves some of another host idle.
    """
    shape = check_devices(config, jax.device_count())
    if jax.process_count() > 1 and math.prod(shape) < jax.device_count():
        raise ConfigError(f"a mesh of {math.prod(shape)} devices leaves some hosts' idle: there are {jax.device_count()}")
    return make_mesh(shape, jax.devices()[: math.prod(shape)])


def check_names(config: Config | EvaluateConfig) -> None:
    """Refuses a name that its table does not have, and numbers that the chosen entry does not have."""
    find_task(config.data.task)
    check_kind(config.data.answer_kind)
    check_sources(config.verify.sources)
    if isinstance(config, Config):
        find_rule(config.selection.rule, config.selection.options)
        lookup(TIES, config.selection.ties, "selection.ties")
        find_advantage(config.advantage.over, config.advantage.options)
        find_loss(config.loss.name, config.loss.options)
        lookup(SCHEDULES, config.optimizer.schedule, "optimizer.schedule")
        check_sinks(config.log.sinks)


def run_folder(config: Config) -> Path:
    """Folder of the run."""
    return Path(config.run.dir) / config.run.name


def progress_of(config: Config) -> Progress | None:
    """Progress of the run that is continued; None when the run is a new one.

    Raises:
        ConfigError: the run's folder exists and is not to be continued, or was started with other settings.
    """
    folder = run_folder(config)
    if not folder.exists() or not any(folder.iterdir()):
        return None
    if not config.run.resume:
        raise ConfigError(f"run.resume=false, but {folder} exists; choose another run.name, or remove the folder")
    checkpoints = Checkpoints(folder / "checkpoints", keep=config.run.keep_checkpoints)
    progress = checkpoints.progress(step) if (step := checkpoints.latest()) is not None else None
    checkpoints.close()
    if progress is not None:
        _check_same(config, from_yaml(Config, progress.config, source=f"checkpoint {progress.step}"), folder)
    return progress


def _check_fit(config: Config, spec: DecoderSpec, prompts: Sequence[Prompt]) -> None:
    """Refuses what the decoder was not made for."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    limit = config.rollout.max_completion_length
    if longest + limit > spec.max_positions:
        raise ConfigError(
            f"rollout.max_completion_length={limit} after a prompt of {longest} tokens exceeds the {spec.max_positions} "
            "positions of the model"
        )
    highest = max(max(prompt.tokens) for prompt in prompts)
    if highest >= spec.vocab_size:
        raise ConfigError(f"the tokenizer gives token {highest}; the model's vocabulary ends at {spec.vocab_size - 1}")


def _check_same(config: Config, before: Config, folder: Path) -> None:
    """Refuses to continue a run with other settings than it was started with."""
    changed = [key for key in config_difference(config, before) if not key.startswith(FREE_ON_RESUME)]
    if changed:
        raise ConfigError(
            f"{folder} was started with another {', '.join(changed)}; "
            "give the same values to continue it, or another run.name to start anew"
        )


def load_prompts(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, evaluation: bool = False
) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts of the task; prints what was loaded, and what was left out and why.

    Args:
        data: Task, source, limits.
        tokenizer: The policy's.
        evaluation: Load no training prompts.

    Raises:
        ValueError: the task, its data or a prompt is refused.
    """
    splits = load_splits(
        data.task,
        train_problems=0 if evaluation else data.train_problems,
        held_out_problems=data.held_out_problems,
        seed=data.seed,
        source=make_source(data),
        few_shot=data.few_shot,
        evaluation=evaluation,
    )
    system = find_task(data.task).system_prompt if data.system_prompt is None else data.system_prompt
    for line in splits.reports:
        print(line)
    loaded: list[list[Prompt]] = []
    for name, problems in (("training", splits.train), ("held-out", splits.held_out)):
        if not problems:
            loaded.append([])
            continue
        unreadable = [problem.id for problem in problems if gold_fault(problem)]
        if unreadable:
            print(f"{len(unreadable)} {name} gold answers cannot be verified: {', '.join(unreadable[:3])} ...")
        prompts, report = build_prompts(
            problems,
            tokenizer,
            max_length=data.max_prompt_length,
            over_long=data.over_long,
            system_prompt=system,
            examples=splits.examples,
        )
        if report.dropped:
            limit = f"data.max_prompt_length={data.max_prompt_length}"
            print(f"{report.dropped} of {len(problems)} {name} prompts are over {limit} and were dropped")
        loaded.append(prompts)
    return loaded[0], loaded[1]


def make_verifier(
    verify: VerifyConfig, rewards: RewardConfig | None = None, *, max_completion_length: int | None = None
) -> Scorer:
    """What scores completions, and judges them for evaluation; without ``rewards`` it only judges.

    Raises:
        ValueError: a reward is unknown or cannot be imported, or the weights do not fit.
    """
    return make_scorer(
        ["correct"] if rewards is None else rewards.functions,
        None if rewards is None else rewards.weights,
        sources=verify.sources,
        max_completion_length=max_completion_length,
        length_margin=RewardConfig().length_margin if rewards is None else rewards.length_margin,
        time_limit=verify.time_limit,
        memory_limit_mb=verify.memory_limit_mb,
        workers=verify.workers,
    )
