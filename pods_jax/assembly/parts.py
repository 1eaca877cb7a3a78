"""From configuration to the parts that training and evaluation share: policy, prompts, engine, sampling, and their memory."""

import bisect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from pods_jax.algorithm.advantages import find_advantage
from pods_jax.algorithm.keeping import make_keep
from pods_jax.algorithm.losses import Numbers, find_loss
from pods_jax.algorithm.selection import find_rule
from pods_jax.assembly.inputs import Inputs
from pods_jax.assembly.policy import Architecture, make_prepare
from pods_jax.config.command_line import to_yaml
from pods_jax.config.entries import Config
from pods_jax.config.fields import ConfigError
from pods_jax.config.sections import OptimizerConfig, RolloutConfig, TuningConfig
from pods_jax.data.loader import make_loader
from pods_jax.devices.sharding import replicate, spread, to_local
from pods_jax.evaluator import Evaluator
from pods_jax.loop import Parts, Settings
from pods_jax.models.lora import join, split_adapters
from pods_jax.rollout.compaction import default_width
from pods_jax.rollout.engine import Engine, RolloutEngine, default_chunk
from pods_jax.rollout.lanes import Lanes, default_lanes
from pods_jax.rollout.sampling import SamplingParams, sampling_params
from pods_jax.run.checkpoint import Checkpoints
from pods_jax.run.log import RunLog
from pods_jax.types import PromptBatch
from pods_jax.update.learner import Learner, UpdateSettings, abstract_state
from pods_jax.update.microbatches import default_multiple
from pods_jax.update.optim import make_optimizer, make_schedule

T = TypeVar("T")
PROMPT_MULTIPLE, PROMPT_LENGTHS = 16, 4


def engine_numbers(
    rollout: RolloutConfig,
    tuning: TuningConfig,
    architecture: Architecture,
    mesh: Mesh,
    stop_ids: Sequence[int],
    completions: int,
    *,
    prompt_length: int,
    prompts: int,
) -> dict[str, Any]:
    """Plain numbers of the engine that generates ``completions`` for each prompt.

    Args:
        rollout: Lengths.
        tuning: What suits the machine.
        architecture: The policy's.
        mesh: Device mesh.
        stop_ids: Tokens that end a completion.
        completions: Rollouts of each prompt.
        prompt_length: Longest prompt in tokens, which decides how many rows share one once the batch has shrunk.
        prompts: Prompts that will be rolled out in all, which decides how many sizes are worth compiling.

    Raises:
        ConfigError: Lanes are asked for on several devices.
    """
    if tuning.lanes > 1 and mesh.size > 1:
        raise ConfigError(f"tuning.lanes={tuning.lanes} is for a single device; the mesh has {mesh.size}")
    platform, spec = mesh.devices.flat[0].platform, architecture.spec
    flops = 2 * spec.matrix_weights * prompts * (prompt_length + completions * rollout.max_completion_length)
    return {
        "rollouts": completions,
        "max_completion_length": rollout.max_completion_length,
        "chunk": tuning.cache_chunk or default_chunk(platform),
        "eos_ids": tuple(stop_ids),
        "width": default_width(platform, spec, prompt_length),
        "rungs": worthwhile_rungs(flops, architecture, mesh) if tuning.rollout_rungs is None else tuning.rollout_rungs,
        "lanes": Lanes(tuning.lanes) if tuning.lanes else default_lanes(mesh.size, platform, spec),
    }


def make_engine(architecture: Architecture, mesh: Mesh, compute_dtype: str, **numbers: Any) -> RolloutEngine:
    """The package's own engine with the numbers of ``engine_numbers``."""
    return RolloutEngine(architecture.graph, prepare=make_prepare(architecture, mesh, compute_dtype), **numbers)


def update_settings(config: Config, architecture: Architecture, mesh: Mesh) -> UpdateSettings:
    """Plain numbers of the update."""
    rungs = config.tuning.update_rungs
    if rungs is None:
        tokens = config.data.max_prompt_length + config.kept * config.rollout.max_completion_length
        updates = config.run.steps * config.update.epochs
        flops = 6 * architecture.spec.matrix_weights * updates * config.data.prompts_per_step * tokens
        rungs = worthwhile_rungs(flops, architecture, mesh)
    return UpdateSettings(
        loss=find_loss(config.loss.name, config.loss.options),
        numbers=Numbers(config.loss.clip_low, config.loss.clip_high, config.loss.beta),
        temperature=config.rollout.temperature,
        epochs=config.update.epochs,
        micro_batch=config.update.micro_batch,
        logit_chunk=config.tuning.logit_chunk,
        multiple=default_multiple(mesh.devices.flat[0].platform),
        rungs=rungs,
    )


def worthwhile_rungs(flops: float, architecture: Architecture, mesh: Mesh) -> int:
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


