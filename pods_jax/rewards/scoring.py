"""What a completion earns: the scorer that sums the weighted rewards of a run.

It stands between the rollout engine, whose completions it reads as text, and selection, which sees one number for each rollout.
A rollout that some reward cannot score, or whose verifier is late, dies or raises, is invalid: it is counted, and never kept.
A reward of weight 0 is measured alone; what it cannot score is counted, and stays valid.
"""

import logging
import math
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args

import numpy as np
from jaxtyping import Bool, Float32, Int

from pods_jax.problem import Problem
from pods_jax.rewards.extraction import DEFAULT_SOURCES, check_sources
from pods_jax.rewards.table import Reward, correct, find_reward
from pods_jax.rewards.workers import Fault, Job, Outcome, WorkerPool, outcome_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """Rewards of P groups of N completions, on the host.

    Attributes:
        rewards_PN: Weighted sums of the parts; 0 where the rollout is invalid.
        parts: Unweighted scores by the name of the reward; NaN where it could not score.
        valid_PN: Where every part with a weight other than 0 is a score, and their sum is finite.
        unscored: How many completions each reward could not score, faults included.
        faults: How many scores were lost to each fault (``workers.Fault``).
    """

    rewards_PN: Float32[np.ndarray, "P N"]
    parts: dict[str, Float32[np.ndarray, "P N"]]
    valid_PN: Bool[np.ndarray, "P N"]
    unscored: dict[str, int]
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """How many scores were lost, and to what."""
        lost = {f"reward/verifier_{fault}": float(count) for fault, count in self.faults.items()}
        return {"reward/unscored": float(sum(self.unscored.values()))} | lost


@dataclass(frozen=True)
class Scorer:
    """The weighted rewards of a run, as ``make_scorer`` builds them; leaving its ``with`` block ends the worker processes."""

    rewards: dict[str, Reward]
    sources: tuple[str, ...] = DEFAULT_SOURCES
    pool: WorkerPool = field(default_factory=WorkerPool, repr=False)
    _warned: set[tuple[str, str]] = field(default_factory=set, repr=False)

    def score(
        self,
        problems_P: Sequence[Problem],
        texts_PN: Sequence[Sequence[str]],
        *,
        length_PN: Int[np.ndarray, "P N"] | None = None,
    ) -> Scores:
        """Returns the scores of every completion of every group.

        Args:
            problems_P: One problem for each group.
            texts_PN: N completions for each problem, as text.
            length_PN: Their numbers of tokens, EOS included; only a reward on the length needs them.

        Raises:
            ValueError: The numbers of problems, groups or lengths differ, the groups differ in size, or lengths are needed.
            TypeError: A reward, which the message names, returned something that is neither a number nor ``None``.
        """
        shape = _shape(problems_P, texts_PN)
        if not problems_P and length_PN is not None:  # a process whose share of the groups is none
            shape = (0, length_PN.shape[1])
        length_P = np.zeros(shape, int) if length_PN is None else np.asarray(length_PN)
        by_length = [name for name, reward in self.rewards.items() if reward.reads == "length"]
        if length_P.shape != shape or (by_length and length_PN is None):
            given = "no lengths" if length_PN is None else f"lengths of shape {length_P.shape}"
            raise ValueError(f"rewards {', '.join(self.rewards)} of {shape} completions cannot be computed from {given}")
        rows = [
            (problem, text, int(tokens))
            for problem, texts_N, length_N in zip(problems_P, texts_PN, length_P, strict=True)
            for text, tokens in zip(texts_N, length_N, strict=True)
        ]
        calls = {name: [_call(reward, *row) for row in rows] for name, reward in self.rewards.items()}
        return self._scores(self._outcomes(calls, [row[0] for row in rows]), shape)

    def correct(self, problems_P: Sequence[Problem], texts_PN: Sequence[Sequence[str]]) -> Bool[np.ndarray, "P N"]:
        """Returns whether each completion answers its problem, whose answer may be of any kind: the measure of accuracy.

        An answer that the verifier cannot judge counts as wrong, with a warning in the log. Arguments and errors are those of
        ``score``.
        """
        shape = _shape(problems_P, texts_PN)
        rows = [(problem, text) for problem, texts_N in zip(problems_P, texts_PN, strict=True) for text in texts_N]
        reward = Reward(partial(correct, sources=self.sources), 1.0)
        outcomes = self._outcomes({"correct": [_call(reward, *row, 0) for row in rows]}, [row[0] for row in rows])
        return np.array([outcome.value == 1.0 for outcome in outcomes["correct"]], bool).reshape(shape)

    def close(self) -> None:
        """Ends the worker processes; a later call starts new ones."""
        self.pool.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _outcomes(self, calls: dict[str, list[Outcome | Job]], problems: list[Problem]) -> dict[str, list[Outcome]]:
        """Runs the jobs of all rewards in one go, and reports the first fault of each kind."""
        done = iter(self.pool.run([call for part in calls.values() for call in part if isinstance(call, Job)]))
        outcomes = {name: [next(done) if isinstance(call, Job) else call for call in part] for name, part in calls.items()}
        for name, part in outcomes.items():
            for problem, outcome in zip(problems, part, strict=True):
                self._report(name, problem, outcome)
        return outcomes

    def _report(self, name: str, problem: Problem, outcome: Outcome) -> None:
        if outcome.wrong_type:
            raise TypeError(f"reward {name} returned {outcome.detail} for problem {problem.id}; expected a number or None")
        if outcome.fault and (name, outcome.fault) not in self._warned:
            self._warned.add((name, outcome.fault))
            logger.warning(
                "reward %s failed on problem %s (%s); %s\n%s",
                name,
                problem.id,
                outcome.fault,
                "its weight is 0" if name in self.rewards and not self.rewards[name].weight else "the rollout is invalid",
                outcome.detail,
            )

    def _scores(self, outcomes: dict[str, list[Outcome]], shape: tuple[int, int]) -> Scores:
        parts = {name: _finite([outcome.value for outcome in part]).reshape(shape) for name, part in outcomes.items()}
        with np.errstate(over="ignore", invalid="ignore"):  # an infinite or undefined sum is what makes a rollout invalid
            # What counts for nothing is measured alone: without a score it leaves the rollout valid.
            counted = {name: reward.weight for name, reward in self.rewards.items() if reward.weight}
            total_PN = sum((np.float64(weight) * parts[name] for name, weight in counted.items()), np.zeros(shape))
            rewards_PN = total_PN.astype(np.float32)
        valid_PN = np.isfinite(rewards_PN)
        unscored = {name: int(np.isnan(part_PN).sum()) for name, part_PN in parts.items()}
        counts = Counter(outcome.fault for part in outcomes.values() for outcome in part)
        return Scores(
            np.where(valid_PN, rewards_PN, np.float32(0)),
            parts,
            valid_PN,
            unscored,
            {fault: counts[fault] for fault in get_args(Fault)},
        )


