"""What a completion earns: the table of rewards, and the scorer that sums a run's weighted parts.

Stands between the rollout engine, whose completions it reads as text, and selection, which sees one number for each rollout.
A reward is ``function(problem, completion) -> float | None``, where ``None`` (or a number that is not finite) means that it
cannot score this completion. Such a rollout, or one on which the function raises, is invalid: counted, and never kept.
"""

import difflib
import importlib
import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real

import numpy as np
from jaxtyping import Bool, Float32

from pods_jax.rewards.answers import is_correct
from pods_jax.types import Problem

RewardFunction = Callable[[Problem, str], float | None]
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PENALTY_PER_CHARACTER = 0.01

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reward:
    """A reward function and the weight it has unless the configuration sets another."""

    function: RewardFunction
    weight: float


@dataclass(frozen=True)
class Scores:
    """Rewards of P groups of N completions, on the host.

    Attributes:
        rewards_PN: Weighted sum of the parts; 0 where the rollout is invalid.
        parts: Unweighted scores of each reward by name; NaN where it could not score.
        valid_PN: Every part scored, and their sum is finite.
        unscored: For each reward, how many completions it could not score, exceptions included.
    """

    rewards_PN: Float32[np.ndarray, "P N"]
    parts: dict[str, Float32[np.ndarray, "P N"]]
    valid_PN: Bool[np.ndarray, "P N"]
    unscored: dict[str, int]


def correct(problem: Problem, completion: str) -> float:
    """1 for the right answer in the last ``<answer>…</answer>`` block, else 0."""
    return float(is_correct(problem, completion))


def format_score(problem: Problem, completion: str) -> float:
    """1 for ``<think>…</think>`` followed by ``<answer>…</answer>``, less 0.01 for each character outside, at least 0.

    The first tag of each kind after the one before it counts; whatever else there is, further tags included, stands outside.
    White space outside is free: the paper leaves that open, and a line break between the blocks is no fault.

    Reference: PODS (arXiv 2504.13818), format reward of the single-GPU set-up.
    """
    del problem
    inside, outside = 0, []
    for opening, closing in (TAGS[:2], TAGS[2:]):
        start = completion.find(opening, inside)
        end = completion.find(closing, start + len(opening)) if start >= 0 else -1
        if end < 0:
            return 0.0
        outside.append(completion[inside:start])
        inside = end + len(closing)
    outside.append(completion[inside:])
    # A hundred words take the whole score already, so the rest of a huge completion need not be split.
    stray = sum(len(word) for part in outside for word in part.split(maxsplit=100))
    return max(0.0, 1.0 - PENALTY_PER_CHARACTER * stray)


def tag_count(problem: Problem, completion: str) -> float:
    """How many of the four tags ``<think> </think> <answer> </answer>`` stand exactly once: 0 to 4.

    Reference: PODS (arXiv 2504.13818), tag-count reward; its weight there is 0.025 a tag.
    """
    del problem
    return float(sum(completion.count(tag) == 1 for tag in TAGS))


REWARDS: dict[str, Reward] = {
    "correct": Reward(correct, weight=1.0),
    "format": Reward(format_score, weight=0.1),
    "tag_count": Reward(tag_count, weight=0.025),
}


