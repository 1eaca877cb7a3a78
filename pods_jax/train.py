"""Trains a policy with PODS: ``python -m pods_jax.train --help``.

Reads the configuration, builds the parts, runs the loop, and leaves a run folder: config.yaml, metrics.jsonl, rollouts.jsonl,
checkpoints/, tensorboard/, export/ (a Hugging Face folder) and report.html.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from pods_jax.algorithm.advantages import lookup_advantage
from pods_jax.algorithm.losses import lookup_loss
from pods_jax.algorithm.selection import lookup_rule
from pods_jax.build import (
    check_sampler_sees,
    compiled_at_most,
    load_prompts,
    make_engine,
    make_sampling,
    make_verifier,
    memory_plan,
    update_sizes,
)
from pods_jax.checkpoint import Checkpoints, Progress
from pods_jax.command_line import config_difference, from_yaml, parse, to_yaml
from pods_jax.compiling import keep_compiled, watch_compiling
from pods_jax.config import Config, ConfigError, arithmetic, check_devices
from pods_jax.data.loader import make_loader
from pods_jax.data.prompts import load_tokenizer, pad_prompts
from pods_jax.data.tasks import find_task
from pods_jax.evaluation import Evaluator
from pods_jax.learner import Learner, TrainState, UpdateSettings, abstract_state, init_state, make_keep
from pods_jax.loop import Parts, Settings, train
from pods_jax.models.families import read_spec
from pods_jax.models.hf_weights import export_folder
from pods_jax.models.lora import merge, part
from pods_jax.models.peft_adapters import export_adapters
from pods_jax.models.spec import DecoderSpec
from pods_jax.optim import make_optimizer, make_schedule
from pods_jax.policy import Architecture, find_base, load_policy, make_lora, model_folder
from pods_jax.report import write_report
from pods_jax.rewards.scoring import Scorer
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.sampling import sampling_params
from pods_jax.run_log import RunLog, read_metrics
from pods_jax.sharding import make_mesh, named_sharding, replicate, to_global
from pods_jax.types import Prompt, PromptBatch
from pods_jax.update_plan import default_tile

T = TypeVar("T")
PROMPT_TILE, PROMPT_BUCKETS = 16, 4

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
    "model.layers",
    "rollout.chunk",
    "rollout.sizes",
    "update.micro_batch",
    "update.remat",
    "update.logit_chunk",
    "update.sizes",
    "verify.time_limit",
    "verify.memory_limit_mb",
    "verify.workers",
    "mesh.",
    "eval.",
    "log.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    config = parse(Config, argv, prog="python -m pods_jax.train", description=(__doc__ or "").strip())
    try:
        run(config)
    except ConfigError as error:
        print(f"pods_jax.train: error: {error}", file=sys.stderr)
        return 2
    return 0


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


def find_inputs(config: Config) -> Inputs:
    """Looks up and checks what the configuration names.

    Raises:
        ValueError: a name, a number, a file or a folder that cannot be.
        OSError: a file that cannot be read.
    """
    find_task(config.data.task)
    check_names(config)
    scorer = make_verifier(config.verify, config.reward, max_completion_length=config.rollout.max_completion_length)
    shape = check_devices(config, jax.device_count())
    if jax.process_count() > 1 and math.prod(shape) < jax.device_count():
        raise ConfigError(f"a mesh of {math.prod(shape)} devices leaves some hosts' idle: there are {jax.device_count()}")
    mesh = make_mesh(shape, jax.devices()[: math.prod(shape)])
    folder = run_folder(config)
    resumed = progress_of(config)
    source = model_folder(config.model.path, config.model.revision)
    tokenizer = load_tokenizer(source)
    train_prompts, held_out = load_prompts(config.data, tokenizer)
    _check_fit(config, read_spec(source), [*train_prompts, *held_out])
    return Inputs(folder, mesh, scorer, tokenizer, train_prompts, held_out, resumed)


def check_names(config: Config) -> None:
    """Refuses an unknown rule, kind of advantage or loss."""
    lookup_rule(config.selection.rule)
    lookup_advantage(config.advantage.over)
    lookup_loss(config.loss.name)


def run_folder(config: Config) -> Path:
    """Folder of the run."""
    return Path(config.run.dir) / config.run.name


def join_hosts(config: Config) -> None:
    """Joins the other hosts where the configuration says so, once."""
    if config.mesh.distributed and not jax.distributed.is_initialized():
        jax.distributed.initialize()


def await_all_hosts() -> None:
    """Waits until all processes have looked at the run folders, before one makes them."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("all processes have looked at the run folders before one makes them")


def load_model(config: Config, mesh: Mesh) -> tuple[Architecture, Any]:
    """The policy that a run starts from, on the mesh."""
    remat, lora = config.update.remat == "layer", make_lora(config.lora)
    with jax.set_mesh(mesh):
        return load_policy(config.model, mesh, remat=remat, lora=lora, seed=config.run.seed)


