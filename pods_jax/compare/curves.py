"""From run folders to accuracy over time, the time to a level of accuracy, and the ratio of two runs' times.

A run's clock is the sum of its steps' seconds; evaluation, checkpoints and the other arms' steps are not in it. Arms share
compiled programs, and which one compiles them is chance, so a step that compiled counts with the median of the run's steps that
did not. The accuracy between two evaluations is taken as a straight line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import yaml

from pods_jax.run.log import METRICS_FILE, read_metrics

CLOCKS = {"wall": "seconds", "cpu": "CPU-seconds", "step": "steps"}
PARTS = ("rollout", "reward", "update", "rest")


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        at: Where each evaluation stands on each of ``CLOCKS`` (the first at 0); one that was not logged is left out.
        accuracy: Held-out accuracy of each evaluation.
        seconds: Mean seconds of a step by name of ``PARTS``, and ``cpu``, over the steps that compiled nothing; those logged.
        steps: Steps taken.
    """

    at: dict[str, list[float]]
    accuracy: list[float]
    seconds: dict[str, float]
    steps: int

    @property
    def best(self) -> float:
        """Highest accuracy."""
        return max(self.accuracy)


Runs = dict[int, Curve]
"""The runs of one arm by seed."""


@dataclass(frozen=True)
class Spread:
    """A number over several seeds: of ``count`` of ``total``, where the others have none."""

    values: tuple[float, ...]
    total: int

    @property
    def count(self) -> int:
        """Seeds that have the number."""
        return len(self.values)

    @property
    def median(self) -> float | None:
        """Median over these, or None without any."""
        return median(self.values) if self.values else None

    def text(self, form: str = "{:.2f}") -> str:
        """The median, where there are several with the least and the greatest, and how many seeds have none."""
        if not self.values:
            return "not reached" if self.total else "not logged"
        said = form.format(median(self.values))
        if self.count > 1:
            said += f" ({form.format(min(self.values))}..{form.format(max(self.values))})"
        return said if self.count == self.total else f"{said}, {self.count} of {self.total} seeds"


def read_curve(folder: Path) -> Curve:
    """Reads ``metrics.jsonl`` of a run, finished or not.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a step has no ``time/step_seconds``, or no accuracy has been logged yet.
    """
    rows = list(read_metrics(folder))
    trained = [row for row in rows if row["step"]]
    for row in trained:
        if row.get("time/step_seconds") is None:
            raise ValueError(f"{folder / METRICS_FILE}: step {row['step']} has no time/step_seconds")
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    if not evaluated:
        raise ValueError(f"{folder / METRICS_FILE}: no eval/accuracy has been logged")
    steady = [row for row in trained if not row.get("time/compile_seconds")]
    has_cpu = all(row.get("time/step_cpu_seconds") is not None for row in trained)
    clocks = {"wall": "time/step_seconds", "cpu": "time/step_cpu_seconds"} if has_cpu else {"wall": "time/step_seconds"}
    until = {clock: _elapsed(trained, steady, name) for clock, name in clocks.items()}
    at = {clock: [seconds[row["step"]] for row in evaluated] for clock, seconds in until.items()}
    at["step"] = [float(row["step"]) for row in evaluated]
    return Curve(at, [row["eval/accuracy"] for row in evaluated], _seconds(steady or trained, has_cpu), rows[-1]["step"])


def time_to(curve: Curve, level: float, clock: str) -> float | None:
    """When the accuracy first reaches a level, on a straight line between evaluations; None when it never does."""
    at, accuracy = curve.at[clock], curve.accuracy
    if accuracy[0] >= level:
        return at[0]
    for i in range(1, len(accuracy)):
        if accuracy[i] >= level:
            share = (level - accuracy[i - 1]) / (accuracy[i] - accuracy[i - 1])
            return at[i - 1] + share * (at[i] - at[i - 1])
    return None


def times_to(runs: Runs, levels: Mapping[int, float], clock: str) -> Spread:
    """Time to each seed's level, of the seeds whose run has logged the clock; runs that never reach it have none."""
    times = [time_to(runs[seed], level, clock) for seed, level in levels.items() if clock in runs[seed].at]
    return Spread(tuple(time for time in times if time is not None), len(times))


