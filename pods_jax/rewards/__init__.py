"""What completions earn, on the host: text in, numbers out. answers.py decides what is right, scoring.py sums the parts."""

from pods_jax.rewards.answers import extract_answer, is_correct, same_answer
from pods_jax.rewards.scoring import REWARDS, Reward, RewardFunction, Scorer, Scores, make_scorer

__all__ = [
    "REWARDS",
    "Reward",
    "RewardFunction",
    "Scorer",
    "Scores",
    "extract_answer",
    "is_correct",
    "make_scorer",
    "same_answer",
]
