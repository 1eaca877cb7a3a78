"""Entry: ``python -m pods_jax.report RUN_FOLDER`` turns a run folder into one HTML page that needs no network.

The page shows the headline figures, the curves of ``metrics.jsonl`` against step and wall-clock, the resolved configuration,
and the rollouts of a few steps with the reason why each was kept or dropped. A run in progress gives a partial page.
"""

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import yaml

from pods_jax.page import Chart, write_page
from pods_jax.run_log import METRICS_FILE, read_metrics, read_rollouts

STEPS_SHOWN = 6
GROUPS_SHOWN = 4
SMOOTH_COLOUR = "#4a6fe3"
AXES = {"step": ("against step", "step"), "wall": ("against wall-clock", "wall-clock, minutes")}
TIME_PARTS = ("rollout", "reward", "update")


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
        "report.html.jinja",
        axes=AXES,
        name=config.get("run", {}).get("name") or run_folder.resolve().name,
        figures=_headline(rows, config, rollouts.generated, rollouts.kept),
        sections=_sections(rows),
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


# ---------------------------------------------------------------------------------------------------------------------
# Why a rollout was kept or dropped
# ---------------------------------------------------------------------------------------------------------------------


def reasons(records: Sequence[dict], rule: str) -> list[str]:
    """Says of each rollout of one group why the rule kept or dropped it.

    Args:
        records: The group's rows of ``rollouts.jsonl``, in any order.
        rule: Entry of the ``RULES`` table; an unknown one (an own rule) gets the rank alone.

    Returns:
        One sentence a record, in the order of ``records``.
    """
    valid = [record for record in records if record["valid"]]
    tied = Counter(record["total"] for record in valid)
    explain = REASONS.get(rule, _explain_rank)(valid)

    def sentence(record: dict) -> str:
        if not record["valid"]:
            return "dropped: no score"
        shared = tied[record["total"]]
        rank = f"rank {record['rank']} of {len(valid)}" + (f" (shared by {shared})" if shared > 1 else "")
        return ", ".join(filter(None, (f"{'kept' if record['kept'] else 'dropped'}: {rank}", explain(record))))

    return [sentence(record) for record in records]


def _explain_rank(valid):
    return lambda record: ""


def _explain_all(valid):
    return lambda record: "every scored rollout is kept" if record["kept"] else ""


def _explain_random(valid):
    return lambda record: "drawn at random" if record["kept"] else "not drawn"


def _explain_percentile(valid):
    count = sum(record["kept"] for record in valid)
    return lambda record: f"one of {count} evenly spaced ranks" if record["kept"] else "between the sampled ranks"


def _explain_max_reward(valid):
    kept = [record["total"] for record in valid if record["kept"]]

    def explain(record):
        if record["kept"]:
            return _end(len(kept), "highest")
        return "equal to the last kept, not drawn" if record["total"] in kept else "below the kept"

    return explain


def _explain_max_variance(valid):
    kept = sorted((record["total"] for record in valid if record["kept"]), reverse=True)
    high = _highest_count(kept, sorted((record["total"] for record in valid), reverse=True))
    lowest_high = kept[high - 1] if high else math.inf

    def explain(record):
        if len(kept) == len(valid):
            return "all scored rollouts are needed"
        if len({other["total"] for other in valid}) == 1:
            return "all rewards are equal: no choice has variance"
        if record["kept"]:
            return _end(high, "highest") if record["total"] >= lowest_high else _end(len(kept) - high, "lowest")
        return "equal to kept ones, not drawn" if record["total"] in kept else "in the middle"

    return explain


def _end(count: int, end: str) -> str:
    return f"among the {count} {end}" if count > 1 else f"the {end}"


def _highest_count(kept: list[float], totals: list[float]) -> int:
    """How many kept rewards come from the top (both lists fall); where ties allow several counts, the widest gap decides."""
    m = len(kept)
    fits = [k for k in range(m + 1) if kept == totals[:k] + totals[len(totals) - (m - k) :]]
    gap = {k: kept[k - 1] - kept[k] if 0 < k < m else 0.0 for k in fits}
    return max(fits, key=lambda k: (gap[k], -abs(2 * k - m)), default=m)


REASONS = {
    "max_variance": _explain_max_variance,
    "random": _explain_random,
    "percentile": _explain_percentile,
    "max_reward": _explain_max_reward,
    "all": _explain_all,
}


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


# ---------------------------------------------------------------------------------------------------------------------
# Figures and charts
# ---------------------------------------------------------------------------------------------------------------------


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
    if step_seconds := [seconds for row in rows if (seconds := _timed(row))]:
        figures.append(("Seconds a step", f"{median(step_seconds):.2f}", "median of rollout, reward, update"))
    if generated:
        figures.append(("Rollouts kept", f"{kept:,}", f"of {generated:,} generated"))
    return figures