def ratios(baseline: Runs, other: Runs, levels: Mapping[int, float], clock: str) -> Spread:
    """How many times as long the baseline takes to each seed's level as the other run of that seed.

    Of the seeds whose two runs have logged the clock. One has no ratio when a run never reaches the level, or stands on it from
    the start.
    """
    logged = {seed: level for seed, level in levels.items() if clock in baseline[seed].at and clock in other[seed].at}
    times = [(time_to(baseline[seed], level, clock), time_to(other[seed], level, clock)) for seed, level in logged.items()]
    return Spread(tuple(slow / fast for slow, fast in times if slow and fast), len(times))


def levels_of(baseline: Runs, other: Runs, share: float) -> dict[int, float]:
    """For each seed that both have: the share of the baseline's best accuracy."""
    return {seed: share * baseline[seed].best for seed in baseline if seed in other}


def common_levels(arms: Sequence[Runs], share: float) -> dict[int, float]:
    """For each seed that all have: the share of the lowest of their best accuracies, which every arm reaches."""
    seeds = [seed for seed in arms[0] if all(seed in runs for runs in arms)]
    return {seed: share * min(runs[seed].best for runs in arms) for seed in seeds}


def read_arm(folder: Path) -> Runs:
    """The runs of one arm: one for each folder in ``folder`` that holds metrics, by its seed.

    Raises:
        ValueError: two runs have the same seed, or as ``read_curve``.
    """
    runs: Runs = {}
    for run in _runs_in(folder):
        seed = _seed_of(run)
        if seed in runs:
            raise ValueError(f"{folder} holds two runs with run.seed={seed}")
        runs[seed] = read_curve(run)
    return dict(sorted(runs.items()))


def read_imports(folders: Sequence[str]) -> dict[str, Runs]:
    """Arms of other places, named after their folders: each folder is a run, an arm of runs, or a comparison of arms.

    Raises:
        ValueError: a folder holds no metrics at any of these places, two arms have one name, or as ``read_arm``.
    """
    arms: dict[str, Runs] = {}
    for folder in map(Path, folders):
        if _is_run(folder):
            found = {folder.resolve().name: {_seed_of(folder): read_curve(folder)}}
        elif _runs_in(folder):
            found = {folder.resolve().name: read_arm(folder)}
        else:
            inside = sorted(folder.iterdir()) if folder.is_dir() else []
            found = {f"{folder.resolve().name}/{arm.name}": read_arm(arm) for arm in inside if _runs_in(arm)}
        if not found:
            raise ValueError(
                f"compare.imports={folder} holds no {METRICS_FILE}: neither a run, nor an arm of runs, nor a comparison"
            )
        if twice := found.keys() & arms.keys():
            raise ValueError(f"compare.imports names two arms {min(twice)}; rename a folder")
        arms |= found
    return arms


def _runs_in(folder: Path) -> list[Path]:
    return sorted(run for run in folder.iterdir() if _is_run(run)) if folder.is_dir() else []


def _is_run(folder: Path) -> bool:
    return (folder / METRICS_FILE).is_file()


def _seed_of(run: Path) -> int:
    """``run.seed`` of the run's configuration; 0 without one."""
    file = run / "config.yaml"
    config = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if file.is_file() else {}
    return config.get("run", {}).get("seed") or 0


def _elapsed(trained: list[dict], steady: list[dict], name: str) -> dict[int, float]:
    """Seconds from the start to the end of each step."""
    usual, clock, until = median([row[name] for row in steady]) if steady else None, 0.0, {0: 0.0}
    for row in trained:
        compiling = row.get("time/compile_seconds") or 0.0
        clock += row[name] if not compiling else max(0.0, row[name] - compiling) if usual is None else usual
        until[row["step"]] = clock
    return until


def _seconds(steps: list[dict], has_cpu: bool) -> dict[str, float]:
    """Mean seconds of each part of a step that was logged."""
    if not steps:
        return {}

    def mean(name: str) -> float:
        return fmean(row.get(name) or 0.0 for row in steps)

    means = {part: mean(f"time/{part}_seconds") for part in PARTS if any(f"time/{part}_seconds" in row for row in steps)}
    means["rest"] = max(0.0, mean("time/step_seconds") - sum(means.values()))
    return means | ({"cpu": mean("time/step_cpu_seconds")} if has_cpu else {})
