"""Opens a run: finds and checks what its configuration names, and brings it to its next step, new or continued."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from pods_jax.assembly.inputs import Inputs
from pods_jax.assembly.parts import Programs, make_parts
from pods_jax.assembly.policy import Architecture, load_policy, make_lora
from pods_jax.assembly.texts import keep_template
from pods_jax.config.command_line import to_yaml
from pods_jax.config.entries import Config, EvaluateConfig
from pods_jax.devices.sharding import named_sharding
from pods_jax.loop import Parts, Settings
from pods_jax.models.lora import join, split_adapters
from pods_jax.run.checkpoint import Checkpoints, Progress
from pods_jax.run.log import RunLog
from pods_jax.update.learner import TrainState, abstract_state, init_state
from pods_jax.update.optim import make_optimizer


def join_hosts(config: Config | EvaluateConfig) -> None:
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
        read = {"layers": config.tuning.layers, "remat": remat, "lora": lora, "seed": config.run.seed}
        return load_policy(config.model, mesh, trained=True, **read)


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
        keep_template(inputs.texts, folder)
    make_checkpoints = SettledCheckpoints if programs else Checkpoints
    checkpoints = make_checkpoints(folder / "checkpoints", keep=config.run.keep_checkpoints)
    log = RunLog(
        folder,
        total_steps=config.run.steps,
        resume_step=resumed.step if resumed else None,
        texts_per_step=config.log.texts_per_step,
        progress=config.log.progress,
        sinks=config.log.sinks,
        name=config.run.name,
        config=asdict(config),
        enabled=first,
    )
    with log:
        parts, settings = make_parts(config, inputs, architecture, log, checkpoints, programs)
        trained, frozen = (params, None) if architecture.lora is None else split_adapters(params)
        reference = None
        if config.loss.beta > 0:
            # The policy that the run starts from: new adapters leave it the frozen base; else what is trained is copied.
            drawn = frozen and not architecture.continues_adapters
            reference = frozen if drawn else params if programs else join(jax.tree.map(jnp.copy, trained), frozen)
        if programs:
            trained = jax.tree.map(jnp.copy, trained)
        parts = replace(parts, frozen=frozen, reference=reference)
        optimizer = make_optimizer(config.optimizer)
        if resumed is None:
            opened = OpenRun(parts, settings, init_state(trained, optimizer=optimizer), 0, 0.0)
            del params, trained
        else:
            del params, trained
            shapes = abstract_state(split_adapters(architecture.shapes)[0], optimizer=optimizer)
            everywhere = named_sharding(inputs.mesh, ())
            placed = jax.tree.map(lambda x: x.update(sharding=x.sharding or everywhere), shapes)
            parts.loader.set_state(resumed.loader)
            state = checkpoints.restore(resumed.step, placed)
            opened = OpenRun(parts, settings, state, resumed.step, resumed.wall_seconds)
            del state
        yield opened
