"""Runs take turns, parts are told apart, and the JSON line is one line."""

import json
import time

import pytest

from pods_jax.bench.measure import WHOLE, Sample, Spread, Stopwatch, alternate, print_json, print_table


def test_runs_take_turns():
    order = []
    alternate({"a": lambda watch: order.append("a"), "b": lambda watch: order.append("b")}, 3)
    assert order == ["a", "b"] * 3


def test_parts_and_the_whole_are_measured():
    def run(watch):
        for _ in range(2):
            with watch("sleep"):
                time.sleep(0.01)
        with watch("work"):
            sum(range(1000))

    parts = alternate({"run": run}, 3)["run"]
    assert list(parts) == ["sleep", "work", WHOLE]
    assert parts["sleep"].seconds_min >= 0.02
    assert parts[WHOLE].seconds_min >= parts["sleep"].seconds_min


def test_sleeping_takes_wall_and_no_cpu_seconds():
    watch = Stopwatch()
    with watch("sleep"):
        time.sleep(0.05)
    assert watch.samples["sleep"].cpu_seconds < 0.05 <= watch.samples["sleep"].seconds


def test_the_spread_is_of_each_kind_of_second():
    spread = Spread.of([Sample(3.0, 1.0), Sample(1.0, 2.0), Sample(2.0, 6.0)])
    assert spread == Spread(2.0, 1.0, 3.0, 2.0, 1.0, 6.0)


def test_json_is_one_line_of_rounded_numbers(capsys):
    print_json({"a": 1 / 3, "b": [{"c": 2e9 / 3}], "d": 7, "e": True, "f": None})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"a": pytest.approx(1 / 3, abs=1e-6), "b": [{"c": 666667000.0}], "d": 7, "e": True, "f": None}


def test_a_table_shows_every_cell(capsys):
    print_table("title", ("name", "number"), [["first", "1.5"], ["second", "22.5"]])
    out = capsys.readouterr().out
    assert all(text in out for text in ("title", "name", "number", "first", "1.5", "second", "22.5"))