def run(config: Config) -> Path:
    """Trains as configured; returns the run folder.

    Raises:
        ConfigError: the configuration names something that does not exist or cannot be; nothing has been written then.
    """
    join_hosts(config)
    cache = keep_compiled(config.run.compile_cache)
    try:
        inputs = find_inputs(config)
        architecture, *params = load_model(config, inputs.mesh)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    await_all_hosts()

    # The run takes the only reference: a continued one frees these parameters before it reads its own.
    opening = open_run(config, inputs, architecture, params.pop())
    with inputs.scorer, jax.set_mesh(inputs.mesh), watch_compiling() as compiling, opening as opened:
        parts = opened.parts
        plan = memory_plan(config, architecture, inputs.mesh, parts.engine)
        for line in (*arithmetic(config), *plan, *_programs(config, parts, cache)):
            parts.log.say(line)
        if parts.frozen is not None:
            some = inputs.train_prompts[: config.data.prompts_per_step]
            batch = PromptBatch(*pad_prompts(some, multiple=opened.settings.prompt_multiple))  # type: ignore[arg-type]
            check_sampler_sees(parts.engine, opened.state.params, parts.frozen, to_global(inputs.mesh, batch), parts.sampling)
        if opened.done:
            parts.log.say(f"continuing from step {opened.done}")
        state = train(parts, opened.settings, opened.state, opened.done, opened.wall_seconds)
        parts.checkpoints.close()
        if config.run.export:
            _export(config, architecture, parts.policy(state), inputs.folder)
        parts.log.say(f"compiled {compiling.programs:,} programs in {compiling.seconds:,.1f} s, or read them from the cache")
    if jax.process_index() == 0:
        _summary(config, inputs.folder)
    return inputs.folder


def _programs(config: Config, parts: Parts, cache: str | None) -> list[str]:
    """Lines on what is compiled, and where it is kept."""
    limit, prompts = config.data.max_prompt_length, config.data.prompts_per_step
    lengths = math.ceil(limit / prompt_multiple(limit))
    lines = compiled_at_most(parts.engine, parts.learner, prompts=prompts, kept=config.kept, prompt_lengths=lengths)
    return lines if cache is None else [*lines, f"compiled programs are kept in {cache}"]


class SettledCheckpoints(Checkpoints):
    """Checkpoints that are on disk when ``save`` returns: writing one run's never falls into another's time."""

    def save(self, state: Any, progress: Progress) -> None:
        """As in ``Checkpoints``, and waits."""
        super().save(state, progress)
        self._manager.wait_until_finished()


@dataclass
class OpenRun:
    """A run ready for its next step: what ``loop.Trainer`` takes, in its order."""

    parts: Parts
    settings: Settings
    state: TrainState
    done: int
    wall_seconds: float


@contextmanager
def open_run(
    config: Config, inputs: Inputs, architecture: Architecture, params: Any, *, programs: Programs | None = None
) -> Iterator[OpenRun]:
    """Makes the run folder and all parts, at the run's newest checkpoint where it is continued; under ``jax.set_mesh``.

    Args:
        config: The run.
        inputs: What ``find_inputs`` found for it.
        architecture: The policy's.
        params: Its parameters; taken over by the run, unless it shares them.
        programs: Of runs side by side: compiled programs are shared, each run trains a copy of ``params``, and the KL term's
            reference policy is ``params`` itself.
    """
    folder, resumed, first = inputs.folder, inputs.resumed, jax.process_index() == 0
    folder.mkdir(parents=True, exist_ok=True)
    if first:
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    make_checkpoints = SettledCheckpoints if programs else Checkpoints
    checkpoints = make_checkpoints(folder / "checkpoints", keep=config.run.keep_checkpoints)
    log = RunLog(
        folder,
        total_steps=config.run.steps,
        resume_step=resumed.step if resumed else None,
        texts_per_step=config.log.texts_per_step,
        progress=config.log.progress,
        tensorboard=config.log.tensorboard,
        enabled=first,
    )
    with log:
        parts, settings = make_parts(config, inputs, architecture, log, checkpoints, programs)
        trained, frozen = (params, None) if architecture.lora is None else part(params)
        reference = None
        if config.loss.beta > 0:
            # Beside adapters the frozen base is the reference policy; without, parameters that stay as they are.
            reference = frozen or (params if programs else jax.tree.map(jnp.copy, params))
        if programs:
            trained = jax.tree.map(jnp.copy, trained)
        parts = replace(parts, frozen=frozen, reference=reference)
        optimizer = make_optimizer(config.optimizer, config.run.steps)
        if resumed is None:
            opened = OpenRun(parts, settings, init_state(trained, optimizer=optimizer), 0, 0.0)
            del params, trained
        else:
            del params, trained
            shapes = abstract_state(part(architecture.shapes)[0], optimizer=optimizer)
            everywhere = named_sharding(inputs.mesh, ())
            placed = jax.tree.map(lambda x: x.update(sharding=x.sharding or everywhere), shapes)
            parts.loader.set_state(resumed.loader)
            state = checkpoints.restore(resumed.step, placed)
            opened = OpenRun(parts, settings, state, resumed.step, resumed.wall_seconds)
            del state
        yield opened


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


def _export(config: Config, architecture: Architecture, params: Any, folder: Path) -> None:
    """Writes the policy as a Hugging Face folder, and adapters as a PEFT folder beside it."""
    source, dtype = model_folder(config.model.path, config.model.revision), config.model.param_dtype
    if architecture.lora is not None:
        base = find_base(config.model.path, config.model.revision)
        export_adapters(params, architecture.spec, architecture.lora, base, folder / "adapter", overwrite=True)
        params = jax.jit(partial(merge, scale=architecture.lora.scale))(params)
    export_folder(params, architecture.spec, source, folder / "export", dtype=dtype, overwrite=True)


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


def _summary(config: Config, folder: Path) -> None:
    rows = [row for row in read_metrics(folder) if "eval/accuracy" in row]
    if rows:
        before, after = rows[0]["eval/accuracy"], rows[-1]["eval/accuracy"]
        print(f"held-out accuracy: {before:.1%} before, {after:.1%} after {rows[-1]['step']} steps")
    if config.run.export:
        print(f"model:  {folder / 'export'}")
        if (folder / "adapter").is_dir():
            print(f"adapters: {folder / 'adapter'}")
    print(f"report: {write_report(folder)}")


if __name__ == "__main__":
    sys.exit(main())
