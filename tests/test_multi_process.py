import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pods_jax import evaluate, train

# Two processes of four devices each; process 0 alone may write.
PROCESS = """
import importlib
import sys
import jax

entry, index, port, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)

assert jax.device_count() == 8 and jax.local_device_count() == 4
sys.exit(importlib.import_module(f"pods_jax.{entry}").main(arguments))
"""


@pytest.fixture(scope="module")
def options(tiny_model):
    return {
        "run.steps": 3,
        "run.checkpoint_every": 2,
        "model.path": tiny_model,
        "data.prompts_per_step": 8,
        "data.train_problems": 40,
        "data.held_out_problems": 13,
        "rollout.n": 6,
        "rollout.max_completion_length": 12,
        "tuning.rollout_rungs": 2,
        "tuning.update_rungs": 3,
        "selection.m": 3,
        "optimizer.learning_rate": 0.01,
        "reward.functions": "tag_count",
        "mesh.data": 2,
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
        "eval.batch": 8,
        "eval.every": 2,
        "log.progress": "false",
    }


def arguments(options):
    return [text for key, value in options.items() for text in (f"--{key}", str(value))]


def launch(entry, options, cache):
    """Runs both processes of an entry to their end, which must be good; returns what each printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {
        "PYTHONPATH": str(Path(train.__file__).parents[1]),
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-c", PROCESS]
    processes = [
        subprocess.Popen(
            [*command, entry, str(index), port, *arguments(options)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in (0, 1)
    ]
    try:
        printed, errors = zip(*(process.communicate(timeout=400) for process in processes), strict=True)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors[0][-3000:] + errors[1][-3000:]
    return printed


@pytest.fixture(scope="module")
def folders(tmp_path_factory, options, compiled_once):
    """Run folders of the same training in two processes (interrupted and continued) and in one."""
    folder = tmp_path_factory.mktemp("runs")
    both = options | {"run.dir": folder, "run.name": "two", "mesh.distributed": "true"}
    for steps in (2, 3):
        launch("train", both | {"run.steps": steps}, compiled_once)
    assert train.main(arguments(options | {"run.dir": folder, "run.name": "one"})) == 0
    return folder / "two", folder / "one"


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_metrics_of_two_processes_equal_those_of_one(folders):
    two, one = map(rows, folders)
    one = [row for row in one if row["step"] <= 3]
    assert [row["step"] for row in two] == [row["step"] for row in one] == [0, 1, 2, 3]
    for row, expected in zip(two, one, strict=True):
        assert row.keys() == expected.keys()
        for name, value in row.items():
            if not name.startswith("time/") and name != "wall_seconds":
                assert value == pytest.approx(expected[name], rel=1e-5, abs=1e-5), (row["step"], name)


def test_the_first_process_records_every_rollout(folders):
    two, one = folders
    for row, expected in zip(rows(two, "rollouts.jsonl"), rows(one, "rollouts.jsonl"), strict=True):
        for name, value in row.items():
            assert value == (pytest.approx(expected[name], abs=1e-5) if name == "advantage" else expected[name])


def test_only_one_process_writes(folders):
    two, one = folders
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
    assert len(list((two / "tensorboard").iterdir())) == 2  # one for each time the run was started
    assert len(rows(two)) == 4


def test_the_export_of_two_processes_equals_that_of_one(folders):
    weights, expected = (load_file(folder / "export" / "model.safetensors") for folder in folders)
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


def test_an_evaluation_in_two_processes_equals_that_in_one_and_the_first_alone_prints_and_writes(
    folders, tmp_path, compiled_once, capsys
):
    """Of the run's folder, so that both processes read its checkpoint."""
    options = {
        "model.path": folders[0],
        "data.held_out_problems": 13,
        "rollout.max_completion_length": 12,
        "samples": 3,
        "batch": 8,
        "mesh.data": 2,
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
    }
    distributed = options | {"mesh.distributed": "true", "out": tmp_path / "two.jsonl"}
    first, second = (set(printed.splitlines()) for printed in launch("evaluate", distributed, compiled_once))
    capsys.readouterr()
    assert evaluate.main(arguments(options | {"out": tmp_path / "one.jsonl"})) == 0
    expected = set(capsys.readouterr().out.splitlines()) - {""}
    assert f"checkpoint of step 3 of {folders[0]}" in expected
    # The library that connects the processes prints lines of its own, empty ones too.
    assert expected <= first
    assert not expected & second
    assert len(rows(tmp_path, "two.jsonl")) == 13 * 4
    assert (tmp_path / "two.jsonl").read_text() == (tmp_path / "one.jsonl").read_text()