def _sections(rows: list[dict]) -> list[dict]:
    """The charts that have data, by section."""
    parts = {name: match[1] for name in sorted(_names(rows)) if (match := re.fullmatch("reward/(.+)/mean", name))}
    variance = ("selection/variance_all", "selection/variance_kept")
    sections = {
        "Reward and accuracy": [
            _chart(
                rows, "Mean reward", {"reward/mean": "reward"}, "All rollouts of the step; thick: moving mean.", smooth=True
            ),
            _chart(
                rows, "Held-out accuracy", {"eval/accuracy": "accuracy"}, "Greedy, on problems never trained on.", "percent"
            ),
            _chart(rows, "Reward parts", parts, "Mean of each part, as scored."),
        ],
        "Selection": [
            _chart(
                rows, "Reward variance, n → m", dict(zip(variance, ("all n", "kept m"), strict=True)), _gain(rows, *variance)
            ),
            _chart(
                rows,
                "Groups without signal",
                {"selection/no_signal_fraction": "fraction"},
                "Kept rewards all equal: advantage 0, nothing to learn.",
                "percent",
            ),
        ],
        "Time": [_time_chart(rows)],
        "Completions": [
            _chart(rows, "Mean length", {"completions/mean_length": "tokens"}, "Tokens a completion, EOS included."),
            _chart(rows, "Truncated", {"completions/truncated_fraction": "fraction"}, "Cut at the limit.", "percent"),
        ],
        "Policy": [
            _chart(rows, "Entropy", {"policy/entropy": "entropy"}, "Nats a token."),
            _chart(rows, "Gradient norm", {"policy/grad_norm": "norm"}, "Before clipping."),
            _chart(rows, "Clip fraction", {"policy/clip_fraction": "fraction"}, "Tokens whose ratio was clipped.", "percent"),
            _chart(rows, "KL to the reference", {"policy/kl": "KL"}, "Logged when loss.beta is above 0."),
            _chart(rows, "Log-probability gap", {"policy/logp_gap": "gap"}, "Engine against learner; 0 is exact."),
        ],
    }
    filled = ({"title": title, "charts": [chart for chart in charts if chart.traces]} for title, charts in sections.items())
    return [section for section in filled if section["charts"]]


def _chart(rows: list[dict], title: str, series: dict[str, str], note: str, unit: str = "", *, smooth: bool = False) -> Chart:
    """Lines of some metrics; a metric that was never logged has none."""
    traces = []
    for name, label in series.items():
        points = [row for row in rows if row.get(name) is not None]
        if not points:
            continue
        values = [row[name] for row in points]
        trace = {"type": "scatter", "name": label, "y": values, "meta": _axes(points)}
        trace |= {"mode": "lines+markers" if len(points) <= 40 else "lines"}
        if smooth and len(points) > 10:
            traces.append(trace | {"mode": "lines", "opacity": 0.35, "line": {"color": SMOOTH_COLOUR, "width": 1}})
            mean = {"name": "moving mean", "y": _moving_mean(values, len(values) // 10)}
            trace |= mean | {"mode": "lines", "line": {"color": SMOOTH_COLOUR, "width": 3}}
        traces.append(trace)
    axis = {"tickformat": ".2~%", "rangemode": "tozero"} if unit == "percent" else {}
    return Chart(title=title, note=note, traces=traces, layout={"yaxis": axis, "showlegend": len(series) > 1})


def _time_chart(rows: list[dict]) -> Chart:
    """Stacked seconds of each step: the timed parts, and what is left of the wall-clock between two rows."""
    wall = {row["step"]: row["wall_seconds"] - before["wall_seconds"] for before, row in pairwise(rows)}
    steps = [row for row in rows if row["step"] in wall and _timed(row)]
    if not steps:
        return Chart("Seconds of each step", "", [], {})
    seconds = {part: [row.get(f"time/{part}_seconds") or 0.0 for row in steps] for part in TIME_PARTS}
    seconds["other"] = [max(0.0, wall[row["step"]] - _timed(row)) for row in steps]
    traces = [{"type": "bar", "name": part, "y": values, "meta": _axes(steps)} for part, values in seconds.items()]
    whole = [sum(column) for column in zip(*seconds.values(), strict=True)]
    share = ", ".join(f"{part} {sum(values) / (sum(whole) or 1):.0%}" for part, values in seconds.items())
    note = f"Of the time in steps: {share}. Other is evaluation, checkpoints and logging."
    layout = {"barmode": "stack", "bargap": 0, "yaxis": {"ticksuffix": " s"}, "showlegend": True}
    # One slow step (compilation) would flatten all the others.
    top = 1.5 * sorted(whole)[int(0.9 * (len(whole) - 1))]
    if max(whole) > 2 * top > 0:
        layout["yaxis"] |= {"range": [0, top]}
        slowest = whole.index(max(whole))
        note += f" The axis is cut: step {steps[slowest]['step']} took {whole[slowest]:.1f} s."
    return Chart("Seconds of each step", note, traces, layout)


def _gain(rows: list[dict], before: str, after: str) -> str:
    """How much variance selection adds, over the whole run."""
    pairs = [(row[before], row[after]) for row in rows if row.get(before) is not None and row.get(after) is not None]
    total = sum(pair[0] for pair in pairs)
    gain = f": {sum(pair[1] for pair in pairs) / total:.2f} times that of all n over the run" if total else ""
    return f"Mean over groups. The kept rollouts' variance is the signal that the update sees{gain}."


def _names(rows: Iterable[dict]) -> set[str]:
    return {name for row in rows for name in row}


def _timed(row: dict) -> float:
    return sum(row.get(f"time/{part}_seconds") or 0.0 for part in TIME_PARTS)


def _axes(points: list[dict]) -> dict:
    return {"step": [row["step"] for row in points], "wall": [round(row["wall_seconds"] / 60, 4) for row in points]}


def _moving_mean(values: Sequence[float], window: int) -> list[float]:
    reach = max(1, window // 2)
    near = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(some) / len(some) for some in near]


def _clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m pods_jax.report RUN_FOLDER [--out FILE]``."""
    parser = argparse.ArgumentParser(prog="python -m pods_jax.report", description="Write one HTML page about a run.")
    parser.add_argument("run_folder", type=Path, help="folder of the run, for example runs/default")
    parser.add_argument("--out", type=Path, help="where the page goes; <run_folder>/report.html by default")
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.run_folder, options.out))
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
