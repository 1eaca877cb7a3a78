import io
import re

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]

from pods_jax.run.log import read_metrics
from pods_jax.run.rollouts import read_rollouts
from tests.run.logged import M, N, P, events_of, log_steps, open_log, records, rows


def rollout_rows(folder):
    return rows(folder, "rollouts.jsonl")


def both_files(folder):
    return [(folder / name).read_bytes() for name in ("metrics.jsonl", "rollouts.jsonl")]


def test_metrics_row_is_flat_and_holds_step_clock_and_every_kind_of_plain_number(tmp_path):
    metrics = {"a": 1, "b": np.float32(0.1), "c": np.array(2.5), "d": np.int64(3), "e": np.array([0.25], np.float32), "f": True}
    with open_log(tmp_path) as log:
        log.log_step(0, {"eval/accuracy": 0.375}, wall_seconds=1.25)
        log.log_step(1, metrics, wall_seconds=3.0)
    assert rows(tmp_path) == [
        {"step": 0, "wall_seconds": 1.25, "eval/accuracy": 0.375},
        {"step": 1, "wall_seconds": 3.0, "a": 1, "b": 0.1, "c": 2.5, "d": 3, "e": 0.25, "f": 1},
    ]


def test_nonfinite_numbers_are_null_and_counted(tmp_path):
    with open_log(tmp_path) as log:
        log.log_step(1, {"x": float("nan"), "y": np.float32("inf"), "z": 1.0}, wall_seconds=0.0)
    assert rows(tmp_path) == [{"step": 1, "wall_seconds": 0.0, "x": None, "y": None, "z": 1.0, "log/nonfinite": 2}]


@pytest.mark.parametrize("value", [jnp.float32(1.0), "1", None, np.ones(2), np.array("text")])
def test_anything_but_one_plain_number_is_refused_by_name(tmp_path, value):
    with open_log(tmp_path) as log, pytest.raises(TypeError, match="metric 'policy/kl'"):
        log.log_step(1, {"policy/kl": value}, wall_seconds=0.0)


def test_step_must_grow_and_reserved_names_are_refused(tmp_path):
    with open_log(tmp_path) as log:
        log_steps(log, [0, 1])
        with pytest.raises(ValueError, match=r"step=1 .* last logged step is 1"):
            log_steps(log, [1])
        with pytest.raises(ValueError, match="wall_seconds"):
            log.log_step(2, {"wall_seconds": 1.0}, wall_seconds=1.0)


def test_rollout_rows_scatter_what_was_kept_to_its_place(tmp_path):
    made = records(index_PM=np.array([[3, 0], [4, -1], [-1, -1]]), advantage_PM=np.array([[0.7, -0.7], [0.1, 9.0], [9.0, 9.0]]))
    with open_log(tmp_path) as log:
        log.log_step(1, {}, wall_seconds=0.0, rollouts=made)
    kept = {(row["group"], row["index"]): row["advantage"] for row in rollout_rows(tmp_path) if row["kept"]}
    assert kept == {(0, 3): 0.7, (0, 0): -0.7, (1, 4): 0.1}
    assert all(row["advantage"] is None for row in rollout_rows(tmp_path) if not row["kept"])


def test_a_rollout_row_holds_its_numbers_text_and_for_the_first_the_problem(tmp_path):
    with open_log(tmp_path) as log:
        log.log_step(4, {}, wall_seconds=0.0, rollouts=records(length_PN=np.full((P, N), 7), index_PM=np.full((P, M), -1)))
    first, second = rollout_rows(tmp_path)[:2]
    assert first | {"parts": 0, "total": 0, "rank": 0} == {
        "step": 4, "group": 0, "prompt_id": "train/0", "index": 0, "parts": 0, "total": 0, "valid": True, "rank": 0,
        "kept": False, "advantage": None, "length": 7, "finished": True, "prompt": "question 0", "answer": "0",
        "text": "text 0 0",
    }  # fmt: skip
    assert second["parts"]["format"] == 0.1
    assert "prompt" not in second


def test_rank_is_1_for_the_highest_ties_share_it_and_unscored_rollouts_have_none(tmp_path):
    rewards_PN = np.array([[0.5, 1.0, np.nan, 0.5, 0.0]] * P)
    with open_log(tmp_path) as log:
        log.log_step(1, {}, wall_seconds=0.0, rollouts=records(rewards_PN=rewards_PN, valid_PN=~np.isnan(rewards_PN)))
    first = rollout_rows(tmp_path)[:N]
    assert [row["rank"] for row in first] == [2, 1, None, 2, 4]
    assert [row["total"] for row in first] == [0.5, 1.0, None, 0.5, 0.0]


