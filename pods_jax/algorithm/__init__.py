"""What PODS computes, as pure functions of arrays and plain numbers: select, normalise, lose.

``selection`` keeps m of n rollouts, ``advantages`` turns their rewards into advantages, ``losses`` turns log-probabilities
into a scalar; ``masked`` owns every reduction over a mask. Each module's table (``RULES``, ``ADVANTAGES``, ``LOSSES``) takes a
new entry without a change elsewhere. Nothing here knows of a model, a tokenizer or the configuration.
"""

from pods_jax.algorithm.advantages import ADVANTAGES, Advantages, group_advantage, lookup_advantage, normalise
from pods_jax.algorithm.losses import LOSSES, Loss, LossStats, lookup_loss
from pods_jax.algorithm.selection import RULES, lookup_rule, select, take_kept

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "RULES",
    "Advantages",
    "Loss",
    "LossStats",
    "group_advantage",
    "lookup_advantage",
    "lookup_loss",
    "lookup_rule",
    "normalise",
    "select",
    "take_kept",
]
