"""The NumPy references are right on their own, and a disagreement stops the benchmark."""

import itertools

import jax
import numpy as np
import pytest

from pods_jax.bench import selector


def chosen(rule, rewards_PN, m, seed=0):
    index_PM = selector.numpy_select(rule, rewards_PN, m, np.random.default_rng(seed))
    assert all(len(set(row)) == m for row in index_PM.tolist())
    return np.take_along_axis(rewards_PN.astype(np.float64), index_PM, axis=1)


@pytest.mark.parametrize(("n", "m"), [(5, 1), (5, 2), (7, 3), (7, 7)])
def test_the_reference_of_max_variance_is_optimal(n, m):
    rewards_PN = np.round(np.random.default_rng(n + m).normal(size=(11, n)), 1).astype(np.float32)
    best = [max(np.var(kept) for kept in itertools.combinations(row.astype(np.float64), m)) for row in rewards_PN]
    np.testing.assert_allclose(chosen("max_variance", rewards_PN, m).var(axis=1), best, atol=1e-12)


def test_the_other_references_by_hand():
    rewards = np.array([[5.0, -1.0, 4.0, 2.0, 3.0, 6.0]], np.float32)
    assert chosen("max_reward", rewards, 2).tolist() == [[5.0, 6.0]]
    assert chosen("percentile", rewards, 3).tolist() == [[2.0, 4.0, 6.0]]
    assert chosen("all", rewards, 6).tolist() == [[-1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]


def test_the_reference_sorts_and_breaks_ties_at_random():
    rewards = np.array([[0.5, -0.0, 0.5, -2.0, 0.0, 0.5]], np.float32)
    orders = {tuple(selector.numpy_order(rewards, np.random.default_rng(seed))[0].tolist()) for seed in range(200)}
    assert {order[0] for order in orders} == {3}
    assert len(orders) == 2 * 6  # both zeros, and the three halves, in every order


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
