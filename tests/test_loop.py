from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pods_jax.algorithm.keeping import GroupMetrics
from pods_jax.devices.sharding import make_mesh, replicate, to_global, to_local
from pods_jax.loop import Clock, asked_transfers_only, reward_metrics, score, update_metrics
from pods_jax.rewards.scoring import Scores
from pods_jax.types import Problem
from pods_jax.update.learner import UpdateMetrics


def one_pass(**changes):
    values: dict[str, Any] = {name: np.float32(i / 8) for i, name in enumerate(UpdateMetrics.__dataclass_fields__)}
    values.update({name: np.float32(value) for name, value in changes.items()})
    return UpdateMetrics(**values)


def test_a_step_without_update_says_so_and_nothing_else():
    assert update_metrics([]) == {"tokens/trained": 0.0, "update/taken": 0.0}


def test_metrics_of_several_epochs_are_the_last_ones_sums_and_the_first_gap():
    first = one_pass(loss=1.0, logp_gap=0.5, logp_gap_max=0.75, tokens=10, taken=1, finite=1, clip_low_fraction=0.5)
    last = one_pass(loss=2.0, logp_gap=9.0, tokens=10, taken=0, finite=0, clip_low_fraction=0.25, clip_high_fraction=0.5)
    metrics = update_metrics([first, last])
    assert metrics["loss"] == 2
    assert (metrics["policy/logp_gap"], metrics["policy/logp_gap_max"]) == (0.5, 0.75)
    assert metrics["tokens/trained"] == 20
    assert (metrics["update/taken"], metrics["update/nonfinite"]) == (1, 1)
    assert metrics["policy/clip_fraction"] == 0.75
    assert all(type(value) is float for value in metrics.values())


def test_each_reward_part_has_its_mean_by_name():
    values: dict[str, Any] = {name: np.float32(i) for i, name in enumerate(GroupMetrics.__dataclass_fields__)}
    values["parts_mean"] = np.array([0.25, 0.5], np.float32)
    metrics = reward_metrics(GroupMetrics(**values), ["correct", "format"])
    assert metrics["reward/correct/mean"] == 0.25
    assert metrics["reward/format/mean"] == 0.5
    assert metrics["reward/mean"] == 0
    with pytest.raises(ValueError, match="zip"):
        reward_metrics(GroupMetrics(**values), ["correct"])


def test_a_clock_adds_up_by_name(monkeypatch):
    ticks = iter([1.0, 3.0, 10.0, 10.5, 20.0, 24.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    clock = Clock()
    for name in ("update", "reward", "update"):
        with clock(name):
            pass
    assert clock.seconds == {"time/update_seconds": 6.0, "time/reward_seconds": 0.5}


# --- transfers ----------------------------------------------------------------------------------------------------------------


def test_only_transfers_that_were_asked_for_pass():
    mesh = make_mesh((2, 2, 2))
    double = jax.jit(lambda x: x * 2)
    with jax.set_mesh(mesh):
        x = to_global(mesh, np.arange(8.0, dtype=np.float32))
        jax.block_until_ready((double(x), double(np.ones(8, np.float32))))
        with asked_transfers_only():
            np.testing.assert_array_equal(to_local(double(to_global(mesh, np.arange(8.0, dtype=np.float32)))), 2 * np.arange(8))
            assert to_local(double(replicate(np.float32(3)))) == 6
            with pytest.raises(Exception, match="Disallowed host-to-device"):
                double(np.ones(8, np.float32))
            with pytest.raises(Exception, match="Disallowed host-to-device"):
                jnp.add(x, 1)


class Rewards:
    """A scorer of one reward, the norm of (length of the text, 1), that leaves texts with an x unscored and counts faults."""

    def __init__(self):
        self.lengths = []

    def score(self, problems, texts, *, length_PN):
        self.lengths.append(length_PN)
        part_PN = np.array(
            [[np.nan if "x" in text else self.norm(text) for text in of_group] for of_group in texts], np.float32
        )
        valid_PN = np.isfinite(part_PN)
        return Scores(np.where(valid_PN, part_PN, 0), {"norm": part_PN}, valid_PN, {"norm": 0}, {"norm": 7})

    def norm(self, text):
        return float(jnp.sum(jnp.asarray([len(text), 1.0])))


def scored(texts):
    problems = [Problem(f"p/{i}", (), "1", "t") for i in range(len(texts))]
    scorer, length_PN = Rewards(), np.arange(4).reshape(2, 2)
    with asked_transfers_only():
        scores = score(scorer, problems, texts, length_PN)  # type: ignore[arg-type]
    np.testing.assert_array_equal(scorer.lengths, [length_PN])
    return scores


def test_a_reward_may_use_a_device_as_it_likes():
    scores = scored([["a", "bb"], ["ccc", ""]])
    np.testing.assert_array_equal(scores.rewards_PN, [[2, 3], [4, 1]])
    assert scores.valid_PN.all()


def test_unscored_completions_are_counted_by_reward():
    scores = scored([["x", "b"], ["xx", "x"]])
    assert scores.unscored == {"norm": 3}
    assert scores.faults == {"norm": 7}
    np.testing.assert_array_equal(scores.valid_PN, [[False, True], [False, False]])
    np.testing.assert_array_equal(scores.rewards_PN, [[0, 2], [0, 0]])
