"""What completions earn, on the host: text in, numbers out.

``extraction`` finds the answer of a completion. ``answers`` compares it with the gold answer by its kind (``quantities``,
``expressions``, ``choices``, ``chemistry``). ``workers`` runs what must not run in the training process (``algebra``, ``gym``
and own rewards). ``table`` names the rewards, and ``scoring`` sums those of a run.
"""

from pods_jax.rewards.answers import KINDS, gold_fault, judge, same_answer, vote
from pods_jax.rewards.extraction import DEFAULT_SOURCES, SOURCES, extract_answer
from pods_jax.rewards.scoring import Scorer, Scores, make_scorer
from pods_jax.rewards.table import REWARDS, Reward, RewardFunction
from pods_jax.rewards.workers import Job, Outcome, WorkerPool

__all__ = [
    "DEFAULT_SOURCES",
    "KINDS",
    "REWARDS",
    "SOURCES",
    "Job",
    "Outcome",
    "Reward",
    "RewardFunction",
    "Scorer",
    "Scores",
    "WorkerPool",
    "extract_answer",
    "gold_fault",
    "judge",
    "make_scorer",
    "same_answer",
    "vote",
]
