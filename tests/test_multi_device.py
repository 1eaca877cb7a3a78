import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from pods_jax import train

SHAPES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2), (4, 1, 2)]
STEPS = 3
# Differences of float error, which is all they hold.
ERRORS = {"policy/ratio_deviation", "policy/logp_gap", "policy/logp_gap_max"}
# Each shard has sizes of its own.
OF_THE_MACHINE = {"wall_seconds", "rollout/padding_fraction", "update/padding_fraction"}


@pytest.fixture(scope="module")
def run_on(tmp_path_factory, tiny_model, compiled_once):
    """Trains three steps on a mesh; returns the run folder and the final state."""
    folder = tmp_path_factory.mktemp("runs")

    def call(shape, **changes):
        options = {
            "run.dir": folder,
            "run.name": "x".join(map(str, shape)),
            "run.steps": STEPS,
            "model.path": tiny_model,
            "data.prompts_per_step": 8,
            "data.train_problems": 40,
            "data.held_out_problems": 10,
            "rollout.n": 6,
            "rollout.max_completion_length": 12,
            "selection.m": 3,
            "loss.beta": 0.1,
            "optimizer.learning_rate": 0.01,
            "reward.functions": "tag_count",
            "mesh.data": shape[0],
            "mesh.fsdp": shape[1],
            "mesh.tensor": shape[2],
            "eval.every": 0,
            "log.progress": "false",
            "log.sinks": "jsonl",
            "tuning.rollout_rungs": 2,
            "tuning.update_rungs": 3,
        }
        states = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "train", lambda *args, loop=train.train: states.append(loop(*args)) or states[-1])
            assert train.main([text for key, value in (options | changes).items() for text in (f"--{key}", str(value))]) == 0
        return folder / options["run.name"], states[0]

    return call


@pytest.fixture(scope="module")
def on_one(run_on):
    return run_on((1, 1, 1))[0]


def rows(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_mesh_trains_like_one_device(run_on, on_one, shape):
    folder, state = run_on(shape)
    for row, expected in zip(rows(folder, "metrics.jsonl"), rows(on_one, "metrics.jsonl"), strict=True):
        assert row.keys() == expected.keys()
        for name in row.keys() - ERRORS:
            if not name.startswith("time/") and name not in OF_THE_MACHINE:
                assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), (row["step"], name)
        assert all(row[name] < 1e-5 for name in ERRORS & row.keys())
    for row, expected in zip(rows(folder, "rollouts.jsonl"), rows(on_one, "rollouts.jsonl"), strict=True):
        advantage, of_one = row.pop("advantage"), expected.pop("advantage")
        assert row == expected
        assert (advantage is None) == (of_one is None)
        assert advantage is None or advantage == pytest.approx(of_one, abs=1e-5)
    weights, expected = (load_file(of / "export" / "model.safetensors") for of in (folder, on_one))
    for name, value in weights.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)
    assert_spread(state, shape)


def assert_spread(state, shape):
    """Each device holds its part of the parameters and of both moments, and no more."""
    data, fsdp, tensor = shape
    adam = next(part for part in state.opt_state if hasattr(part, "mu"))
    for tree in (state.params, adam.mu, adam.nu):
        parts = {
            "gate": (2, 16 // fsdp, 24 // tensor),
            "down": (2, 24 // tensor, 16 // fsdp),
            "q": (2, 16 // fsdp, 4 // tensor, 4),
            "k_bias": (2, 2 // tensor, 4),
            "input_norm": (2, 16),
        }
        for name, part in parts.items():
            assert {shard.data.shape for shard in tree["layers"][name].addressable_shards} == {part}, name
        assert {shard.data.shape for shard in tree["embed"].addressable_shards} == {(32 // tensor, 16 // fsdp)}
    assert all(len(leaf.sharding.device_set) == data * fsdp * tensor for leaf in jax.tree.leaves(state))