@pytest.mark.parametrize(
    ("budget", "texts"), [(-1, [5, 5, 5]), (0, [0, 0, 0]), (3, [3, 0, 0]), (8, [5, 3, 0]), (99, [5, 5, 5])]
)
def test_texts_fill_whole_groups_first(tmp_path, budget, texts):
    with open_log(tmp_path, texts_per_step=budget) as log:
        log.log_step(1, {}, wall_seconds=0.0, rollouts=records())
    found = rollout_rows(tmp_path)
    assert [sum("text" in row for row in found if row["group"] == p) for p in range(P)] == texts
    assert [sum("prompt" in row for row in found if row["group"] == p) for p in range(P)] == [int(count > 0) for count in texts]


def test_a_group_shown_in_part_shows_the_kept_and_both_ends_of_the_rest(tmp_path):
    rewards_PN = np.array([[0.4, 0.3, 0.2, 0.1, 0.0]] * P)
    made = records(rewards_PN=rewards_PN, index_PM=np.array([[1, 2]] * P))
    with open_log(tmp_path, texts_per_step=4) as log:
        log.log_step(1, {}, wall_seconds=0.0, rollouts=made)
    assert [row["index"] for row in rollout_rows(tmp_path) if "text" in row] == [0, 1, 2, 4]


def test_texts_per_step_below_minus_1_is_refused(tmp_path):
    with pytest.raises(ValueError, match="texts_per_step=-2"):
        open_log(tmp_path, texts_per_step=-2)


def test_every_step_is_on_disk_once_the_log_has_settled(tmp_path):
    with open_log(tmp_path) as log:
        log_steps(log, [0, 1])
        log.settle()
        assert len(rows(tmp_path)) == 2
        assert len(rollout_rows(tmp_path)) == P * N
        log.settle()


def test_a_step_that_cannot_be_written_is_an_error_of_the_next_and_of_the_checkpoint(tmp_path, monkeypatch):
    with open_log(tmp_path) as log:
        log_steps(log, [0])
        log.settle()
        monkeypatch.setattr("pods_jax.run.log.json_line", no_space)
        log.log_step(1, {"reward/mean": 0.5}, wall_seconds=1.0)
        with pytest.raises(OSError, match="No space left"):
            log.settle()
        log.log_step(2, {"reward/mean": 0.5}, wall_seconds=2.0)
        with pytest.raises(OSError, match="No space left"):
            log.log_step(3, {"reward/mean": 0.5}, wall_seconds=3.0)
    assert [row["step"] for row in rows(tmp_path)] == [0]


def no_space(row):
    raise OSError("No space left on device")


@pytest.mark.parametrize("torn", ["", '{"step": 5, "wall_sec', '{"step": 5}', "\x00\x00\n"])
def test_a_resumed_run_leaves_the_same_files_as_an_uninterrupted_one(tmp_path, torn):
    with open_log(tmp_path / "whole") as log:
        log_steps(log, range(7))
    with open_log(tmp_path / "resumed") as log:
        log_steps(log, range(5))
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with (tmp_path / "resumed" / name).open("a") as file:
            file.write(torn)
    with open_log(tmp_path / "resumed", resume_step=3) as log:
        log_steps(log, range(4, 7))
    assert both_files(tmp_path / "resumed") == both_files(tmp_path / "whole")


def test_a_torn_line_within_the_kept_steps_is_dropped(tmp_path):
    with open_log(tmp_path) as log:
        log_steps(log, [0, 1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "wall_se')
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1]
    with open_log(tmp_path, resume_step=2) as log:
        log_steps(log, [3])
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 3]


def test_a_run_without_checkpoint_starts_its_files_anew(tmp_path):
    with open_log(tmp_path) as log:
        log_steps(log, range(3))
    with open_log(tmp_path) as log:
        log_steps(log, [0])
    assert [row["step"] for row in rows(tmp_path)] == [0]
    assert rollout_rows(tmp_path) == []