def check_sampler_sees(engine: Engine, trained: Any, frozen: Any, prompts: PromptBatch, sampling: SamplingParams) -> None:
    """Proves that adapters reach the sampler: with other ones, the engine's first tokens and their probabilities differ.

    Raises:
        RuntimeError: they do not, so that a run would generate with the base alone whatever it learns.
    """

    limit_PN = spread(np.ones((len(prompts.length_P), engine.rollouts), np.int32))

    def first(adapters: Any) -> Any:
        key = jax.random.key(replicate(np.uint32(0)))
        rollouts = engine(join(adapters, frozen), prompts, key, sampling, limit_PN)
        return to_local((rollouts.tokens_PNC, rollouts.logp_PNC))

    moved = jax.jit(lambda adapters: jax.tree.map(lambda x: x + 0.01, adapters))(trained)
    if all(np.array_equal(a, b) for a, b in zip(first(trained), first(moved), strict=True)):
        raise RuntimeError(
            "the adapters do not reach the sampler: with others, its first tokens and log-probabilities are equal"
        )


def make_sampling(rollout: RolloutConfig) -> SamplingParams:
    """Sampling parameters of training and of sampled evaluation."""
    return sampling_params(temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p)


class Programs:
    """Parts with compiled programs, by what they are made from: runs with equal numbers share one, and compile once.

    The runs must be of one model on one mesh.
    """

    def __init__(self):
        self._made: dict[str, Any] = {}

    def get(self, make: Callable[..., T], **numbers: Any) -> T:
        """The part made from equal numbers before, or a new one. ``make`` gets nothing else that differs between runs."""
        key = repr((getattr(make, "func", make), sorted(numbers.items())))
        if key not in self._made:
            self._made[key] = make(**numbers)
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

    Parts with compiled programs are taken from ``programs``, where an equal run next to this one has made them.
    """
    mesh, programs = inputs.mesh, programs or Programs()

    def engine(completions: int, prompts: int) -> RolloutEngine:
        of = (config.rollout, config.tuning, architecture, mesh, inputs.texts.stop_ids, completions)
        numbers = engine_numbers(*of, prompt_length=config.data.max_prompt_length, prompts=prompts)
        return programs.get(partial(make_engine, architecture, mesh, config.model.compute_dtype), **numbers)

    sampled = replicate(make_sampling(config.rollout))
    parts = Parts(
        mesh=mesh,
        tokenizer=inputs.texts.tokenizer,
        stop_ids=inputs.texts.stop_ids,
        loader=make_loader(inputs.train_prompts, prompts_per_step=config.data.prompts_per_step, seed=config.data.seed),
        engine=engine(config.rollout.n, config.run.steps * config.data.prompts_per_step),
        sampling=sampled,
        scorer=inputs.scorer,
        keep=programs.get(
            make_keep,
            rule=find_rule(config.selection.rule, config.selection.options),
            m=config.kept,
            ties=config.selection.ties,
            advantage=find_advantage(config.advantage.over, config.advantage.options),
            eps=config.advantage.eps,
            skip_no_signal=config.update.skip_no_signal,
        ),
        learner=programs.get(
            partial(make_learner, architecture),
            optimizer=config.optimizer,
            steps=config.run.steps,
            settings=update_settings(config, architecture, mesh),
        ),
        evaluators=_evaluators(config, inputs, engine, sampled),
        log=log,
        checkpoints=checkpoints,
        frozen=None,
        reference=None,
    )
    settings = Settings(
        steps=config.run.steps,
        seed=config.run.seed,
        eval_every=config.eval.every,
        checkpoint_every=config.run.checkpoint_every,
        prompt_multiple=prompt_multiple(config.data.max_prompt_length),
        config=to_yaml(config),
    )
    return parts, settings


def _evaluators(
    config: Config, inputs: Inputs, engine: Callable[[int, int], Engine], sampled: SamplingParams
) -> list[Evaluator]:
    """Greedy accuracy, and where asked for the mean accuracy of sampled completions."""
    if not config.eval.every:
        return []
    judged = (config.run.steps // config.eval.every + 2) * len(inputs.held_out)
    chosen = {"eval/accuracy": (1, replicate(sampling_params(temperature=0.0)))}
    if config.eval.samples:
        chosen["eval/sampled_accuracy"] = (config.eval.samples, sampled)
    return [
        Evaluator(
            name=name,
            engine=engine(completions, judged),
            sampling=sampling,
            prompts=inputs.held_out,
            batch=config.eval.batch,
            mesh=inputs.mesh,
            tokenizer=inputs.texts.tokenizer,
            stop_ids=inputs.texts.stop_ids,
            judge=inputs.scorer.correct,
            key=jax.random.key(replicate(np.uint32(config.run.seed))),
        )
        for name, (completions, sampling) in chosen.items()
    ]


def make_learner(architecture: Architecture, *, optimizer: OptimizerConfig, steps: int, settings: UpdateSettings) -> Learner:
    """The learner of a policy, for a run of so many steps."""
    transformation = make_optimizer(optimizer)
    return Learner(
        architecture.graph,
        transformation,
        make_schedule(optimizer, steps),
        settings,
        reference_graph=architecture.reference_graph,
        like=abstract_state(split_adapters(architecture.shapes)[0], optimizer=transformation),
    )


def prompt_multiple(limit: int) -> int:
    """Tokens to a multiple of which prompts are padded: at most ``PROMPT_LENGTHS`` lengths, each of which is compiled once."""
    return min(limit, PROMPT_MULTIPLE * math.ceil(limit / (PROMPT_MULTIPLE * PROMPT_LENGTHS)))
