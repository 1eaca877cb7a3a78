"""Sinks: what each of them is given, on its own store where it has one, and that none of them stops a run."""

import io
import json
import re
import struct
import sys
import threading
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from rich.console import Console

from pods_jax.run import sinks
from pods_jax.run.rollouts import rollout_rows
from pods_jax.run.sinks import SINKS, RunFacts, check_sinks, distributions, table_rows
from tests.run.logged import N, P, events_of, log_steps, open_log, records, rows


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self, run):
        self.run, self.steps, self.closed = run, [], 0
        self.opened.append(self)

    opened: ClassVar[list["Kept"]] = []

    def log(self, step, metrics, rollouts):
        self.steps.append((step, metrics, rollouts))

    def close(self):
        self.closed += 1


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(Kept, "opened", [])
    monkeypatch.setitem(SINKS, "kept", Kept)
    return Kept.opened


def test_a_sink_is_told_the_run_and_given_finite_metrics_and_the_rows_of_the_file(tmp_path, kept):
    with open_log(tmp_path, sinks=["kept"], name="first", config={"rollout": {"n": 5}}, resume_step=2, texts_per_step=3) as log:
        log.log_step(3, {"reward/mean": 0.5, "policy/kl": float("nan")}, wall_seconds=6.0, rollouts=records())
        log.log_step(4, {"reward/mean": 1}, wall_seconds=7.0)
    [sink] = kept
    assert sink.run == RunFacts(tmp_path, "first", {"rollout": {"n": 5}}, 3)
    assert [(step, metrics) for step, metrics, _ in sink.steps] == [
        (3, {"wall_seconds": 6.0, "reward/mean": 0.5, "log/nonfinite": 1}),
        (4, {"wall_seconds": 7.0, "reward/mean": 1}),
    ]
    assert sink.steps[0][2] == rows(tmp_path, "rollouts.jsonl")
    assert sink.steps[1][2] == []
    assert sink.closed == 1


def test_jsonl_is_always_there_and_opens_nothing_else(tmp_path):
    assert check_sinks(["jsonl"]) == {}
    with open_log(tmp_path, sinks=["jsonl"]) as log:
        log_steps(log, range(3))
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "rollouts.jsonl"}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["wanbd"],
            "log.sinks='wanbd' is unknown; did you mean 'wandb'? valid: tensorboard, wandb, trackio, jsonl, module:f",
        ),
        (["tensorboard", "tensorboard"], "log.sinks=tensorboard,tensorboard names a sink twice"),
        (["no_such_module:Sink"], "log.sinks: module 'no_such_module' cannot be imported"),
        (["json:JSONDecodeError"], "log.sinks: json:JSONDecodeError takes (msg, doc, pos); expected (run)"),
    ],
)
def test_a_sink_that_cannot_be_is_refused(names, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check_sinks(names)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_package_that_is_missing_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf"log.sinks={name} needs .* pip install 'pods_jax\[{name}\]'"):
        check_sinks([name])


def test_an_own_sink_is_a_module_and_its_function(tmp_path, monkeypatch):
    (tmp_path / "my_sinks.py").write_text(
        "class Lines:\n"
        "    def __init__(self, run): self.file = (run.folder / 'lines.txt').open('w')\n"
        "    def log(self, step, metrics, rollouts): print(step, len(rollouts), file=self.file)\n"
        "    def close(self): self.file.close()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with open_log(tmp_path, sinks=["my_sinks:Lines"]) as log:
        log_steps(log, range(3))
    assert (tmp_path / "lines.txt").read_text().split("\n") == ["0 0", f"1 {P * N}", f"2 {P * N}", ""]


class Failing(Kept):
    """A sink that fails in one of its methods."""

    where = ""

    def __init__(self, run):
        super().__init__(run)
        self.fail("init")

    def fail(self, where):
        if where == self.where:
            raise ConnectionError("no route to the host\nand a second line")

    def log(self, step, metrics, rollouts):
        super().log(step, metrics, rollouts)
        self.fail("log")

    def close(self):
        self.fail("close")


@pytest.mark.parametrize("progress", [True, False])
@pytest.mark.parametrize("where", ["init", "log", "close"])
def test_a_sink_that_fails_warns_once_and_the_run_and_the_other_sinks_go_on(
    where, progress, tmp_path, kept, monkeypatch, capsys
):
    monkeypatch.setattr(Failing, "where", where)
    monkeypatch.setitem(SINKS, "failing", Failing)
    screen = Console(file=io.StringIO())
    with open_log(tmp_path, sinks=["failing", "kept"], progress=progress, console=screen) as log:
        for step in range(4):
            log.log_step(step, {"reward/mean": 0.5}, wall_seconds=1.0 * step)
            log.settle()
    said = screen.file.getvalue() + capsys.readouterr().err  # pyright: ignore[reportAttributeAccessIssue]
    assert said.count("log.sinks: failing ") == 1
    assert "ConnectionError: no route to the host); the run goes on without it" in said
    assert "second line" not in said
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]
    failing, other = kept
    assert len(failing.steps) == {"init": 0, "log": 1, "close": 4}[where]
    assert [step for step, _, _ in other.steps] == [0, 1, 2, 3]
    assert other.closed == 1


