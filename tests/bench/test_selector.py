"""The NumPy references are right on their own, and a disagreement stops the benchmark."""

import itertools

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
    selector._check("max_variance", rewards, 2, np.array([[0, 3]]))
    with pytest.raises(RuntimeError, match="variance"):
        selector._check("max_variance", rewards, 2, np.array([[2, 3]]))


@pytest.mark.parametrize("index", [[1, 1], [-1, 2]])
def test_a_repeated_or_empty_slot_is_found_out(index):
    with pytest.raises(RuntimeError, match="twice"):
        selector._check("random", np.zeros((1, 4), np.float32), 2, np.array([index]))
