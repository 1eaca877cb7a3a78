"""Reasoning Gym's own scorers, for worker processes alone, because some of them evaluate what they are given."""

import json
from functools import lru_cache
from typing import Any

import reasoning_gym  # pyright: ignore[reportMissingImports]


def score_answer(answer: str, extra: str) -> float:
    """Returns the score of an answer, 0 to 1, by the scorer of the data set that the problem comes from.

    Args:
        answer: The answer.
        extra: JSON of the ``dataset``, its ``options``, and the generated ``entry``.
    """
    problem = json.loads(extra)
    scorer = _data_set(problem["dataset"], json.dumps(problem["options"], sort_keys=True))
    return float(scorer.score_answer(answer, problem["entry"]))


@lru_cache(maxsize=64)
def _data_set(name: str, options: str) -> Any:
    return reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(options))
