"""The page of a comparison: what PODS saves, accuracy against time, what a step costs, and the tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from pods_jax.compare.curves import CLOCKS, PARTS, Curve, Runs, Spread, levels_of, ratios
from pods_jax.compare.tables import Table, mean_seconds
from pods_jax.report.html import Chart, write_page

AXES = {
    "wall": ("seconds", "seconds, without compiling and evaluation"),
    "cpu": ("CPU-seconds", "CPU-seconds, without compiling and evaluation"),
    "step": ("steps", "step"),
}
COLOURS = ("#4a6fe3", "#e8a33d", "#3fae8c", "#d0607a", "#8f78d8", "#5aa9d6", "#8a8f3c", "#b5673a")


def write_comparison(
    out: Path,
    arms: Mapping[str, Runs],
    tables: Sequence[Table],
    *,
    words: Mapping[str, str],
    facts: Sequence[str],
    share: float | None,
) -> Path:
    """Writes the page.

    Args:
        out: The file.
        arms: Runs by arm and seed; the first arm is what the others are compared with.
        tables: Tables to show, in order.
        words: A line on each arm.
        facts: Lines on how the comparison was made.
        share: Level of the headline's ratios, as a share of each baseline's best accuracy; None shows no ratios.

    Returns:
        ``out``.
    """
    sections = [
        {"title": "Accuracy against time", "charts": [accuracy_chart(arms)], "axis": True},
        {"title": "What a step costs", "charts": [cost_chart(arms)], "axis": False},
    ]
    return write_page(
        out,
        "compare/compare.html.jinja",
        axes=AXES,
        sections=sections,
        figures=_headline(arms, share) if share else [],
        tables=tables,
        words=[(name, words.get(name, "imported")) for name in arms],
        facts=facts,
    )


def accuracy_chart(arms: Mapping[str, Runs]) -> Chart:
    """A line for each arm through its mean over seeds, in a band from the least to the greatest."""
    traces = []
    for i, (name, runs) in enumerate(arms.items()):
        colour, curves = COLOURS[i % len(COLOURS)], list(runs.values())
        points = mean_points(curves)
        meta = {clock: points.get(clock, []) for clock in CLOCKS}
        shared = {"type": "scatter", "meta": meta, "legendgroup": name, "name": name}
        if len(curves) > 1:
            edge = shared | {"mode": "lines", "line": {"width": 0, "color": colour}, "showlegend": False, "hoverinfo": "skip"}
            traces.append(edge | {"y": points["low"]})
            traces.append(edge | {"y": points["high"], "fill": "tonexty", "fillcolor": f"{colour}2e"})
        traces.append(shared | {"mode": "lines+markers", "line": {"color": colour}, "marker": {"size": 4}, "y": points["mean"]})
    layout = {"yaxis": {"tickformat": ".0%", "rangemode": "tozero"}, "showlegend": True}
    return Chart("Held-out accuracy", "Greedy. Line: mean over seeds; band: least to greatest.", traces, layout)


def mean_points(curves: Sequence[Curve]) -> dict[str, list[float]]:
    """At each step that all runs were evaluated at: mean, least and greatest accuracy, and the mean of each clock all have."""
    steps = [step for step in curves[0].at["step"] if all(step in curve.at["step"] for curve in curves)]
    index = [[curve.at["step"].index(step) for step in steps] for curve in curves]
    at = list(zip(curves, index, strict=True))

    def over_seeds(values: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
        return list(zip(*([of[i] for i in places] for of, places in zip(values, index, strict=True)), strict=True))

    accuracy = over_seeds([curve.accuracy for curve, _ in at])
    points = {"mean": [fmean(a) for a in accuracy], "low": [min(a) for a in accuracy], "high": [max(a) for a in accuracy]}
    clocks = [clock for clock in CLOCKS if all(clock in curve.at for curve in curves)]
    return points | {clock: [fmean(x) for x in over_seeds([curve.at[clock] for curve in curves])] for clock in clocks}


def cost_chart(arms: Mapping[str, Runs]) -> Chart:
    """Stacked bars: seconds of a step by part, for each arm."""
    seconds = {name: mean_seconds(list(runs.values())) for name, runs in arms.items()}
    traces = [
        {"type": "bar", "name": part, "x": list(seconds), "y": [of.get(part, 0.0) for of in seconds.values()]} for part in PARTS
    ]
    layout = {"barmode": "stack", "yaxis": {"ticksuffix": " s"}, "xaxis": {"type": "category"}, "showlegend": True}
    return Chart("Seconds a step", "Mean over the steps that compiled nothing, and over seeds.", traces, layout)


def _headline(arms: Mapping[str, Runs], share: float) -> list[tuple[str, str, str]]:
    (reference, fast), *baselines = arms.items()
    figures = []
    for name, slow in baselines:
        levels = levels_of(slow, fast, share)
        ratio, level = ratios(slow, fast, levels, "wall"), Spread(tuple(levels.values()), len(levels))
        value = "none" if ratio.median is None else f"{ratio.median:.2f} x"
        remark = f"{share:.0%} of its best: {level.text('{:.1%}')}"
        remark += f"; seeds {ratio.text()}" if ratio.total > 1 else "" if ratio.values else "; not reached"
        figures.append((f"{reference} sooner than {name}", value, remark))
    return figures
