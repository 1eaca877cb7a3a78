"""What PODS computes, as pure functions of arrays and plain numbers: select, normalise, lose.

``selection`` chooses m of n rollouts, ``advantages`` turns their rewards into advantages, ``keeping`` gathers what is trained,
and ``losses`` turns log-probabilities into a scalar; ``masked`` owns every reduction over a mask. Each table (``RULES``,
``ADVANTAGES``, ``LOSSES``) takes a new entry without a change elsewhere. Nothing here knows of a model, a tokenizer or the
configuration.
"""

from pods_jax.algorithm.advantages import ADVANTAGES, find_advantage, normalise
from pods_jax.algorithm.keeping import keep, make_keep
from pods_jax.algorithm.losses import LOSSES, Loss, Numbers, Tokens, evaluate_loss, find_loss
from pods_jax.algorithm.selection import RULES, Ranked, Ranks, find_rule, select, take_kept

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "RULES",
    "Loss",
    "Numbers",
    "Ranked",
    "Ranks",
    "Tokens",
    "evaluate_loss",
    "find_advantage",
    "find_loss",
    "find_rule",
    "keep",
    "make_keep",
    "normalise",
    "select",
    "take_kept",
]