def make_scorer(
    functions: Sequence[str],
    weights: Sequence[float] | None = None,
    *,
    sources: Sequence[str] = DEFAULT_SOURCES,
    max_completion_length: int | None = None,
    length_margin: float = 0.2,
    time_limit: float = 5.0,
    memory_limit_mb: int = 1024,
    workers: int = 0,
) -> Scorer:
    """Returns the scorer of a run, which starts no process before one is needed.

    Args:
        functions: Entries of ``REWARDS``, or own rewards (``module:function``, importable from the working directory).
        weights: One for each function; ``None`` takes those of the table, and 1.0 for an own reward.
        sources: Where an answer may stand: some of ``SOURCES``.
        max_completion_length: Longest completion in tokens; only a reward on the length needs it.
        length_margin: Share of that length, at its end, over which the penalty on long completions grows.
        time_limit: Seconds of wall-clock time for one answer in a worker process, and for one call of an own reward.
        memory_limit_mb: MiB of memory for the same.
        workers: Worker processes; 0 takes one for each CPU core, at most 8.

    Raises:
        ValueError: A function or a source is missing, repeated or unknown; the weights are not as many finite numbers; a reward
            on the length has no longest completion; or a limit is out of range.
    """
    if not functions or len(set(functions)) < len(functions):
        raise ValueError(f"reward.functions={list(functions)} must name at least one reward, and each once")
    sources = check_sources(sources)
    rewards = {name: _bound(name, find_reward(name), sources, max_completion_length, length_margin) for name in functions}
    if weights is not None:
        if len(weights) != len(functions):
            raise ValueError(f"reward.weights={list(weights)} has {len(weights)} values; reward.functions has {len(functions)}")
        if not all(math.isfinite(weight) for weight in weights):
            raise ValueError(f"reward.weights={list(weights)} must be finite numbers")
        rewards = {name: replace(rewards[name], weight=weight) for name, weight in zip(functions, weights, strict=True)}
    return Scorer(rewards, sources, WorkerPool(time_limit=time_limit, memory_limit_mb=memory_limit_mb, workers=workers))


def _bound(name: str, reward: Reward, sources: tuple[str, ...], limit: int | None, margin: float) -> Reward:
    if reward.reads == "answer":
        return replace(reward, function=partial(reward.function, sources=sources))
    if reward.reads == "text":
        return reward
    if limit is None or limit < 1 or not 0 < margin <= 1:
        raise ValueError(
            f"reward {name} needs a longest completion and a margin of it above 0 and at most 1: {limit}, {margin}"
        )
    return replace(reward, function=partial(reward.function, limit=limit, margin=margin))


def _shape(problems_P: Sequence[Problem], texts_PN: Sequence[Sequence[str]]) -> tuple[int, int]:
    n = len(texts_PN[0]) if texts_PN else 0
    if len(problems_P) != len(texts_PN) or any(len(texts_N) != n for texts_N in texts_PN):
        raise ValueError(f"{len(problems_P)} problems with groups of {[len(t) for t in texts_PN]} completions cannot be scored")
    return len(texts_PN), n


def _call(reward: Reward, problem: Problem, text: str, tokens: int) -> Outcome | Job:
    try:
        score = reward.function(tokens) if reward.reads == "length" else reward.function(problem, text)
    except Exception:
        return Outcome(fault="error", detail=traceback.format_exc())
    return score if isinstance(score, Job) else outcome_of(score)


def _finite(values: Sequence[float | None]) -> np.ndarray:
    with np.errstate(over="ignore"):
        part = np.array([math.nan if value is None else value for value in values], np.float64).astype(np.float32)
    return np.where(np.isfinite(part), part, np.float32(np.nan))
