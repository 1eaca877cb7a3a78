"""What completions earn, on the host: text in, numbers out.

``extraction`` finds a completion's answer, ``answers`` compares it with the gold one by kind (``quantities``, ``expressions``,
``choices``, ``chemistry``), ``workers`` runs what must not run in the training process (``algebra``, ``gym``, own rewards),
``table`` names the rewards and ``scoring`` sums a run's. ``python -m pods_jax.rewards.agreement`` compares with graded
completions.
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
