"""The charts of a run, from the rows of ``metrics.jsonl``."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from pods_jax.report.html import Chart

SMOOTH_COLOUR = "#4a6fe3"
TIME_PARTS = ("rollout", "reward", "update")


def sections(rows: list[dict]) -> list[dict]:
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
    steps = [row for row in rows if row["step"] in wall and step_seconds(row)]
    if not steps:
        return Chart("Seconds of each step", "", [], {})
    seconds = {part: [row.get(f"time/{part}_seconds") or 0.0 for row in steps] for part in TIME_PARTS}
    seconds["other"] = [max(0.0, wall[row["step"]] - step_seconds(row)) for row in steps]
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


def step_seconds(row: dict) -> float:
    """Seconds of the timed parts of one step."""
    return sum(row.get(f"time/{part}_seconds") or 0.0 for part in TIME_PARTS)


def _axes(points: list[dict]) -> dict:
    return {"step": [row["step"] for row in points], "wall": [round(row["wall_seconds"] / 60, 4) for row in points]}


def _moving_mean(values: Sequence[float], window: int) -> list[float]:
    reach = max(1, window // 2)
    near = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(some) / len(some) for some in near]
