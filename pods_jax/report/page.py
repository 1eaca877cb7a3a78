"""The page of a run: from the files of its folder to one HTML page that needs no network.

The page shows the headline figures, the curves of ``metrics.jsonl`` against step and wall-clock, the resolved configuration,
and the rollouts of a few steps with the reason why each was kept or dropped. A run in progress gives a partial page.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import yaml

from pods_jax.report.charts import sections, step_seconds
from pods_jax.report.html import write_page
from pods_jax.report.reasons import reasons
from pods_jax.run.log import METRICS_FILE, read_metrics
from pods_jax.run.rollouts import read_rollouts

STEPS_SHOWN = 6
GROUPS_SHOWN = 4
AXES = {"step": ("against step", "step"), "wall": ("against wall-clock", "wall-clock, minutes")}


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Writes the page of a run, finished or not.

    Args:
        run_folder: Folder with ``metrics.jsonl``, and where the run wrote them ``rollouts.jsonl`` and ``config.yaml``.
        out: Where the page goes; ``<run_folder>/report.html`` by default.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: The folder or its ``metrics.jsonl`` does not exist.
        ValueError: ``metrics.jsonl`` has no complete row yet.
    """
    if not run_folder.is_dir():
        raise FileNotFoundError(f"run folder {run_folder} does not exist")
    if not (run_folder / METRICS_FILE).is_file():
        raise FileNotFoundError(f"{run_folder} is not a run folder: it has no {METRICS_FILE}")
    rows = list(read_metrics(run_folder))
    if not rows:
        raise ValueError(f"{run_folder / METRICS_FILE} has no complete row yet: no step has been logged")
    config_path = run_folder / "config.yaml"
    config = (yaml.safe_load(config_path.read_text(encoding="utf-8")) or {}) if config_path.is_file() else {}
    rule = config.get("selection", {}).get("rule", "")
    rollouts = read_rollouts(run_folder, chosen_steps([row["step"] for row in rows if "reward/mean" in row]))
    return write_page(
        out or run_folder / "report.html",
        "report/report.html.jinja",
        axes=AXES,
        name=config.get("run", {}).get("name") or run_folder.resolve().name,
        figures=_headline(rows, config, rollouts.generated, rollouts.kept),
        sections=sections(rows),
        rule=rule,
        steps=[
            {"step": step, "groups": _groups(records, rule), "total": len({record["group"] for record in records})}
            for step, records in sorted(rollouts.by_step.items())
        ],
        config=config,
    )


def chosen_steps(steps: Sequence[int], count: int = STEPS_SHOWN) -> list[int]:
    """``count`` of the steps at even distances, the first and the last included; all when there are fewer."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _groups(records: list[dict], rule: str) -> list[dict]:
    """The groups of a step that the page shows: those with texts and with differing rewards first."""
    by_group: dict[int, list[dict]] = {}
    for record in records:
        by_group.setdefault(record["group"], []).append(record)
    shown = sorted(
        by_group.values(), key=lambda group: (-sum("text" in r for r in group), len({r["total"] for r in group}) == 1)
    )
    return [_group(group, rule) for group in shown[:GROUPS_SHOWN]]


def _group(records: list[dict], rule: str) -> dict:
    """One group, highest reward first, with a bar height for the strip of rewards."""
    totals = [record["total"] for record in records if record["total"] is not None]
    explained = [
        record | {"why": why, "height": _height(record["total"], totals)}
        for record, why in zip(records, reasons(records, rule), strict=True)
    ]
    kept = [record["total"] for record in records if record["kept"]]
    return {
        "prompt_id": records[0]["prompt_id"],
        "prompt": next((record["prompt"] for record in records if "prompt" in record), None),
        "answer": next((record["answer"] for record in records if "answer" in record), None),
        "parts": list(records[0]["parts"]),
        "records": sorted(explained, key=lambda r: (r["rank"] or math.inf, not r["kept"], r["index"])),
        "kept": len(kept),
        "scored": len(totals),
        "signal": len(set(kept)) > 1,
        "without_text": sum("text" not in record for record in records),
    }


def _height(total: float | None, totals: list[float]) -> float:
    """Height in percent of a rollout's bar; the lowest reward keeps a stump."""
    if total is None:
        return 0
    low, high = min(totals), max(totals)
    return 100 if high == low else 12 + 88 * (total - low) / (high - low)


def _headline(rows: list[dict], config: dict, generated: int, kept: int) -> list[tuple[str, str, str]]:
    """The figures on top of the page: label, value, remark."""
    accuracy = [(row["step"], row["eval/accuracy"]) for row in rows if row.get("eval/accuracy") is not None]
    last, planned = rows[-1]["step"], config.get("run", {}).get("steps")
    figures = []
    if accuracy:
        best_step, best = max(accuracy, key=lambda pair: pair[1])
        (first_step, first), (last_step, final) = accuracy[0], accuracy[-1]
        figures.append(("Held-out accuracy", f"{first:.1%} → {final:.1%}", f"greedy, step {first_step} → step {last_step}"))
        figures.append(("Best accuracy", f"{best:.1%}", f"at step {best_step}"))
    figures.append(("Steps", f"{last:,}", f"of {planned:,} planned" if planned else ""))
    figures.append(("Wall-clock", _clock(rows[-1]["wall_seconds"]), "everything included"))
    if timed := [seconds for row in rows if (seconds := step_seconds(row))]:
        figures.append(("Seconds a step", f"{median(timed):.2f}", "median of rollout, reward, update"))
    if generated:
        figures.append(("Rollouts kept", f"{kept:,}", f"of {generated:,} generated"))
    return figures


def _clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"