def test_other_processes_write_and_show_nothing(tmp_path):
    screen = io.StringIO()
    with open_log(tmp_path / "run", enabled=False, progress=True, sinks=["tensorboard"], console=Console(file=screen)) as log:
        log_steps(log, [0, 1])
        log.say("hello")
    assert not (tmp_path / "run").exists()
    assert screen.getvalue() == ""


def test_read_rollouts_keeps_chosen_steps_and_counts_all(tmp_path):
    with open_log(tmp_path) as log:
        for step in (1, 2, 12):
            quoting = [['"kept": true, {"step": 1}'] * N] * P
            log.log_step(step, {}, wall_seconds=0.0, rollouts=records(step, texts_PN=quoting))
    found = read_rollouts(tmp_path, {1, 12})
    assert {step: len(some) for step, some in found.by_step.items()} == {1: P * N, 12: P * N}
    assert (found.generated, found.kept) == (3 * P * N, 3 * P * M)


def test_read_rollouts_of_a_folder_without_them_is_empty(tmp_path):
    assert read_rollouts(tmp_path, {1}).by_step == {}


def test_text_survives_the_file_whatever_it_holds(tmp_path):
    text = "line\nbreak \u2028 \x85 \r \ud800 \x00 “quoted” \\ 答え"
    with open_log(tmp_path) as log:
        log.log_step(1, {}, wall_seconds=0.0, rollouts=records(texts_PN=[[text] * N] * P))
    assert read_rollouts(tmp_path, {1}).by_step[1][0]["text"] == text


def test_tensorboard_of_a_resumed_run_purges_from_the_resumed_step_and_skips_nonfinite(tmp_path):
    with open_log(tmp_path, sinks=["tensorboard"]) as log:
        log_steps(log, range(5))
    with open_log(tmp_path, sinks=["tensorboard"], resume_step=2) as log:
        log.log_step(3, {"reward/mean": 9.0, "policy/kl": float("nan")}, wall_seconds=6.0)
    before, after = (list(events_of(path)) for path in sorted((tmp_path / "tensorboard").iterdir()))

    def scalars(events):
        return [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value if v.HasField("simple_value")]

    assert [value for _, tag, value in scalars(before) if tag == "reward/mean"] == [0, 0.125, 0.25, 0.375, 0.5]
    assert [event.step for event in after if event.session_log.status == SessionLog.START] == [3]
    assert scalars(after) == [(3, "wall_seconds", 6.0), (3, "reward/mean", 9.0), (3, "log/nonfinite", 1.0)]


def test_without_a_terminal_progress_is_plain_lines_for_first_evaluated_and_last_steps(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, width=20)
    with open_log(tmp_path, total_steps=4, progress=True, console=console) as log:
        log.log_step(0, {"eval/accuracy": 0.25}, wall_seconds=10.0)
        for step in (1, 2, 3, 4):
            metrics = {"reward/mean": 0.5, "time/rollout_seconds": 0.25, "time/update_seconds": 1.5}
            log.log_step(step, metrics | ({"eval/accuracy": 0.5} if step == 2 else {}), wall_seconds=10.0 + 60 * step)
        log.say("done [bold]")
    assert screen.getvalue().splitlines() == [
        "step 0/4  held-out 25.0%",
        "step 2/4  reward 0.500  held-out 50.0%  rollout 0.25s  update 1.50s  ETA 2:00",
        "step 4/4  reward 0.500  held-out 50.0%  rollout 0.25s  update 1.50s  ETA 0:00",
        "done [bold]",
    ]


def test_on_a_terminal_one_live_line_shows_the_newest_step_and_said_lines_stay_above(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with open_log(tmp_path, progress=True, console=console) as log:
        log_steps(log, [0, 1])
        log.say("checkpoint written")
        log_steps(log, [2])
    plain = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", screen.getvalue())
    said, *live = plain[plain.index("checkpoint written") :].splitlines()
    assert said.strip() == "checkpoint written"
    assert "step 2/6  reward 0.250  ETA 0:08" in "".join(live)


def test_after_resuming_progress_remembers_the_accuracy(tmp_path):
    with open_log(tmp_path) as log:
        log.log_step(0, {"eval/accuracy": 0.25}, wall_seconds=0.0)
    screen = io.StringIO()
    with open_log(tmp_path, progress=True, resume_step=0, console=Console(file=screen)) as log:
        log_steps(log, [1])
    assert "held-out 25.0%" in screen.getvalue()
