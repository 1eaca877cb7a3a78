"""The arms side by side: from one checkpoint over the same prompts, step k of each in turn, the order rotating."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import jax

from pods_jax.assembly.inputs import find_inputs, progress_of, run_folder
from pods_jax.assembly.opening import await_all_hosts, load_model, open_run
from pods_jax.assembly.parts import Programs
from pods_jax.assembly.policy import Architecture
from pods_jax.compare.arms import of_seed
from pods_jax.config.entries import Config
from pods_jax.config.fields import ConfigError, shown
from pods_jax.devices.compiling import keep_compiled
from pods_jax.loop import Trainer
from pods_jax.models.lora import split_adapters
from pods_jax.run.checkpoint import Progress

Say = Callable[[str], None]


@dataclass(frozen=True)
class Unfinished:
    """Runs of one seed that still have steps to take, by arm, and how far each is."""

    seed: int
    configs: dict[str, Config]
    progress: dict[str, Progress | None]


def find_unfinished(configs: Mapping[str, Config], seeds: list[int]) -> list[Unfinished]:
    """Looks at the run folders of all seeds, and refuses those that were started with other settings.

    Raises:
        ConfigError: as ``train.progress_of``.
    """
    found = []
    for seed in seeds:
        runs = {name: of_seed(config, name, seed) for name, config in configs.items()}
        progress = {name: progress_of(run) for name, run in runs.items()}
        left = {name: run for name, run in runs.items() if (at := progress[name]) is None or at.step < run.run.steps}
        if left:
            found.append(Unfinished(seed, left, progress))
    return found


def run_all(unfinished: list[Unfinished], *, interleave: str, say: Say, after_seed: Callable[[int], None]) -> None:
    """Runs what is left, one seed after another; ``after_seed`` is called whenever the runs of one are complete.

    Raises:
        ConfigError: the configuration names something that does not exist or cannot be.
    """
    programs = Programs()
    if unfinished:
        keep_compiled(next(iter(unfinished[0].configs.values())).run.compile_cache)
    for runs in unfinished:
        _run_seed(runs, programs, interleave, say)
        after_seed(runs.seed)


def _run_seed(runs: Unfinished, programs: Programs, interleave: str, say: Say) -> None:
    first = next(iter(runs.configs.values()))
    try:
        inputs = find_inputs(first)
        architecture, params = load_model(first, inputs.mesh)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    await_all_hosts()
    say(f"seed {runs.seed}: {state_plan(architecture, len(runs.configs), interleave)}")
    blocks = [runs.configs] if interleave == "step" else [{name: config} for name, config in runs.configs.items()]
    with inputs.scorer, jax.set_mesh(inputs.mesh):
        for block in blocks:
            with ExitStack() as stack:
                trainers = {}
                for name, config in block.items():
                    own = replace(inputs, folder=run_folder(config), resumed=runs.progress[name])
                    opened = stack.enter_context(open_run(config, own, architecture, params, programs=programs))
                    stack.callback(opened.parts.checkpoints.close)
                    settings = replace(opened.settings, record_rollouts=False)
                    trainers[name] = Trainer(opened.parts, settings, opened.state, opened.done, opened.wall_seconds)
                    del opened.state
                take_turns(trainers, say=lambda text: say(f"seed {runs.seed}  {text}"))


def take_turns(trainers: Mapping[str, Trainer], *, say: Say) -> None:
    """Takes step k of every run before step k + 1 of any, beginning with another one at each step.

    Runs that are further on, as after an interruption, wait for the others.
    """
    names, start = list(trainers), time.perf_counter()
    for trainer in trainers.values():
        trainer.begin()
    first = min(trainer.done for trainer in trainers.values())
    last = max(trainer.settings.steps for trainer in trainers.values())
    for step in range(first + 1, last + 1):
        turn = step % len(names)
        for name in (*names[turn:], *names[:turn]):
            if trainers[name].done < step <= trainers[name].settings.steps:
                trainers[name].step()
        every = trainers[names[0]].settings.eval_every
        if step == last or (every and step % every == 0):
            left = (time.perf_counter() - start) / (step - first) * (last - step)
            say(f"step {step}/{last}  {_accuracies(trainers)}  {math.ceil(left):,} s left")


def state_plan(architecture: Architecture, arms: int, interleave: str) -> str:
    """Says what the training states of the arms take on each device."""
    trained = split_adapters(architecture.shapes)[0]
    leaves = jax.tree.leaves(trained)
    size = 3 * sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves) / 2**20
    held = arms if interleave == "step" else 1
    text = f"{arms} runs; parameters and two moments of {held} at a time take {held} x {size:,.1f} MiB of each device"
    return text if held == 1 else f"{text} (compare.interleave=run holds one at a time)"


def _accuracies(trainers: Mapping[str, Trainer]) -> str:
    known = {name: trainer.accuracy for name, trainer in trainers.items() if trainer.accuracy is not None}
    return "  ".join(f"{name} {accuracy:.1%}" for name, accuracy in known.items()) or shown(list(trainers))
