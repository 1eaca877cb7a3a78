"""From configuration to the parts that training and evaluation share: policy, prompts, engine, sampling, and their memory."""

import bisect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from pods_jax.algorithm.keeping import make_keep
from pods_jax.algorithm.losses import lookup_loss
from pods_jax.assembly.inputs import Inputs
from pods_jax.assembly.policy import Architecture, make_prepare, model_folder
from pods_jax.config.command_line import to_yaml
from pods_jax.config.entries import Config
from pods_jax.config.fields import ConfigError
from pods_jax.config.sections import ModelConfig, RolloutConfig
from pods_jax.data.loader import make_loader
from pods_jax.data.prompts import eos_ids
from pods_jax.devices.sharding import replicate
from pods_jax.evaluator import Evaluator
from pods_jax.loop import Parts, Settings
from pods_jax.models.lora import join, part
from pods_jax.rollout.compaction import default_width
from pods_jax.rollout.engine import RolloutEngine, default_chunk
from pods_jax.rollout.lanes import Lanes, default_lanes
from pods_jax.rollout.sampling import SamplingParams, sampling_params
from pods_jax.run.checkpoint import Checkpoints
from pods_jax.run.log import RunLog
from pods_jax.types import PromptBatch
from pods_jax.update.learner import Learner, UpdateSettings, abstract_state
from pods_jax.update.microbatches import default_tile
from pods_jax.update.optim import make_optimizer, make_schedule

T = TypeVar("T")
PROMPT_TILE, PROMPT_BUCKETS = 16, 4


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


class Programs:
    """Parts with compiled programs, by what they are made from: runs with equal settings share one, and compile once.

    The runs must be of one model on one mesh.
    """

    def __init__(self):
        self._made: dict[str, Any] = {}

    def get(self, make: Callable[[], T], *settings: Any) -> T:
        """The part made from equal settings before, or a new one; settings are told apart by their ``repr``."""
        key = repr(settings)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def make_parts(
    config: Config,
    inputs: Inputs,
    architecture: Architecture,
    log: RunLog,
    checkpoints: Checkpoints,
    programs: Programs | None = None,
) -> tuple[Parts, Settings]:
    """Builds what the loop puts together, from the configuration and what has been found, under ``jax.set_mesh``.

    Parts with compiled programs are taken from ``programs``, where an equal run beside this one has made them.
    """
    mesh, tokenizer = inputs.mesh, inputs.tokenizer
    programs = programs or Programs()

    def engine(completions: int, prompts: int) -> RolloutEngine:
        make = partial(make_engine, config.model, config.rollout, architecture, mesh, tokenizer, completions)
        make = partial(make, prompt_tokens=config.data.max_prompt_length, prompts=prompts)
        return programs.get(make, "engine", config.model, replace(config.rollout, n=completions), config.lora, prompts)

    sampled = replicate(make_sampling(config.rollout))
    evaluator = partial(
        Evaluator,
        prompts=inputs.held_out,
        batch=config.eval.batch,
        mesh=mesh,
        tokenizer=tokenizer,
        judge=inputs.scorer.correct,
        key=jax.random.key(replicate(np.uint32(config.run.seed))),
    )
    evaluators = {}
    if config.eval.every:
        judged = (config.run.steps // config.eval.every + 2) * len(inputs.held_out)
        greedy = replicate(sampling_params(temperature=0.0))
        evaluators["eval/accuracy"] = evaluator(engine=engine(1, judged), sampling=greedy)
        if config.eval.samples:
            evaluators["eval/sampled_accuracy"] = evaluator(engine=engine(config.eval.samples, judged), sampling=sampled)
    update = UpdateSettings(
        clip_low=config.loss.clip_low,
        clip_high=config.loss.clip_high,
        beta=config.loss.beta,
        temperature=config.rollout.temperature,
        micro_batch=config.update.micro_batch,
        chunk_logits=config.update.logit_chunk,
        data_shards=mesh.shape["data"] * mesh.shape["fsdp"],
        devices=mesh.size,
        tile=default_tile(mesh.devices.flat[0].platform),
        sizes=update_sizes(config, architecture, mesh),
    )
    keep = {
        "rule": config.selection.rule,
        "m": config.kept,
        "ties": config.selection.ties,
        "over": config.advantage.over,
        "eps": config.advantage.eps,
        "skip_no_signal": config.update.skip_no_signal,
    }
    learner = partial(_make_learner, config, architecture, update)
    optimised = (config.optimizer, config.run.steps)
    parts = Parts(
        mesh=mesh,
        tokenizer=tokenizer,
        loader=make_loader(inputs.train_prompts, prompts_per_step=config.data.prompts_per_step, seed=config.data.seed),
        engine=engine(config.rollout.n, config.run.steps * config.data.prompts_per_step),
        sampling=sampled,
        scorer=inputs.scorer,
        keep=programs.get(partial(make_keep, **keep), "keep", keep),
        learner=programs.get(
            learner, "learner", update, config.loss.name, config.model, config.lora, config.update.remat, optimised
        ),
        schedule=programs.get(lambda: jax.jit(make_schedule(*optimised)), "schedule", optimised),
        evaluators=evaluators,
        log=log,
        checkpoints=checkpoints,
        frozen=None,
        reference=None,
    )
    settings = Settings(
        steps=config.run.steps,
        seed=config.run.seed,
        epochs=config.update.epochs,
        eval_every=config.eval.every,
        checkpoint_every=config.run.checkpoint_every,
        prompt_multiple=prompt_multiple(config.data.max_prompt_length),
        config=to_yaml(config),
    )
    return parts, settings


def _make_learner(config: Config, architecture: Architecture, settings: UpdateSettings) -> Learner:
    optimizer = make_optimizer(config.optimizer, config.run.steps)
    return Learner(
        architecture.graph,
        optimizer,
        lookup_loss(config.loss.name),
        settings,
        reference_graph=architecture.base_graph,
        like=abstract_state(part(architecture.shapes)[0], optimizer=optimizer),
    )


def prompt_multiple(limit: int) -> int:
    """Tokens to a multiple of which prompts are padded: at most ``PROMPT_BUCKETS`` lengths, each of which is compiled once."""
    return min(limit, PROMPT_TILE * math.ceil(limit / (PROMPT_TILE * PROMPT_BUCKETS)))
