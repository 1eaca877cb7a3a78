"""The tables of a comparison, as rows of text for the terminal and for the page."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table as RichTable

from pods_jax.compare.curves import CLOCKS, PARTS, Curve, Runs, Spread, common_levels, levels_of, ratios, times_to


@dataclass(frozen=True)
class Table:
    """Words, column heads, and rows whose first cell names an arm."""

    title: str
    note: str
    heads: list[str]
    rows: list[list[str]] = field(default_factory=list)


def ratio_table(arms: Mapping[str, Runs], share: float) -> Table:
    """For every arm after the first: how much longer it takes to ``share`` of its best accuracy than the first arm does."""
    (reference, fast), *baselines = arms.items()
    table = Table(
        f"Time to {share:.0%} of each baseline's best accuracy, against {reference}",
        f"Both times are to the same level, so a ratio above 1 says how many times sooner {reference} is there. Median over "
        "seeds, in brackets the least and the greatest. Accuracy between evaluations is taken as a straight line. Every run "
        "ends after the same number of steps; a level that it has not reached by then is not reached here.",
        ["baseline", "level", "seconds", f"{reference}", "ratio", "CPU-s ratio", "step ratio", f"{reference} there"],
    )
    for name, slow in baselines:
        levels = levels_of(slow, fast, share)
        theirs, ours = (times_to(runs, levels, "wall") for runs in (slow, fast))
        ratio = [ratios(slow, fast, levels, clock).text() for clock in ("wall", "cpu", "step")]
        level = Spread(tuple(levels.values()), len(levels)).text("{:.1%}")
        reached = f"{ours.count} of {ours.total}"
        table.rows.append([name, level, theirs.text("{:.1f}"), ours.text("{:.1f}"), *ratio, reached])
    return table


ON_THE_WAY = (0.5, 0.75, 0.9, 0.95)


def way_table(arms: Mapping[str, Runs]) -> Table:
    """For every arm after the first: the ratio of the times to lower shares of its best accuracy."""
    (reference, fast), *baselines = arms.items()
    table = Table(
        f"On the way: seconds of each baseline over those of {reference}",
        "To the given shares of the baseline's best accuracy; of the steps in brackets. Medians over seeds. Where the accuracy "
        "flattens out, a single evaluation more or less decides when a level counts as reached; these levels are steeper.",
        ["baseline", *(f"to {share:.0%}" for share in ON_THE_WAY)],
    )
    for name, slow in baselines:
        row = [name]
        for share in ON_THE_WAY:
            levels = levels_of(slow, fast, share)
            wall, step = (ratios(slow, fast, levels, clock).median for clock in ("wall", "step"))
            row.append("not reached" if wall is None or step is None else f"{wall:.2f} ({step:.2f})")
        table.rows.append(row)
    return table


def level_table(arms: Mapping[str, Runs], share: float) -> Table:
    """Of a sweep: when each arm reaches a level that all reach."""
    levels = common_levels(list(arms.values()), share)
    table = Table(
        "Time to a common level",
        f"The level is {share:.0%} of the lowest best accuracy of all arms, seed by seed. Median over seeds, and the ends.",
        ["arm", "level", *CLOCKS.values()],
    )
    for name, runs in arms.items():
        times = [times_to(runs, levels, clock).text("{:.1f}") for clock in CLOCKS]
        table.rows.append([name, Spread(tuple(levels.values()), len(levels)).text("{:.1%}"), *times])
    return table


def accuracy_table(arms: Mapping[str, Runs]) -> Table:
    """Accuracy of every arm: before, best, in the end."""
    table = Table(
        "Accuracy", "Held-out accuracy of greedy decoding. Median over seeds, least and greatest.",
        ["arm", "seeds", "steps", "before", "best", "final"],
    )  # fmt: skip
    for name, runs in arms.items():
        curves = runs.values()
        values = ([c.accuracy[0] for c in curves], [c.best for c in curves], [c.accuracy[-1] for c in curves])
        steps = Spread(tuple(float(c.steps) for c in curves), len(curves)).text("{:.0f}")
        table.rows.append([name, str(len(curves)), steps, *(Spread(tuple(v), len(v)).text("{:.1%}") for v in values)])
    return table


def cost_table(arms: Mapping[str, Runs]) -> Table:
    """Seconds of a step by part."""
    table = Table(
        "Seconds a step",
        "Mean over the steps that compiled nothing, then over seeds; evaluation and checkpoints are not in it.",
        ["arm", "step", *PARTS, "CPU-seconds"],
    )
    for name, runs in arms.items():
        parts = mean_seconds(list(runs.values()))
        whole = sum(value for part, value in parts.items() if part != "cpu")
        table.rows.append([name, f"{whole:.3f}", *(_seconds(parts.get(part)) for part in (*PARTS, "cpu"))])
    return table


def mean_seconds(curves: list[Curve]) -> dict[str, float]:
    """Mean over runs of the seconds of each part of a step that all have logged."""
    names = [name for name in curves[0].seconds if all(name in curve.seconds for curve in curves)]
    return {name: sum(curve.seconds[name] for curve in curves) / len(curves) for name in names}


def print_table(table: Table, console: Console) -> None:
    """Prints a table, its words below."""
    shown = RichTable(title=table.title, title_justify="left", caption=table.note, caption_justify="left")
    for i, head in enumerate(table.heads):
        shown.add_column(head, justify="right" if i else "left", no_wrap=not i)
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
