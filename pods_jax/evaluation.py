"""Accuracy on held-out problems: greedy, and the mean over sampled completions."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Key
from transformers import PreTrainedTokenizerBase

from pods_jax.data.prompts import pad_prompts
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.sampling import SamplingParams
from pods_jax.rollout.texts import completion_texts
from pods_jax.sharding import to_global, to_local
from pods_jax.types import Problem, Prompt, PromptBatch


@dataclass(frozen=True)
class Verdicts:
    """Completions of every problem and whether each is right, in the problems' order (this process's rows of each batch).

    Attributes:
        problems: The problems.
        texts: Completions of each.
        correct_EN: Verdicts, ``[problems, completions]``.
        finished_EN: False for completions cut at the limit.
    """

    problems: list[Problem]
    texts: list[list[str]]
    correct_EN: Bool[np.ndarray, "E N"]
    finished_EN: Bool[np.ndarray, "E N"]


@dataclass(frozen=True)
class Accuracy:
    """Mean over problems of each problem's share of right completions, its standard error, and the share that was cut."""

    mean: float
    standard_error: float
    truncated_fraction: float


@dataclass(frozen=True)
class Evaluator:
    """Generates and judges completions of a fixed list of problems.

    Attributes:
        engine: Rollout engine; its ``rollouts`` is the number of completions of each problem.
        sampling: Temperature 0 for greedy.
        prompts: Held-out prompts, the same list on every process.
        batch: Problems generated at once over all devices; the last batch is filled up with repeats that are not counted.
        mesh: Device mesh.
        tokenizer: For the completions' text.
        judge: ``(problem, text) -> bool``.
        key: Sampling key, the same at each evaluation so that only the policy changes.
    """

    engine: RolloutEngine
    sampling: SamplingParams
    prompts: Sequence[Prompt]
    batch: int
    mesh: Mesh
    tokenizer: PreTrainedTokenizerBase
    judge: Callable[[Problem, str], bool]
    key: Key[Array, ""]

    def __call__(self, params: Any) -> Accuracy:
        """Accuracy of the policy over all problems."""
        return summarise(list(self.verdicts(params)))

    def verdicts(self, params: Any) -> Iterator[Verdicts]:
        """Generates and judges batch after batch."""
        longest = max(len(p.tokens) for p in self.prompts)
        for number, first in enumerate(range(0, len(self.prompts), self.batch)):
            block = list(self.prompts[first : first + self.batch])
            filled = block + [block[-1]] * (self.batch - len(block))
            mine = slice(*(self.batch * (jax.process_index() + i) // jax.process_count() for i in (0, 1)))
            batch = PromptBatch(*pad_prompts(filled[mine], multiple=longest))  # type: ignore[arg-type]
            key = jax.random.fold_in(self.key, number)
            rollouts = to_local(self.engine(params, to_global(self.mesh, batch), key, self.sampling))
            texts = completion_texts(self.tokenizer, rollouts.tokens_PNC, rollouts.length_PN)
            counted = [i for i, _ in enumerate(filled[mine]) if mine.start + i < len(block)]
            problems = [filled[mine][i].problem for i in counted]
            correct = [[self.judge(filled[mine][i].problem, text) for text in texts[i]] for i in counted]
            yield Verdicts(
                problems,
                [texts[i] for i in counted],
                np.asarray(correct, bool).reshape(len(counted), self.engine.rollouts),
                np.asarray(rollouts.finished_PN)[counted],
            )


def summarise(verdicts: Sequence[Verdicts]) -> Accuracy:
    """Accuracy over the verdicts of all processes."""
    share = np.concatenate([v.correct_EN.mean(axis=1) for v in verdicts])
    finished = np.concatenate([v.finished_EN.mean(axis=1) for v in verdicts])
    sums = np.array([len(share), share.sum(), (share**2).sum(), finished.sum()], np.float64)
    if jax.process_count() > 1:
        sums = np.asarray(multihost_utils.process_allgather(sums)).sum(axis=0)
    count, total, squares, ended = sums
    mean = total / count
    variance = max(0.0, squares / count - mean**2)
    return Accuracy(float(mean), math.sqrt(variance / max(1.0, count - 1)), float(1.0 - ended / count))
