"""From configuration to the parts that training and evaluation share: policy, prompts, engine, sampling, and their memory."""

import bisect
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from pods_jax.checkpoint import Checkpoints
from pods_jax.command_line import from_yaml
from pods_jax.config import Config, ConfigError, DataConfig, ModelConfig, RewardConfig, RolloutConfig, VerifyConfig
from pods_jax.data.prompts import build_prompts, eos_ids
from pods_jax.data.rows import make_source
from pods_jax.data.tasks import find_task, load_splits
from pods_jax.learner import Learner
from pods_jax.models.lora import LoraSpec, join, part
from pods_jax.policy import Architecture, load_policy, make_lora, make_prepare, model_folder
from pods_jax.rewards.answers import gold_fault
from pods_jax.rewards.scoring import Scorer, make_scorer
from pods_jax.rollout.compaction import default_width
from pods_jax.rollout.engine import Lanes, RolloutEngine, default_chunk, default_lanes
from pods_jax.rollout.sampling import SamplingParams, sampling_params
from pods_jax.sharding import group_shards, replicate
from pods_jax.types import Prompt, PromptBatch


@dataclass(frozen=True)
class PolicySource:
    """Where a policy comes from: a model or adapters alone, or a run that went on from there.

    Attributes:
        model: The model, with its tokenizer; of a run, the one that it started from.
        run: Run folder whose newest checkpoint holds the trained parameters, or None.
        lora: Adapters that the run trains beside the model, or None.
    """

    model: ModelConfig
    run: Path | None = None
    lora: LoraSpec | None = None


def find_policy(model: ModelConfig) -> PolicySource:
    """Tells a run folder (it holds ``config.yaml``, where a model's holds JSON) behind ``model.path`` from any other place.

    Raises:
        ConfigError: the run's configuration cannot be read, or it has no checkpoints.
    """
    folder = Path(model.path).expanduser()
    file = folder / "config.yaml"
    if not file.is_file() or any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return PolicySource(model)
    if not (folder / "checkpoints").is_dir():
        raise ConfigError(f"model.path={folder} is the folder of a run without checkpoints")
    run = from_yaml(Config, file.read_text(encoding="utf-8"), source=str(file))
    return PolicySource(replace(model, path=run.model.path, revision=run.model.revision), folder, make_lora(run.lora))


def load_any_policy(source: PolicySource, mesh: Mesh) -> tuple[Architecture, Any]:
    """Reads a policy from wherever it is; prints which checkpoint of a run was taken.

    Raises:
        ConfigError: the run has no complete checkpoint, or as ``load_policy``.
    """
    if source.run is None:
        return load_policy(source.model, mesh)
    checkpoints = Checkpoints(source.run / "checkpoints")
    try:
        step = checkpoints.latest()
        if step is None:
            raise ConfigError(f"model.path={source.run} is the folder of a run without a complete checkpoint")
        print(f"checkpoint of step {step} of {source.run}")
        architecture, params = load_policy(source.model, mesh, lora=source.lora)
        base = part(params)[1]
        del params  # without adapters the model would lie beside the parameters that take its place
        return architecture, join(checkpoints.restore_params(step, part(architecture.shapes)[0]), base)
    finally:
        checkpoints.close()


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
        train_problems=data.train_problems,
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


def make_engine(
    model: ModelConfig,
    rollout: RolloutConfig,
    architecture: Architecture,
    mesh: Mesh,
    tokenizer: PreTrainedTokenizerBase,
    completions: int,
    *,
    prompt_tokens: int,
    prompts: int,
) -> RolloutEngine:
    """Engine that generates ``completions`` for each prompt and stops on every EOS id of the model's folder.

    Args:
        model: The policy's section.
        rollout: Lengths, chunks, sizes.
        architecture: The policy's.
        mesh: Device mesh.
        tokenizer: The policy's.
        completions: Rollouts of each prompt.
        prompt_tokens: Longest prompt, which decides how many rows share one once the batch has shrunk.
        prompts: Prompts that will be rolled out in all, which decides how many sizes are worth compiling.

    Raises:
        ConfigError: lanes are asked for on several devices.
    """
    if rollout.lanes > 1 and mesh.size > 1:
        raise ConfigError(f"rollout.lanes={rollout.lanes} is for a single device; the mesh has {mesh.size}")
    platform = mesh.devices.flat[0].platform
    flops = 2 * architecture.spec.matrix_weights * prompts * (prompt_tokens + completions * rollout.max_completion_length)
    return RolloutEngine(
        architecture.graph,
        rollouts=completions,
        max_completion_length=rollout.max_completion_length,
        chunk=rollout.chunk or default_chunk(platform),
        eos_ids=eos_ids(tokenizer, model_folder(model.path, model.revision)),
        width=default_width(platform, architecture.spec, prompt_tokens),
        shrink_steps=worthwhile_sizes(flops, architecture, mesh) if rollout.sizes is None else rollout.sizes,
        lanes=Lanes(rollout.lanes) if rollout.lanes else default_lanes(mesh.size, platform, architecture.spec),
        prepare=make_prepare(architecture, mesh, model.compute_dtype),
    )


