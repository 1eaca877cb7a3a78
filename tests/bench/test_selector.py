"""The NumPy references are right on their own, and a disagreement stops the benchmark."""

import itertools

import jax
import numpy as np
import pytest

from pods_jax.bench import selector


@pytest.mark.parametrize(("n", "m"), [(5, 1), (5, 2), (7, 3), (7, 7)])
def test_the_reference_of_max_variance_is_optimal(n, m):
    rewards_PN = np.round(np.random.default_rng(n + m).random((11, n)), 1)
    kept = selector.numpy_max_variance(rewards_PN, m)
    best = [max(np.var(chosen) for chosen in itertools.combinations(row, m)) for row in rewards_PN]
    np.testing.assert_allclose(kept.var(axis=1), best, atol=1e-12)


def test_the_other_references_by_hand():
    rewards = np.array([[5.0, 1.0, 4.0, 2.0, 3.0, 6.0]])
    assert selector.numpy_max_reward(rewards, 2).tolist() == [[5.0, 6.0]]
    assert selector.numpy_percentile(rewards, 3).tolist() == [[2.0, 4.0, 6.0]]


def test_a_set_that_is_not_optimal_is_found_out():
    rewards = np.array([[0.0, 0.0, 1.0, 1.0]], np.float32)
    selector._check("max_variance", rewards, 2, {"ours": np.array([[0, 3]])})
    with pytest.raises(RuntimeError, match="variance"):
        selector._check("max_variance", rewards, 2, {"ours": np.array([[2, 3]])})


@pytest.mark.parametrize("index", [[1, 1], [-1, 2]])
def test_a_repeated_or_empty_slot_is_found_out(index):
    with pytest.raises(RuntimeError, match="twice"):
        selector._check("random", np.zeros((1, 4), np.float32), 2, {"ours": np.array([index])})


def test_two_ways_of_sorting_that_differ_are_found_out():
    index = {"ours": np.array([[0, 1]]), "pairs": np.array([[1, 0]])}
    with pytest.raises(RuntimeError, match="pairs and ours keep different rollouts"):
        selector._check("random", np.zeros((1, 4), np.float32), 2, index)


@pytest.mark.parametrize(("n", "m"), [(6, 1), (7, 3), (7, 5), (6, 6)])
def test_every_way_passes_the_check_with_many_ties(n, m):
    rewards_PN = np.random.default_rng(n * m).integers(0, 3, size=(40, n)).astype(np.float32)
    arguments = rewards_PN, np.ones((40, n), bool), jax.random.key(0)
    for rule in ("max_variance", "max_reward"):
        ways = selector.implementations(rule, m)
        assert "top_k" in ways
        selector._check(rule, rewards_PN, m, {name: np.asarray(jax.jit(way)(*arguments)) for name, way in ways.items()})


def test_without_libtpu_a_topology_is_refused(monkeypatch):
    monkeypatch.setattr(selector.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(selector.ConfigError, match="topology=v5e:1x1 needs libtpu"):
        selector.run(selector.SelectorOptions(topology="v5e:1x1"))
