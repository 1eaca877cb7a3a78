"""What the benchmarks of the update and of the whole step share: the learner of a training run, and its options."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from pods_jax.algorithm.losses import LOSSES
from pods_jax.bench.workload import Policy
from pods_jax.config.fields import Checked, Count, CountOrZero
from pods_jax.config.sections import OptimizerConfig
from pods_jax.update.learner import Learner, TrainState, UpdateSettings, init_state
from pods_jax.update.optim import make_optimizer


@dataclass(frozen=True)
class UpdateCut(Checked, key="update"):
    """How the update is cut to fit memory; the fields of a training run's section of the same name."""

    micro_batch: CountOrZero = 0
    """Rollouts of one micro-batch; 0 trains the whole batch at once."""
    remat: bool = False
    """Recompute each layer's activations in the backward pass."""
    logit_chunk: Count = 4_194_304
    """Most logits computed at once."""
    rungs: CountOrZero = 3
    """Sizes from one half to the next that a packed update may have; 0 trains all padding."""


def make_learner(model: Policy, cut: UpdateCut) -> tuple[Learner, Callable[[], TrainState]]:
    """The learner with the default loss and optimiser, and a function that makes a new state with its own buffers."""
    optimizer = make_optimizer(OptimizerConfig())
    settings = UpdateSettings(LOSSES["grpo"], micro_batch=cut.micro_batch, logit_chunk=cut.logit_chunk, rungs=cut.rungs)
    learner = Learner(model.architecture.graph, optimizer, optax.constant_schedule(OptimizerConfig().learning_rate), settings)
    # The update donates its state, so each state needs parameters of its own.
    return learner, lambda: init_state(jax.tree.map(jnp.copy, model.params), optimizer=optimizer)
