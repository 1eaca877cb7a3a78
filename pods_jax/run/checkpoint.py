"""Checkpoints of a run: training state, loader position and clock, complete or not there at all."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


@dataclass(frozen=True)
class Progress:
    """What a run needs besides its arrays to go on as if it had never stopped.

    Attributes:
        step: Steps done.
        wall_seconds: Elapsed clock, interruptions excluded.
        loader: The loader's ``get_state()``.
        config: Resolved configuration as YAML.
    """

    step: int
    wall_seconds: float
    loader: dict[str, Any]
    config: str


class Checkpoints:
    """Numbered checkpoints in one folder, the newest ``keep`` of them; all of them without a number.

    orbax writes each under a temporary name and renames it when it is whole, so a run killed at any moment finds only complete
    ones.
    """

    def __init__(self, folder: Path, *, keep: int | None = None):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, state: Any, progress: Progress) -> None:
        """Writes state and progress under the step's number; returns when the state has been copied out."""
        meta = {
            "step": progress.step,
            "wall_seconds": progress.wall_seconds,
            "loader": json.dumps(progress.loader),
            "config": progress.config,
        }
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(meta))  # type: ignore[call-arg]
        self._manager.save(progress.step, args=items)

    def progress(self, step: int) -> Progress:
        """Reads the progress of one checkpoint, without its arrays."""
        items = ocp.args.Composite(progress=ocp.args.JsonRestore())
        meta = self._manager.restore(step, args=items)["progress"]
        return Progress(meta["step"], meta["wall_seconds"], json.loads(meta["loader"]), meta["config"])

    def restore(self, step: int, like: Any) -> Any:
        """Reads the state of one checkpoint to the shapes, dtypes and shardings of ``like``, which may be of another mesh."""
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(target))  # type: ignore[call-arg]
        return self._manager.restore(step, args=items)["state"]

    def restore_params(self, step: int, like: Any) -> Any:
        """Reads the trained parameters of one checkpoint, and neither moments nor counters, as ``restore`` does."""
        like = {"params": like}
        arguments = ocp.args.PyTreeRestore(  # type: ignore[call-arg]
            item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
        )
        return self._manager.restore(step, args=ocp.args.Composite(state=arguments))["state"]["params"]

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()
