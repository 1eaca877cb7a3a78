"""AdamW with warm-up, a schedule and clipping, from optax."""

from typing import Any

import jax
import optax

from pods_jax.config.sections import OptimizerConfig

SCHEDULES = {
    "constant": lambda peak, steps, final: optax.constant_schedule(peak),
    "linear": lambda peak, steps, final: optax.linear_schedule(peak, peak * final, steps),
    "cosine": lambda peak, steps, final: optax.cosine_decay_schedule(peak, steps, final),
}


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate against the optimiser's step: linear warm-up, then the named schedule up to ``steps``."""
    after = SCHEDULES[config.schedule](config.learning_rate, max(1, steps - config.warmup_steps), config.final_fraction)
    if config.warmup_steps == 0:
        return after
    # The first update already moves: step 0 has 1/warmup of the peak, not 0.
    start = config.learning_rate / config.warmup_steps
    warmup = optax.linear_schedule(start, config.learning_rate, max(1, config.warmup_steps - 1))
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW (Decoupled Weight Decay Regularization, arXiv 1711.05101)."""
    adamw = optax.adamw(
        make_schedule(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm else adamw


def decayed(params: Any) -> Any:
    """Which parameters are decayed: all but norm scales and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not str(path[-1].key).endswith(("_norm", "_bias")), params)
