import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pods_jax.devices.sharding import make_mesh, replicate, to_global, to_local
from pods_jax.loop import Clock, asked_transfers_only, score
from pods_jax.rewards.scoring import Scores
from pods_jax.types import Problem


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
    assert scores.metrics == {"reward/unscored": 3, "reward/verifier_norm": 7}
    np.testing.assert_array_equal(scores.valid_PN, [[False, True], [False, False]])
    np.testing.assert_array_equal(scores.rewards_PN, [[0, 2], [0, 0]])
