"""PODS: policy optimization with down-sampled rollouts (arXiv 2504.13818), on JAX.

The flow of one step, as ``loop.py`` reads:

    prompts   = loader                       data/        problems become prompt tokens             host
    rollouts  = engine(params, prompts)      rollout/     n completions of each prompt              device
    scores    = scorer(problems, texts)      rewards/     text in, numbers out                      host
    kept      = keep(rollouts, rewards)      algorithm/   the m < n whose rewards vary most         device
    state     = learner(state, kept)         update/      one forward per group, loss, optimiser    device

``assembly/`` builds these parts from a configuration (``config/``), and ``run/`` keeps the record. Entry points:
``python -m pods_jax.train``, ``.compare``, ``.evaluate``, ``.report``, ``.bench``. The tables to extend: ``RULES``,
``ADVANTAGES``, ``LOSSES`` (algorithm), ``SCHEDULES`` (update), ``TASKS`` (data), ``REWARDS`` (rewards), ``FAMILIES`` (models).
Names below are imported on first use, so that a process that needs only the data layer does not start the accelerator.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Config": "config.entries",
    "RULES": "algorithm.selection",
    "select": "algorithm.selection",
    "ADVANTAGES": "algorithm.advantages",
    "LOSSES": "algorithm.losses",
    "TASKS": "data.tasks",
    "REWARDS": "rewards.table",
    "FAMILIES": "models.families",
    "Decoder": "models.decoder",
    "DecoderSpec": "models.spec",
    "RolloutEngine": "rollout.engine",
    "Learner": "update.learner",
    "run": "train",
}

__all__ = sorted(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'pods_jax' has no attribute {name!r}")
    return getattr(import_module(f"pods_jax.{_PUBLIC[name]}"), name)