def update_sizes(config: Config, architecture: Architecture, mesh: Mesh) -> int:
    """Sizes of the update from one half to the next."""
    if config.update.sizes is not None:
        return config.update.sizes
    tokens = config.data.max_prompt_length + config.kept * config.rollout.max_completion_length
    updates = config.run.steps * config.update.epochs
    flops = 6 * architecture.spec.matrix_weights * updates * config.data.prompts_per_step * tokens
    return worthwhile_sizes(flops, architecture, mesh)


def worthwhile_sizes(flops: float, architecture: Architecture, mesh: Mesh) -> int:
    """Sizes of a program from one half to the next that pay: 0 to 3.

    Each size spares a share of the time that the whole run spends in the program, and costs one compilation. Both are roughly
    known beforehand, and are not measured: every process must choose alike.

    Args:
        flops: Floating-point operations of the run in this program.
        architecture: Unrolled layers are compiled one by one.
        mesh: How many devices, and of which kind.
    """
    cpu = mesh.devices.flat[0].platform == "cpu"
    speed = 1e11 if cpu else 1e14 * mesh.size
    compile_seconds = 1.0 + architecture.spec.layers if cpu else 30.0
    return bisect.bisect_right((4, 30, 300), flops / speed / compile_seconds)


def compiled_at_most(engine: RolloutEngine, learner: Learner, *, prompts: int, kept: int, prompt_lengths: int) -> list[str]:
    """Lines that say which programs a run may compile, each once and when it is first needed."""
    lanes = engine.lanes_of(prompts)
    piece, rows = "lane" if lanes > 1 else "shard", prompts // (group_shards() * lanes) * engine.rollouts
    shapes = ", ".join(f"{size:,}" for size in [rows, *engine.row_sizes(rows)])
    caches = ", ".join(f"{size:,}" for size in engine.capacities)
    updates = learner.most_programs(prompts, kept) * len(engine.capacities)
    return [
        f"compiled at most, for each of {prompt_lengths} prompt length{'s' if prompt_lengths > 1 else ''}: "
        f"{engine.most_programs(prompts)} programs of the rollout (rows of a {piece} {shapes}; caches of {caches} tokens), "
        f"{updates} of the update",
    ]


def check_sampler_sees(
    engine: RolloutEngine, trained: Any, frozen: Any, prompts: PromptBatch, sampling: SamplingParams
) -> None:
    """Proves that adapters reach the sampler: with other ones, the engine's first tokens and their probabilities differ.

    Raises:
        RuntimeError: they do not, so that a run would generate with the base alone whatever it learns.
    """

    def first(adapters: Any) -> Any:
        return engine.first_tokens(join(adapters, frozen), prompts, jax.random.key(replicate(np.uint32(0))), sampling)

    moved = jax.jit(lambda adapters: jax.tree.map(lambda x: x + 0.01, adapters))(trained)
    if all(np.array_equal(a, b) for a, b in zip(first(trained), first(moved), strict=True)):
        raise RuntimeError(
            "the adapters do not reach the sampler: with others, its first tokens and log-probabilities are equal"
        )


def make_sampling(rollout: RolloutConfig) -> SamplingParams:
    """Sampling parameters of training and of sampled evaluation."""
    return sampling_params(temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p)


def memory_plan(config: Config, architecture: Architecture, mesh: Mesh, engine: RolloutEngine) -> list[str]:
    """Lines that say what the run holds on each device, in MiB; activations come on top."""
    spec = architecture.spec
    trained, frozen = part(architecture.shapes)
    # Beside adapters the frozen base is the reference policy; without, the KL term keeps a copy of the parameters.
    copies = 5 if config.loss.beta > 0 and not frozen else 4
    held = {
        "parameters, gradient and two moments" + ", reference" * (copies == 5): copies * _bytes_each(trained),
        "frozen base": _bytes_each(frozen),
        "caches of the rollout": _cache_bytes(config, architecture, mesh, engine),
        "logits of a chunk at most": 4 * config.update.logit_chunk,
    }
    axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    adapters = f", of which {_count(trained):,} in adapters are trained" if frozen else ""
    return [
        f"model: {_count(architecture.shapes):,} parameters{adapters}; {spec.layers} layers, vocabulary {spec.vocab_size:,}; "
        f"mesh {axes}",
        "memory of each device: " + "; ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in held.items() if size),
    ]


def _cache_bytes(config: Config, architecture: Architecture, mesh: Mesh, engine: RolloutEngine) -> int:
    """Most bytes of keys and values on one device: what grows, or moves into a smaller batch, is there twice meanwhile."""
    spec, prompt = architecture.spec, config.data.max_prompt_length
    prompts = config.data.prompts_per_step // (mesh.shape["data"] * mesh.shape["fsdp"])
    rows, full = prompts * engine.rollouts, engine.capacities[-1]
    before = [0, *engine.capacities][-2]
    most = prompts * prompt + rows * (before + full)
    lanes = engine.lanes_of(prompts)
    for size in (lanes * size for size in engine.row_sizes(rows // lanes)[:1]):
        tiles = size // engine.width
        most = max(most, prompts * prompt + rows * full + tiles * prompt + size * full)
    kv_heads = max(1, spec.kv_heads // mesh.shape["tensor"])
    return most * 2 * spec.layers * kv_heads * spec.head_size * jnp.dtype(config.model.compute_dtype).itemsize


def _bytes_each(shapes: Any) -> int:
    return sum(math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in jax.tree.leaves(shapes))


def _count(shapes: Any) -> int:
    return sum(math.prod(s.shape) for s in jax.tree.leaves(shapes))
