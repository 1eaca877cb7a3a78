import json

import pytest
import yaml

from pods_jax.compare.curves import (
    Curve,
    Spread,
    common_levels,
    levels_of,
    ratios,
    read_arm,
    read_curve,
    read_imports,
    time_to,
    times_to,
)
from pods_jax.compare.pages import mean_points
from pods_jax.compare.tables import accuracy_table, cost_table, level_table, ratio_table, way_table


def curve(accuracy, seconds=None, **changes):
    steps = [float(10 * i) for i in range(len(accuracy))]
    at = {"wall": [float(s) for s in seconds] if seconds else steps, "cpu": [2 * s for s in seconds or steps], "step": steps}
    return Curve(**{"at": at, "accuracy": accuracy, "seconds": {}, "steps": int(steps[-1])} | changes)


def write_run(folder, rows, seed=0):
    """A run's folder; each row is its step's seconds, CPU-seconds, compile seconds and accuracy, the last three if any."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": {"seed": seed}}))
    names = ("time/step_seconds", "time/step_cpu_seconds", "time/compile_seconds", "eval/accuracy")
    lines = [{"step": i} | {n: v for n, v in zip(names, row, strict=True) if v is not None} for i, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


START = (None, None, None, 0.25)


# --- time to a level ----------------------------------------------------------------------------------------------------------


def test_time_to_a_level_lies_on_the_line_between_two_evaluations():
    run = curve([0.2, 0.4, 0.8], seconds=[0, 4, 6])
    assert time_to(run, 0.6, "wall") == pytest.approx(5.0)
    assert time_to(run, 0.3, "wall") == pytest.approx(2.0)
    assert time_to(run, 0.6, "cpu") == pytest.approx(10.0)
    assert time_to(run, 0.6, "step") == pytest.approx(15.0)
    assert time_to(run, 0.8, "wall") == pytest.approx(6.0)


def test_the_first_crossing_counts_and_later_falls_do_not():
    assert time_to(curve([0.0, 0.6, 0.1, 0.6], seconds=[0, 6, 8, 20]), 0.5, "wall") == pytest.approx(5.0)


def test_a_level_at_the_start_takes_no_time_and_one_never_reached_has_none():
    assert time_to(curve([0.5, 0.6]), 0.5, "wall") == 0
    assert time_to(curve([0.1, 0.6, 0.2]), 0.61, "wall") is None


def test_the_ratio_is_the_baselines_time_over_the_others_to_the_same_level():
    slow, fast = curve([0.0, 0.4, 0.8], seconds=[0, 10, 20]), curve([0.0, 0.8, 0.8], seconds=[0, 5, 9])
    levels = levels_of({0: slow}, {0: fast}, 0.5)
    assert levels == {0: pytest.approx(0.4)}
    assert ratios({0: slow}, {0: fast}, levels, "wall").values == (pytest.approx(10 / 2.5),)
    assert ratios({0: slow}, {0: fast}, levels, "step").values == (pytest.approx(2.0),)


def test_seeds_without_a_ratio_are_counted_and_not_averaged():
    slow = {0: curve([0.0, 0.5]), 1: curve([0.0, 0.9]), 2: curve([0.5, 0.5]), 7: curve([0.0, 1.0])}
    fast = {0: curve([0.0, 1.0]), 1: curve([0.0, 0.2]), 2: curve([0.6, 0.6]), 8: curve([0.0, 1.0])}
    found = ratios(slow, fast, levels_of(slow, fast, 1.0), "wall")
    assert (found.values, found.count, found.total) == ((pytest.approx(2.0),), 1, 3)
    assert found.text() == "2.00, 1 of 3 seeds"


def test_a_clock_that_was_not_logged_leaves_its_own_column_empty_alone():
    fast = curve([0.0, 1.0])
    slow = curve([0.0, 1.0], at={"wall": [0.0, 30.0], "step": [0.0, 10.0]})
    levels = levels_of({0: slow}, {0: fast}, 1.0)
    assert ratios({0: slow}, {0: fast}, levels, "cpu").text() == "not logged"
    assert times_to({0: slow}, levels, "cpu").text() == "not logged"
    assert ratios({0: slow}, {0: fast}, levels, "wall").text() == "3.00"


@pytest.mark.parametrize(
    ("values", "total", "text"),
    [
        ((1.5, 3.0, 2.0), 3, "2.00 (1.50..3.00)"),
        ((1.0, 2.0), 3, "1.50 (1.00..2.00), 2 of 3 seeds"),
        ((1.0,), 1, "1.00"),
        ((), 2, "not reached"),
    ],
)
def test_a_spread_says_median_ends_and_how_many(values, total, text):
    assert Spread(values, total).text() == text


def test_the_common_level_is_one_that_every_arm_reaches():
    arms = [{0: curve([0.1, 0.8]), 1: curve([0.1, 0.5])}, {0: curve([0.1, 0.6]), 1: curve([0.1, 0.9]), 2: curve([0.1, 0.2])}]
    levels = common_levels(arms, 0.9)
    assert levels == {0: pytest.approx(0.54), 1: pytest.approx(0.45)}
    assert all(time_to(runs[seed], level, "wall") is not None for runs in arms for seed, level in levels.items())


# --- reading ------------------------------------------------------------------------------------------------------------------


def test_the_clock_adds_up_steps_and_a_compiling_one_counts_with_the_median_of_the_others(tmp_path):
    rows = [START, (9.0, 8.0, 8.0, None), (1.0, 3.0, 0.0, 0.5), (2.0, 4.0, 0.0, None), (6.0, 5.0, 0.0, 0.75)]
    run = read_curve(write_run(tmp_path / "run", rows))
    assert run.accuracy == [0.25, 0.5, 0.75]
    assert run.at == {"wall": [0, 3, 11], "cpu": [0, 7, 16], "step": [0, 2, 4]}
    assert run.steps == 4
    assert run.seconds == {"rest": pytest.approx(3.0), "cpu": pytest.approx(4.0)}


def test_where_every_step_compiled_their_rest_counts(tmp_path):
    run = read_curve(write_run(tmp_path / "run", [START, (9.0, 4.0, 8.0, None), (3.0, 4.0, 1.0, 0.5)]))
    assert run.at == {"wall": [0, 3], "cpu": [0, 3], "step": [0, 2]}


def test_parts_of_a_step_add_up_to_it(tmp_path):
    folder = write_run(tmp_path / "run", [START])
    fixed = {"time/step_seconds": 2.0, "time/update_seconds": 0.5}
    rows = [{"step": step, "time/rollout_seconds": rollout} | fixed for step, rollout in ((1, 1.0), (2, 0.5))]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    run = read_curve(folder)
    assert run.seconds == {"rollout": 0.75, "update": 0.5, "rest": pytest.approx(0.75)}
    assert "cpu" not in run.at


def test_what_cannot_be_compared_is_named(tmp_path):
    with pytest.raises(ValueError, match="step 1 has no time/step_seconds"):
        read_curve(write_run(tmp_path / "untimed", [START, (None, None, None, 0.5)]))
    with pytest.raises(ValueError, match="no eval/accuracy"):
        read_curve(write_run(tmp_path / "unjudged", [(None,) * 4, (1.0, 1.0, 0.0, None)]))


def test_imports_are_a_run_an_arm_of_runs_or_a_comparison(tmp_path):
    rows = [START, (1.0, 1.0, 0.0, 0.5)]
    write_run(tmp_path / "alone", rows, seed=3)
    write_run(tmp_path / "theirs" / "b", rows, seed=1)
    write_run(tmp_path / "theirs" / "a", rows, seed=2)
    write_run(tmp_path / "all" / "pods" / "seed0", rows)
    write_run(tmp_path / "all" / "grpo" / "seed0", rows)
    arms = read_imports([str(tmp_path / name) for name in ("alone", "theirs", "all")])
    assert {name: list(runs) for name, runs in arms.items()} == {
        "alone": [3],
        "theirs": [1, 2],
        "all/grpo": [0],
        "all/pods": [0],
    }
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl"):
        read_imports([str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match="two arms alone"):
        read_imports([str(tmp_path / "alone")] * 2)
    write_run(tmp_path / "theirs" / "c", rows, seed=1)
    with pytest.raises(ValueError, match=r"two runs with run\.seed=1"):
        read_arm(tmp_path / "theirs")


# --- tables and lines ---------------------------------------------------------------------------------------------------------


def test_tables_of_hand_worked_runs():
    parts = {"rollout": 0.25, "update": 1.0, "rest": 0.25, "cpu": 2.0}
    arms = {
        "pods": {seed: curve([0.0, 0.8], seconds=[0, 4]) for seed in (0, 1)},
        "grpo": {0: curve([0.0, 0.8], seconds=[0, 8]), 1: curve([0.0, 0.4], seconds=[0, 16])},
    }
    arms["grpo"] = {seed: Curve(run.at, run.accuracy, parts, run.steps) for seed, run in arms["grpo"].items()}
    [row] = ratio_table(arms, 1.0).rows
    assert row == [
        "grpo",
        "60.0% (40.0%..80.0%)",
        "12.0 (8.0..16.0)",
        "3.0 (2.0..4.0)",
        "5.00 (2.00..8.00)",
        "5.00 (2.00..8.00)",
        "1.50 (1.00..2.00)",
        "2 of 2",
    ]
    assert accuracy_table(arms).rows[1] == ["grpo", "2", "10 (10..10)", "0.0% (0.0%..0.0%)", *["60.0% (40.0%..80.0%)"] * 2]
    assert cost_table(arms).rows[1] == ["grpo", "1.500", "0.250", "", "1.000", "0.250", "2.000"]
    assert [row[2] for row in level_table(arms, 1.0).rows] == ["3.0 (2.0..4.0)", "12.0 (8.0..16.0)"]
    assert way_table(arms).rows == [["grpo", *["5.00 (1.50)"] * 4]]  # straight lines from nothing: the same share of the way


def test_a_level_that_is_not_reached_on_the_way_has_no_ratio():
    arms = {"pods": {0: curve([0.0, 0.5], seconds=[0, 4])}, "grpo": {0: curve([0.0, 0.8], seconds=[0, 8])}}
    assert way_table(arms).rows == [["grpo", "1.25 (0.62)", *["not reached"] * 3]]


def test_the_mean_line_passes_the_steps_that_all_seeds_were_evaluated_at():
    longer = curve([0.2, 0.6, 1.0], seconds=[0, 4, 8])
    shorter = curve([0.4, 0.4], seconds=[0, 6])
    points = mean_points([longer, shorter])
    assert points["step"] == [0, 10]
    assert points["wall"] == [0, 5]
    assert points["mean"] == pytest.approx([0.3, 0.5])
    assert (points["low"], points["high"]) == ([0.2, 0.4], [0.4, 0.6])
