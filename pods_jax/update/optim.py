"""AdamW and the learning rate's schedule, from optax.

The schedule counts the steps of the run, not the optimiser's own: it ends as the run does, however many updates a step makes,
and whether or not a step has anything to train.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from pods_jax.config.sections import OptimizerConfig
from pods_jax.lookup import lookup

SCHEDULES: dict[str, Callable[[float, int, float], optax.Schedule]] = {
    "constant": lambda peak, steps, final: optax.constant_schedule(peak),
    "linear": lambda peak, steps, final: optax.linear_schedule(peak, peak * final, steps),
    "cosine": lambda peak, steps, final: optax.cosine_decay_schedule(peak, steps, final),
}
"""Schedules after warm-up: ``(peak, steps, final fraction) -> rate by step``."""


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by steps of the run that are done: linear warm-up, then the named schedule up to ``steps``."""
    chosen = lookup(SCHEDULES, config.schedule, "optimizer.schedule")
    after = chosen(config.learning_rate, max(1, steps - config.warmup_steps), config.final_fraction)
    if config.warmup_steps == 0:
        return after
    # The first step already moves: it has 1/warmup of the peak, not 0.
    start = config.learning_rate / config.warmup_steps
    warmup = optax.linear_schedule(start, config.learning_rate, max(1, config.warmup_steps - 1))
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW's direction; the learner multiplies it by the negative learning rate.

    Reference: Decoupled Weight Decay Regularization, arXiv 1711.05101.
    """
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)
    decay = optax.add_decayed_weights(config.weight_decay, mask=decayed)
    return optax.chain(*([optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []), adam, decay)


def decayed(params: Any) -> Any:
    """Which parameters are decayed: all but norm scales and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not str(path[-1].key).endswith(("_norm", "_bias")), params)