@pytest.mark.parametrize("way", ["settled", "behind", "closed"])
def test_a_sink_that_hangs_is_given_up(way, tmp_path, monkeypatch, capsys):
    over = threading.Event()

    class Hanging(Kept):
        def log(self, step, metrics, rollouts):
            over.wait()

    monkeypatch.setitem(SINKS, "hanging", Hanging)
    monkeypatch.setattr(sinks, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(sinks, "BACKLOG", 2)
    with open_log(tmp_path, sinks=["hanging"]) as log:
        for step in range({"settled": 1, "behind": 5, "closed": 1}[way]):
            log.log_step(step, {}, wall_seconds=0.0)
        if way == "settled":
            log.settle()
    over.set()
    assert capsys.readouterr().err.count("log.sinks: hanging ") == 1
    assert len(rows(tmp_path)) == {"settled": 1, "behind": 5, "closed": 1}[way]


def test_histograms_hold_every_score_and_length_and_the_table_the_kept_texts():
    some = records(valid_PN=np.arange(P * N).reshape(P, N) > 3)
    made = list(rollout_rows(7, replace(some, rewards_PN=np.arange(P * N, dtype=np.float32).reshape(P, N)), 7))
    found = distributions(made)
    assert sorted(found["reward/all"]) == list(range(4, P * N))
    np.testing.assert_array_equal(found["completions/length"], some.length_PN.ravel())
    assert distributions([]) == {}
    assert list(distributions([row | {"total": None} for row in made])) == ["completions/length"]
    table = [dict(zip(sinks.TABLE_COLUMNS, row, strict=True)) for row in table_rows(made)]
    assert len(table) == 7
    for row in table:
        _, p, n = row["text"].split()
        assert (row["prompt"], row["answer"], row["index"]) == (f"question {p}", p, int(n))
    assert {row["prompt_id"] for row in table} == {"train/0", "train/1"}


def test_tensorboard_has_a_histogram_of_rewards_and_lengths(tmp_path):
    with open_log(tmp_path, sinks=["tensorboard"]) as log:
        log_steps(log, [0, 1])
    [path] = (tmp_path / "tensorboard").iterdir()
    found = {(e.step, v.tag): v.histo.num for e in events_of(path) for v in e.summary.value if v.HasField("histo")}
    assert found == {(1, "reward/all"): P * N, (1, "completions/length"): P * N}


def test_wandb_offline_records_every_step_and_goes_on_under_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with open_log(tmp_path, sinks=["wandb"], name="first", config={"rollout": {"n": N}}) as log:
        log_steps(log, range(3))
    run_id = (tmp_path / "wandb" / "run_id").read_text().strip()
    with open_log(tmp_path, sinks=["wandb"], name="first", resume_step=2) as log:
        log_steps(log, [3])
    [first, second] = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    steps = history(first)
    assert [row["_step"] for row in steps] == [0, 1, 2]
    assert [row["reward/mean"] for row in steps] == [0, 0.125, 0.25]
    assert steps[1]["reward/all/_type"] == steps[1]["completions/length/_type"] == "histogram"
    assert sum(steps[1]["completions/length/values"]) == P * N
    assert (steps[1]["rollouts/_type"], steps[1]["rollouts/nrows"]) == ("table-file", P * N)
    assert [row["_step"] for row in history(second)] == [3]


def history(path):
    """Rows of a local W&B record: after a header of 7 bytes, chunks in blocks of 32 KiB, as in LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    data, at, record, found = path.read_bytes(), 7, b"", []
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the end of one
            one, record = Record.FromString(record), b""
            if one.WhichOneof("record_type") == "history":
                items = one.history.item
                found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def test_trackio_stores_every_step_and_goes_on_under_its_name(tmp_path, monkeypatch, capsys):
    assert "trackio" not in sys.modules  # it reads where its store is when it is imported
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    with open_log(tmp_path, sinks=["trackio"], name="first", config={"rollout": {"n": N}}) as log:
        log_steps(log, range(3))
    with open_log(tmp_path, sinks=["trackio"], name="first", resume_step=2) as log:
        log_steps(log, [3])
    from trackio.sqlite_storage import SQLiteStorage

    found = SQLiteStorage.get_logs("pods_jax", "first")
    assert [(row["step"], row["reward/mean"]) for row in found] == [(0, 0), (1, 0.125), (2, 0.25), (3, 0.375)]
    assert "reward/all" not in found[0]
    for row in found[1:]:
        assert sum(row["reward/all"]["values"]) == sum(row["completions/length"]["values"]) == P * N
        assert [one["text"] for one in row["rollouts"]["_value"]] == [f"text {p} {n}" for p in range(P) for n in range(N)]
