"""rollouts.jsonl: one JSON object a rollout."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int

from pods_jax.run.lines import complete_lines, parse_line, plain_number

ROLLOUTS_FILE = "rollouts.jsonl"


@dataclass(frozen=True)
class RolloutRecords:
    """All rollouts of one step, on the host.

    Attributes:
        prompt_id_P: Problem id of each group.
        prompt_P: Prompt text of each group, as a reader should see it.
        answer_P: Gold answer of each group.
        texts_PN: Completion text of each rollout.
        rewards_PN: Total reward (the weighted sum of the parts); ignored where ``valid_PN`` is false.
        parts: Unweighted score of each reward by name, not a number where it could not score.
        valid_PN: False for a rollout without a score.
        length_PN: Completion tokens, EOS included.
        finished_PN: False for a completion cut at the limit.
        index_PM: Kept rollouts of each group; -1 is an empty slot.
        advantage_PM: Advantage of each kept rollout, in the order of ``index_PM``.
    """

    prompt_id_P: Sequence[str]
    prompt_P: Sequence[str]
    answer_P: Sequence[str]
    texts_PN: Sequence[Sequence[str]]
    rewards_PN: Float[np.ndarray, "P N"]
    parts: Mapping[str, Float[np.ndarray, "P N"]]
    valid_PN: Bool[np.ndarray, "P N"]
    length_PN: Int[np.ndarray, "P N"]
    finished_PN: Bool[np.ndarray, "P N"]
    index_PM: Int[np.ndarray, "P M"]
    advantage_PM: Float[np.ndarray, "P M"]


@dataclass(frozen=True)
class RolloutRows:
    """What :func:`read_rollouts` found: the rows of the chosen steps, and counts over the whole file."""

    by_step: dict[int, list[dict]]
    generated: int
    kept: int


def read_rollouts(folder: Path, steps: Collection[int]) -> RolloutRows:
    """Streams ``rollouts.jsonl`` and parses the rows of ``steps`` alone; a missing file gives no rows."""
    by_step: dict[int, list[dict]] = {}
    generated = kept = 0
    path = folder / ROLLOUTS_FILE
    for line in complete_lines(path) if path.exists() else ():
        generated += 1
        # Safe to look for as bytes: inside any JSON string the quotes would be escaped.
        kept += b'"kept": true' in line
        if _step_of(line) in steps and (row := parse_line(line)) is not None:
            by_step.setdefault(row["step"], []).append(row)
    return RolloutRows(by_step=by_step, generated=generated, kept=kept)


def _step_of(line: bytes) -> int | None:
    """The step of a row, which is its first key, without parsing the rest."""
    match = re.match(rb'\{"step": (\d+)[,}]', line)
    return int(match[1]) if match else None


def rollout_rows(step: int, rollouts: RolloutRecords, texts_per_step: int) -> Iterator[dict]:
    """One row a rollout, group by group."""
    kept_PN, advantage_PN = _scatter(rollouts)
    rank_PN = _rank(rollouts.rewards_PN, rollouts.valid_PN)
    shown_PN = _texts_shown(kept_PN, rank_PN, texts_per_step)
    for p, n in np.ndindex(kept_PN.shape):
        row = {
            "step": step,
            "group": p,
            "prompt_id": rollouts.prompt_id_P[p],
            "index": n,
            "parts": {name: plain_number(part_PN[p, n], name) for name, part_PN in rollouts.parts.items()},
            "total": plain_number(rollouts.rewards_PN[p, n], "total") if rollouts.valid_PN[p, n] else None,
            "valid": bool(rollouts.valid_PN[p, n]),
            "rank": int(rank_PN[p, n]) if rollouts.valid_PN[p, n] else None,
            "kept": bool(kept_PN[p, n]),
            "advantage": plain_number(advantage_PN[p, n], "advantage") if kept_PN[p, n] else None,
            "length": int(rollouts.length_PN[p, n]),
            "finished": bool(rollouts.finished_PN[p, n]),
        }
        if n == 0 and shown_PN[p].any():
            row |= {"prompt": rollouts.prompt_P[p], "answer": rollouts.answer_P[p]}
        if shown_PN[p, n]:
            row["text"] = rollouts.texts_PN[p][n]
        yield row


def _scatter(rollouts: RolloutRecords) -> tuple[np.ndarray, np.ndarray]:
    """Which rollouts are kept, and their advantages, at their places among all N."""
    kept_PN = np.zeros(rollouts.rewards_PN.shape, bool)
    advantage_PN = np.zeros(rollouts.rewards_PN.shape, np.float32)
    p, m = np.nonzero(rollouts.index_PM >= 0)
    kept_PN[p, rollouts.index_PM[p, m]] = True
    advantage_PN[p, rollouts.index_PM[p, m]] = rollouts.advantage_PM[p, m]
    return kept_PN, advantage_PN


def _rank(rewards_PN: np.ndarray, valid_PN: np.ndarray) -> np.ndarray:
    """Rank by reward in the group: 1 is the highest, equal rewards share a rank, rollouts without a score come last."""
    scored_PN = np.where(valid_PN, rewards_PN, -np.inf)
    return np.stack([1 + len(scored_N) - np.searchsorted(np.sort(scored_N), scored_N, side="right") for scored_N in scored_PN])


def _texts_shown(kept_PN: np.ndarray, rank_PN: np.ndarray, budget: int) -> np.ndarray:
    """Which rollouts keep their text: whole groups while the budget lasts, then of one more the kept and a spread of ranks."""
    shown_PN = np.zeros(kept_PN.shape, bool)
    left = kept_PN.size if budget < 0 else budget
    for p in range(len(kept_PN)):
        by_rank = np.argsort(rank_PN[p], kind="stable")
        of_kept = _spread(by_rank[kept_PN[p][by_rank]], left)
        of_dropped = _spread(by_rank[~kept_PN[p][by_rank]], left - len(of_kept))
        shown_PN[p, of_kept] = shown_PN[p, of_dropped] = True
        left -= len(of_kept) + len(of_dropped)
    return shown_PN


def _spread(order: np.ndarray, count: int) -> np.ndarray:
    """``count`` entries of ``order`` at even distances, both ends included; all when there are fewer."""
    count = min(count, len(order))
    return order[np.linspace(0, len(order) - 1, count).round().astype(int)] if count else order[:0]
