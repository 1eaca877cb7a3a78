"""How far the verifiers agree with graded completions: ``python -m pods_jax.rewards.agreement completions.jsonl``.

The file has one JSON object a line, with ``dataset``, ``answer`` (gold), ``completion`` and ``authors_correct``. The command
prints the agreement on each data set, the speed, and every disagreement, those with the same answer to the same question
together.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pods_jax.lookup import lookup
from pods_jax.problem import Problem
from pods_jax.rewards.extraction import SOURCES, check_sources
from pods_jax.rewards.scoring import make_scorer
from pods_jax.rewards.spelling import tidy

ANSWER_KINDS = {"gsm8k": "number", "amc23": "number", "math500": "math"}
SHOWN_CHARACTERS = 70


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m pods_jax.rewards.agreement", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="graded completions, JSONL")
    parser.add_argument(
        "--sources", default="answer,boxed,last_number", help="where an answer may stand (default: %(default)s)"
    )
    parser.add_argument("--datasets", default=",".join(ANSWER_KINDS), help="data sets to compare (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="verifier processes; 0 takes one for each core, at most 8")
    parser.add_argument("--repeat", type=int, default=1, help="judge everything this many times, to measure the speed")
    options = parser.parse_args(argv)
    try:
        rows = read_graded(options.path, options.datasets.split(","))
        compare(rows, check_sources(options.sources.split(","), "--sources"), options.workers, options.repeat)
    except (OSError, ValueError) as error:
        print(f"pods_jax.rewards.agreement: error: {error}", file=sys.stderr)
        return 2
    return 0


def read_graded(path: Path, datasets: Sequence[str]) -> list[dict[str, Any]]:
    """Reads the graded completions of some data sets.

    Raises:
        ValueError: A data set is unknown, or the file has no completion of any.
    """
    for name in datasets:
        lookup(ANSWER_KINDS, name, "--datasets")
    with path.open(encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row["dataset"] in datasets]
    if not rows:
        raise ValueError(f"{path} has no completion of {', '.join(datasets)}")
    return rows


def compare(rows: list[dict[str, Any]], sources: tuple[str, ...], workers: int, repeat: int = 1) -> dict[str, float]:
    """Judges the completions, prints agreement, speed and disagreements, and returns the agreement by data set."""
    problems = [
        Problem(str(index), (), row["answer"], row["dataset"], ANSWER_KINDS[row["dataset"]]) for index, row in enumerate(rows)
    ]
    texts = [[row["completion"]] for row in rows]
    with make_scorer(["correct"], sources=sources, workers=workers) as scorer:
        scores = scorer.score(problems, texts)  # starts the processes too
        start = time.perf_counter()
        for _ in range(repeat):
            scorer.score(problems, texts)
        seconds = time.perf_counter() - start
    ours = [score == 1 for score in scores.parts["correct"][:, 0].tolist()]
    agreement = {}
    for name in sorted({row["dataset"] for row in rows}):
        same = [right == row["authors_correct"] for right, row in zip(ours, rows, strict=True) if row["dataset"] == name]
        agreement[name] = sum(same) / len(same)
        print(f"{name:<10} {sum(same):>5} of {len(same)} agree ({agreement[name]:.1%})")
    lost = scores.unscored["correct"]
    print(f"sources {', '.join(sources)}; {repeat * len(rows) / seconds:,.0f} answers/s; {lost} could not be judged\n")
    for (ours_right, name, gold, where, answer), count in _classes(rows, ours, sources).most_common():
        verdicts = "ours right, theirs wrong" if ours_right else "ours wrong, theirs right"
        print(f"{count:>4}  {verdicts}  {name}  gold {gold}  {where}: {answer}")
    return agreement


def _classes(
    rows: list[dict[str, Any]], ours: list[bool], sources: tuple[str, ...]
) -> Counter[tuple[bool, str, str, str, str]]:
    return Counter(
        (right, row["dataset"], row["answer"], *_found(row["completion"], sources))
        for right, row in zip(ours, rows, strict=True)
        if right != row["authors_correct"]
    )


def _found(completion: str, sources: tuple[str, ...]) -> tuple[str, str]:
    for name in sources:
        answer = SOURCES[name](completion)
        if answer is not None:
            shown = tidy(answer)
            return name, shown if len(shown) <= SHOWN_CHARACTERS else f"… {shown[-SHOWN_CHARACTERS:]}"
    return "no answer", ""


if __name__ == "__main__":
    sys.exit(main())