@dataclass(frozen=True)
class Scorer:
    """The weighted rewards of a run; built by ``make_scorer``."""

    rewards: dict[str, Reward]
    _warned: set[str] = field(default_factory=set, repr=False)

    def score(self, problems_P: Sequence[Problem], texts_PN: Sequence[Sequence[str]]) -> Scores:
        """Score every completion of every group.

        Args:
            problems_P: One problem for each group.
            texts_PN: N completions for each problem, as text.

        Raises:
            ValueError: The numbers of problems and groups differ, or the groups differ in size.
            TypeError: A reward returned something that is neither a number nor ``None``; the message names it.
        """
        n = len(texts_PN[0]) if texts_PN else 0
        if len(problems_P) != len(texts_PN) or any(len(texts_N) != n for texts_N in texts_PN):
            raise ValueError(
                f"{len(problems_P)} problems with groups of {[len(t) for t in texts_PN]} completions cannot be scored"
            )
        parts = {name: self._part(name, problems_P, texts_PN).reshape(len(texts_PN), n) for name in self.rewards}
        with np.errstate(over="ignore", invalid="ignore"):  # an infinite or undefined sum is what makes a rollout invalid
            total_PN = sum(np.float64(reward.weight) * parts[name] for name, reward in self.rewards.items())
            rewards_PN = np.asarray(total_PN).astype(np.float32)
        valid_PN = np.isfinite(rewards_PN)
        unscored = {name: int(np.isnan(part_PN).sum()) for name, part_PN in parts.items()}
        return Scores(np.where(valid_PN, rewards_PN, np.float32(0)), parts, valid_PN, unscored)

    def _part(self, name: str, problems_P: Sequence[Problem], texts_PN: Sequence[Sequence[str]]) -> np.ndarray:
        scores = [
            self._one(name, problem, text) for problem, texts_N in zip(problems_P, texts_PN, strict=True) for text in texts_N
        ]
        with np.errstate(over="ignore"):
            part = np.array(scores, np.float64).astype(np.float32)
        return np.where(np.isfinite(part), part, np.float32(np.nan))

    def _one(self, name: str, problem: Problem, text: str) -> float:
        try:
            score = self.rewards[name].function(problem, text)
        except Exception:
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("reward %s failed on problem %s; the rollout is invalid", name, problem.id, exc_info=True)
            return math.nan
        if score is None:
            return math.nan
        if not isinstance(score, Real | np.bool_):
            raise TypeError(
                f"reward {name} returned {type(score).__name__} for problem {problem.id}; expected a number or None"
            )
        try:
            return float(score)
        except OverflowError:  # an integer beyond any float
            return math.nan


def make_scorer(functions: Sequence[str], weights: Sequence[float] | None = None) -> Scorer:
    """Build the scorer of a run.

    Args:
        functions: Entries of ``REWARDS``, or ``module:function`` for an own one, importable from the working directory.
        weights: One for each function; ``None`` takes each one's own (1.0 for an own function).

    Raises:
        ValueError: No function, one named twice, unknown or not importable; or weights of another number or not finite.
    """
    if not functions or len(set(functions)) < len(functions):
        raise ValueError(f"reward.functions={list(functions)} must name at least one reward, and each once")
    found = {name: _find_reward(name) for name in functions}
    if weights is None:
        return Scorer(found)
    if len(weights) != len(functions):
        raise ValueError(f"reward.weights={list(weights)} has {len(weights)} values; reward.functions has {len(functions)}")
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"reward.weights={list(weights)} must be finite numbers")
    return Scorer({name: Reward(found[name].function, weight) for name, weight in zip(functions, weights, strict=True)})


def _find_reward(name: str) -> Reward:
    if name in REWARDS:
        return REWARDS[name]
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"reward.functions: {name!r} is no reward; {hint}valid: {', '.join(REWARDS)}, or module:function")
    function = _import_function(module_name, function_name)
    _check_signature(name, function)
    return Reward(function, weight=1.0)


def _import_function(module_name: str, function_name: str) -> RewardFunction:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"reward.functions: module {module_name!r} cannot be imported ({reason})") from error
    function: RewardFunction | None = vars(module).get(function_name)
    if not callable(function):
        fault = "has no function" if function is None else "has something that is no function named"
        raise ValueError(f"reward.functions: module {module_name!r} {fault} {function_name!r}")
    return function


def _check_signature(name: str, function: RewardFunction) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions do not tell theirs
        return
    try:
        signature.bind("problem", "completion")
    except TypeError as error:
        raise ValueError(f"reward.functions: {name} takes {signature}; expected (problem, completion)") from error
