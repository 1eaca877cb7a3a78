"""The table ``REWARDS``, and how an own reward is found.

A reward is ``function(problem, completion) -> float | None``, where ``None`` or a number that is not finite says that it cannot
score this completion. A reward that only a worker process may compute returns a ``Job``, whose number is the score. Own rewards
always run there, under the same limits as the verifiers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pods_jax.lookup import lookup
from pods_jax.problem import Problem
from pods_jax.rewards.answers import judge
from pods_jax.rewards.choices import same_choice
from pods_jax.rewards.extraction import DEFAULT_SOURCES, extract_answer
from pods_jax.rewards.length import overlong_penalty
from pods_jax.rewards.tags import format_score, tag_count
from pods_jax.rewards.workers import Job

RewardFunction = Callable[..., float | Job | None]


@dataclass(frozen=True)
class Reward:
    """An entry of ``REWARDS``.

    Attributes:
        function: ``function(problem, completion)``, with ``sources=`` where it reads the answer; one that reads the length is
            ``function(tokens, limit=, margin=)``.
        weight: Weight of the score in the sum, unless the configuration sets another.
        reads: What the function looks at: the ``text``, the ``answer`` in the text, or the ``length`` in tokens.
    """

    function: RewardFunction
    weight: float
    reads: Literal["text", "answer", "length"] = "text"


def correct(problem: Problem, completion: str, *, sources: Sequence[str] = DEFAULT_SOURCES) -> float | Job | None:
    """Returns 1 for the right answer by the problem's kind, else 0; ``None`` when the gold answer cannot be read."""
    verdict = judge(problem, completion, sources)
    return float(verdict) if isinstance(verdict, bool) else verdict


def choice(problem: Problem, completion: str, *, sources: Sequence[str] = DEFAULT_SOURCES) -> float | None:
    """Returns 1 for the letter or the text of the right option, else 0, whatever the problem's kind of answer."""
    answer = extract_answer(problem.opened + completion, sources)
    verdict = same_choice("" if answer is None else answer, problem.answer, problem.choices)
    return None if verdict is None else float(verdict)


REWARDS: dict[str, Reward] = {
    "correct": Reward(correct, weight=1.0, reads="answer"),
    "choice": Reward(choice, weight=1.0, reads="answer"),
    "format": Reward(lambda problem, completion: format_score(problem.opened + completion), weight=0.1),
    "tag_count": Reward(lambda problem, completion: tag_count(problem.opened + completion), weight=0.025),
    "length": Reward(overlong_penalty, weight=1.0, reads="length"),
}


def find_reward(name: str) -> Reward:
    """Returns an entry of ``REWARDS``, or an own reward: ``module:function``, importable from the working directory.

    Raises:
        ValueError: There is no such entry, or no function of that name that takes ``(problem, completion)``.
    """
    entry: Any = lookup(REWARDS, name, "reward.functions", own=(), takes=("problem", "completion"))
    return entry if isinstance(entry, Reward) else Reward(partial(_in_a_worker, name), weight=1.0)


def _in_a_worker(name: str, problem: Problem, completion: str) -> Job:
    return Job(name, (problem, completion))
