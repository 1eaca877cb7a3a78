import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pods_jax.learner import GroupMetrics, UpdateMetrics
from pods_jax.loop import Clock, asked_transfers_only, reward_metrics, score, update_metrics
from pods_jax.rewards.scoring import Reward, Scorer
from pods_jax.sharding import make_mesh, replicate, to_global, to_local
from pods_jax.types import Problem


def one_pass(**changes):
    names = UpdateMetrics.__dataclass_fields__
    return UpdateMetrics(**{name: np.float32(changes.get(name, i / 8)) for i, name in enumerate(names)})


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
    names = GroupMetrics.__dataclass_fields__
    values = {name: np.float32(i) for i, name in enumerate(names)} | {"parts_mean": np.array([0.25, 0.5], np.float32)}
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
        double(x), double(np.ones(8, np.float32))
        with asked_transfers_only():
            np.testing.assert_array_equal(to_local(double(to_global(mesh, np.arange(8.0, dtype=np.float32)))), 2 * np.arange(8))
            assert to_local(double(replicate(np.float32(3)))) == 6
            with pytest.raises(Exception, match="Disallowed host-to-device"):
                double(np.ones(8, np.float32))
            with pytest.raises(Exception, match="Disallowed host-to-device"):
                x + 1


def test_a_reward_may_use_a_device_as_it_likes():
    def norm(problem, completion):
        return float(jnp.sum(jnp.asarray([len(completion), 1.0])))

    scorer = Scorer({"norm": Reward(norm, 1.0)})
    problems = [Problem(f"p/{i}", (), "1", "t") for i in range(2)]
    with asked_transfers_only():
        scores = score(scorer, problems, [["a", "bb"], ["ccc", ""]])
    np.testing.assert_array_equal(scores.rewards_PN, [[2, 3], [4, 1]])
    assert scores.valid_PN.all()


def test_unscored_completions_are_counted_by_reward():
    rewards = {"some": Reward(lambda p, c: None if "x" in c else 1.0, 1.0), "all": Reward(lambda p, c: 2.0, 0.5)}
    problems = [Problem(f"p/{i}", (), "1", "t") for i in range(2)]
    scores = score(Scorer(rewards), problems, [["x", "b"], ["xx", "x"]])
    assert scores.unscored == {"some": 3, "all": 0}
    np.testing.assert_array_equal(scores.valid_PN, [[False, True], [False, False]])
    np.testing.assert_array_equal(scores.rewards_PN, [[0, 2], [0, 0]])
