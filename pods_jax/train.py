"""Trains a policy with PODS: ``python -m pods_jax.train --help``.

Reads the configuration, builds the parts, runs the loop, and leaves a run folder: config.yaml, metrics.jsonl, rollouts.jsonl,
checkpoints/, tensorboard/, export/ (a Hugging Face folder) and report.html.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from pods_jax.algorithm.advantages import lookup_advantage
from pods_jax.algorithm.losses import lookup_loss
from pods_jax.algorithm.selection import lookup_rule
from pods_jax.build import load_prompts, make_engine, make_sampling, memory_plan
from pods_jax.checkpoint import Checkpoints
from pods_jax.command_line import config_difference, from_yaml, parse, to_yaml
from pods_jax.config import Config, ConfigError, arithmetic, check_devices
from pods_jax.data.loader import make_loader
from pods_jax.data.prompts import load_tokenizer
from pods_jax.data.tasks import find_task
from pods_jax.evaluation import Evaluator
from pods_jax.learner import Learner, UpdateSettings, init_state, make_keep
from pods_jax.loop import Parts, Settings, train
from pods_jax.models.hf_weights import export_folder
from pods_jax.optim import make_optimizer, make_schedule
from pods_jax.policy import Architecture, load_policy, model_folder
from pods_jax.report import write_report
from pods_jax.rewards.answers import is_correct
from pods_jax.rewards.scoring import Scorer, make_scorer
from pods_jax.rollout.sampling import sampling_params
from pods_jax.run_log import RunLog, read_metrics
from pods_jax.sharding import make_mesh
from pods_jax.types import Prompt

PROMPT_MULTIPLE = 16

# What a continued run may change: how long, how often and where it runs, not what it learns from.
FREE_ON_RESUME = (
    "run.steps",
    "run.resume",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.export",
    "run.dir",
    "model.layers",
    "rollout.chunk",
    "update.micro_batch",
    "update.remat",
    "update.logit_chunk",
    "mesh.",
    "eval.",
    "log.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    config = parse(Config, argv, prog="python -m pods_jax.train", description=(__doc__ or "").strip())
    try:
        run(config)
    except (ConfigError, ValueError, FileNotFoundError) as error:
        print(f"pods_jax.train: error: {error}", file=sys.stderr)
        return 2
    return 0


def run(config: Config) -> Path:
    """Trains as configured; returns the run folder.

    Raises:
        ConfigError: the configuration names something that does not exist or cannot be; nothing has been allocated then.
    """
    if config.mesh.distributed:
        jax.distributed.initialize()
    find_task(config.data.task)
    lookup_rule(config.selection.rule)
    lookup_advantage(config.advantage.over)
    lookup_loss(config.loss.name)
    scorer = make_scorer(config.reward.functions, config.reward.weights)
    shape = check_devices(config, jax.device_count())
    mesh = make_mesh(shape, jax.devices()[: math.prod(shape)])
    folder = Path(config.run.dir) / config.run.name
    source = model_folder(config.model.path)
    tokenizer = load_tokenizer(source)
    train_prompts, held_out = load_prompts(config.data, tokenizer)
    _check_folder(config, folder)

    first = jax.process_index() == 0
    checkpoints = Checkpoints(folder / "checkpoints", keep=config.run.keep_checkpoints)
    resumed = checkpoints.progress(step) if (step := checkpoints.latest()) is not None else None
    if resumed is not None:
        _check_same(config, from_yaml(Config, resumed.config, source=f"checkpoint {resumed.step}"), folder)
    if first:
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    log = RunLog(
        folder,
        total_steps=config.run.steps,
        resume_step=resumed.step if resumed else None,
        texts_per_step=config.log.texts_per_step,
        progress=config.log.progress,
        tensorboard=config.log.tensorboard,
        enabled=first,
    )
    with log, jax.set_mesh(mesh):
        architecture, params = load_policy(config.model, mesh, remat=config.update.remat == "layer")
        for line in (*arithmetic(config), *memory_plan(config, architecture, mesh)):
            log.say(line)
        parts, settings = make_parts(config, mesh, tokenizer, architecture, train_prompts, held_out, scorer, log, checkpoints)
        state = jax.jit(partial(init_state, optimizer=make_optimizer(config.optimizer, config.run.steps)))(params)
        if config.loss.beta > 0:
            parts = replace(parts, reference=jax.tree.map(jnp.copy, params))
        done, seconds = 0, 0.0
        if resumed is not None:
            state = checkpoints.restore(resumed.step, state)
            parts.loader.set_state(resumed.loader)
            done, seconds = resumed.step, resumed.wall_seconds
            log.say(f"continuing from step {done}")
        state = train(parts, settings, state, done, seconds)
        checkpoints.close()
        if config.run.export:
            export_folder(
                state.params, architecture.spec, source, folder / "export", dtype=config.model.param_dtype, overwrite=True
            )
    if first:
        _summary(config, folder)
    return folder


def make_parts(
    config: Config,
    mesh: Mesh,
    tokenizer: PreTrainedTokenizerBase,
    architecture: Architecture,
    train_prompts: list[Prompt],
    held_out: list[Prompt],
    scorer: Scorer,
    log: RunLog,
    checkpoints: Checkpoints,
) -> tuple[Parts, Settings]:
    """Builds what the loop puts together, from the configuration and what has been loaded."""
    engine = partial(make_engine, config.model, config.rollout, architecture, mesh, tokenizer)
    sampled = make_sampling(config.rollout)
    evaluator = partial(
        Evaluator,
        prompts=held_out,
        batch=config.eval.batch,
        mesh=mesh,
        tokenizer=tokenizer,
        judge=is_correct,
        key=jax.random.key(config.run.seed),
    )
    evaluators = {}
    if config.eval.every:
        evaluators["eval/accuracy"] = evaluator(engine=engine(1), sampling=sampling_params(temperature=0.0))
        if config.eval.samples:
            evaluators["eval/sampled_accuracy"] = evaluator(engine=engine(config.eval.samples), sampling=sampled)
    learner = Learner(
        architecture.graph,
        make_optimizer(config.optimizer, config.run.steps),
        lookup_loss(config.loss.name),
        UpdateSettings(
            clip_low=config.loss.clip_low,
            clip_high=config.loss.clip_high,
            beta=config.loss.beta,
            temperature=config.rollout.temperature,
            micro_batch=config.update.micro_batch,
            chunk_logits=config.update.logit_chunk,
            data_shards=mesh.shape["data"] * mesh.shape["fsdp"],
            devices=mesh.size,
        ),
    )
    parts = Parts(
        mesh=mesh,
        tokenizer=tokenizer,
        loader=make_loader(
            train_prompts,
            prompts_per_step=config.data.prompts_per_step,
            seed=config.data.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        ),
        engine=engine(config.rollout.n),
        sampling=sampled,
        scorer=scorer,
        keep=make_keep(
            rule=config.selection.rule,
            m=config.kept,
            ties=config.selection.ties,
            over=config.advantage.over,
            eps=config.advantage.eps,
        ),
        learner=learner,
        schedule=make_schedule(config.optimizer, config.run.steps),
        evaluators=evaluators,
        log=log,
        checkpoints=checkpoints,
        reference=None,
    )
    # Processes must agree on the padded length without talking: then every prompt is padded to the limit.
    alone = jax.process_count() == 1
    settings = Settings(
        steps=config.run.steps,
        seed=config.run.seed,
        epochs=config.update.epochs,
        eval_every=config.eval.every,
        checkpoint_every=config.run.checkpoint_every,
        prompt_multiple=min(PROMPT_MULTIPLE, config.data.max_prompt_length) if alone else config.data.max_prompt_length,
        config=to_yaml(config),
    )
    return parts, settings


def _check_folder(config: Config, folder: Path) -> None:
    if not config.run.resume and folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"run.resume=false, but {folder} exists; choose another run.name, or remove the folder")
    folder.mkdir(parents=True, exist_ok=True)


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
    print(f"report: {write_report(folder)}")


if __name__ == "__main__":
    sys.exit(main())
