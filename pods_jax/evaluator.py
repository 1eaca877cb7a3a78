"""Accuracy on held-out problems: greedy, and the mean over sampled completions."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Key
from transformers import PreTrainedTokenizerBase

from pods_jax.devices.sharding import exchange, own_rows, replicate
from pods_jax.rollout.engine import Engine
from pods_jax.rollout.prompts import place_prompts
from pods_jax.rollout.sampling import SamplingParams
from pods_jax.rollout.texts import read_completions
from pods_jax.types import Problem, Prompt


@dataclass(frozen=True)
class Verdicts:
    """Completions of every problem of a batch and whether each is right, in the problems' order.

    Attributes:
        problems: The problems.
        texts: Completions of each, decoded when asked for.
        correct_EN: Verdicts, ``[problems, completions]``.
        finished_EN: False for completions cut at the limit.
    """

    problems: list[Problem]
    texts: Sequence[list[str]]
    correct_EN: Bool[np.ndarray, "E N"]
    finished_EN: Bool[np.ndarray, "E N"]


@dataclass(frozen=True)
class Evaluator:
    """Generates and judges completions of a fixed list of problems.

    Attributes:
        name: Name of the accuracy in the log, as ``eval/accuracy``.
        engine: Rollout engine; its ``rollouts`` is the number of completions of each problem.
        sampling: Temperature 0 for greedy.
        prompts: Held-out prompts, the same list on every process.
        batch: Problems generated at once over all devices; the last batch is filled up with repeats that are not counted.
        mesh: Device mesh.
        tokenizer: For the completions' text.
        judge: ``(problems, texts) -> bool [problems, completions]``.
        key: Sampling key, the same at each evaluation so that only the policy changes.
        stop_ids: Tokens that end a completion.
    """

    name: str
    engine: Engine
    sampling: SamplingParams
    prompts: Sequence[Prompt]
    batch: int
    mesh: Mesh
    tokenizer: PreTrainedTokenizerBase
    judge: Callable[[Sequence[Problem], Sequence[Sequence[str]]], Bool[np.ndarray, "E N"]]
    key: Key[Array, ""]
    stop_ids: Sequence[int] = ()

    def __call__(self, params: Any) -> dict[str, float]:
        """Metrics of the policy over all problems, as ``accuracy_metrics``."""
        return accuracy_metrics(self.name, list(self.verdicts(params)))

    def verdicts(self, params: Any) -> Iterator[Verdicts]:
        """Generates and judges batch after batch."""
        longest = max(len(p.tokens) for p in self.prompts)
        for number, first in enumerate(range(0, len(self.prompts), self.batch)):
            block = list(self.prompts[first : first + self.batch])
            filled = block + [block[-1]] * (self.batch - len(block))
            batch = place_prompts(self.mesh, filled, multiple=longest)
            key = jax.random.fold_in(self.key, replicate(np.uint32(number)))
            rollouts = self.engine(params, batch, key, self.sampling)
            completions = read_completions(self.tokenizer, rollouts, prompts=len(block), stop_ids=self.stop_ids)
            problems = [prompt.problem for prompt in block]
            correct_EN = self._judged(problems, completions.texts_PN)
            yield Verdicts(problems, completions.texts_PN, correct_EN, completions.finished_PN)

    def _judged(self, problems: list[Problem], texts: Sequence[Sequence[str]]) -> Bool[np.ndarray, "E N"]:
        """Verdicts on all completions; each process judges its share."""
        mine = own_rows(len(problems))
        return exchange(self.judge(problems[mine], texts[mine]), (len(problems), self.engine.rollouts))


def accuracy_metrics(name: str, verdicts: Sequence[Verdicts]) -> dict[str, float]:
    """Mean over problems of each problem's share of right completions, its standard error, and the share that was cut."""
    share = np.concatenate([v.correct_EN.mean(axis=1) for v in verdicts])
    finished = np.concatenate([v.finished_EN.mean(axis=1) for v in verdicts])
    standard_error = share.std() / math.sqrt(max(1, len(share) - 1))
    return {
        name: float(share.mean()),
        f"{name}_standard_error": float(standard_error),
        f"{name}_truncated_fraction": float(1.0 - finished.mean()),
    }
