import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped

from pods_jax.algorithm import advantages as module
from pods_jax.algorithm.advantages import ADVANTAGES, find_advantage

checked_group = jax.jit(jaxtyped(typechecker=beartype)(module.group_advantage), static_argnames=("advantage", "eps"))
checked_step = jax.jit(jaxtyped(typechecker=beartype)(module.normalise), static_argnames=("advantage", "eps"))


def group_advantage(*arrays, over="kept", eps=1e-4):
    return checked_group(*arrays, advantage=ADVANTAGES[over], eps=eps)


def ones(n):
    return jnp.ones(n, bool)


def test_hand_worked_over_the_kept():
    advantage, signal = group_advantage(jnp.array([5.0, 1, 0, 1, 0]), ones(5), jnp.array([1, 2, 3, 4]), eps=0.0)
    np.testing.assert_allclose(advantage, np.array([0.5, -0.5, 0.5, -0.5]) / np.sqrt(1 / 3), rtol=1e-6)
    assert signal


def test_hand_worked_over_all():
    rewards, valid = jnp.array([4.0, 1, 0, 3, 77]), jnp.array([1, 1, 1, 1, 0], bool)
    advantage, signal = group_advantage(rewards, valid, jnp.array([0, 2]), over="all", eps=0.5)
    np.testing.assert_allclose(advantage, np.array([2, -2]) / (np.sqrt(10 / 3) + 0.5), rtol=1e-6)
    assert signal


def test_epsilon_is_added_to_the_sample_standard_deviation():
    advantage, _ = group_advantage(jnp.array([0.0, 2.0]), ones(2), jnp.array([1, 0]), eps=0.1)
    np.testing.assert_allclose(advantage, np.array([1, -1]) / (np.sqrt(2) + 0.1), rtol=1e-6)


@pytest.mark.parametrize("over", ADVANTAGES)
@pytest.mark.parametrize(
    ("rewards", "index"),
    [
        ([0.1, 0.1, 0.1, 0.9], [0, 1, 2]),  # equal kept rewards, whatever the others are
        ([1e4, 1e4, 1e4, 0.0], [2, 0, 1]),
        ([0.0, 1.0, 2.0, 3.0], [2]),  # m = 1
        ([0.0, 1.0, 2.0, 3.0], [3, -1, -1]),  # one eligible rollout
        ([0.0, 1.0, 2.0, 3.0], [-1, -1, -1]),  # none
    ],
)
def test_groups_without_signal_have_advantages_of_exactly_zero(over, rewards, index):
    advantage, signal = group_advantage(jnp.array(rewards), ones(4), jnp.array(index), over=over, eps=0.0)
    np.testing.assert_array_equal(advantage, 0)
    assert not signal


@pytest.mark.parametrize("over", ADVANTAGES)
def test_the_smallest_difference_is_a_signal(over):
    advantage, signal = group_advantage(
        jnp.array([1, np.nextafter(np.float32(1), np.float32(2))]), ones(2), jnp.array([0, 1]), over=over, eps=0.0
    )
    assert signal
    np.testing.assert_allclose(advantage, np.array([-1, 1]) / np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize("over", ADVANTAGES)
def test_empty_slots_and_unscored_rollouts_change_nothing(over):
    rewards, valid = jnp.array([1, jnp.nan, 0, 4, jnp.inf, 9]), jnp.array([1, 1, 1, 1, 1, 0], bool)
    advantage, signal = group_advantage(rewards, valid, jnp.array([3, 0, -1, -1]), over=over)
    plain, _ = group_advantage(jnp.array([1, 0, 4.0]), ones(3), jnp.array([2, 0]), over=over)
    np.testing.assert_allclose(advantage[:2], plain, rtol=1e-6)
    np.testing.assert_array_equal(advantage[2:], 0)
    assert signal


@pytest.mark.parametrize("over", ADVANTAGES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(-50, 50), min_size=9, max_size=9), st.permutations(range(9)), st.sampled_from([0.0, 1e4]))
def test_advantages_equal_float64_numpy(over, steps, order, offset):
    rewards = (offset + np.array(steps) * 2.0**-10).astype(np.float32)
    index = np.array(order[:5])
    exact = rewards.astype(np.float64)
    of = exact[index] if over == "kept" else exact
    advantage, signal = group_advantage(jnp.asarray(rewards), ones(9), jnp.asarray(index), over=over)
    assert signal == (np.ptp(exact[index]) > 0)
    expected = (exact[index] - of.mean()) / (of.std(ddof=1) + 1e-4) if signal else np.zeros(5)
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("over", ADVANTAGES)
def test_the_lifted_form_equals_a_loop(over):
    rng = np.random.default_rng(0)
    rewards, valid = jnp.asarray(rng.normal(size=(4, 7)), jnp.float32), jnp.asarray(rng.random((4, 7)) < 0.8)
    index = jnp.array([[0, 1, 2], [6, 5, -1], [3, -1, -1], [-1, -1, -1]])
    lifted, signal = checked_step(rewards, valid, index, advantage=ADVANTAGES[over], eps=1e-4)
    loop = [group_advantage(*group, over=over) for group in zip(rewards, valid, index, strict=True)]
    np.testing.assert_allclose(lifted, jnp.stack([advantage for advantage, _ in loop]), rtol=1e-6)
    np.testing.assert_array_equal(signal, [True, bool(loop[1][1]), False, False])
    eager, _ = module.normalise(rewards, valid, index, advantage=ADVANTAGES[over], eps=1e-4)
    np.testing.assert_allclose(lifted, eager, rtol=1e-6)


def leave_one_out(rewards_N, valid_N, index_M, *, eps, scale=1.0):
    """An own advantage that says nothing of empty slots and signal."""
    kept_M = rewards_N[index_M]
    return scale * (kept_M - (kept_M.sum() - kept_M) / (kept_M.size - 1)), kept_M.max() > kept_M.min()


def test_an_advantage_of_ones_own_is_zero_in_empty_slots_and_without_signal():
    rewards = jnp.array([0.0, 1, 2, 5])
    advantage, signal = module.group_advantage(rewards, ones(4), jnp.array([1, 3]), advantage=leave_one_out, eps=0.0)
    np.testing.assert_array_equal(advantage, [-4, 4])
    assert signal
    advantage, _ = module.group_advantage(rewards, ones(4), jnp.array([1, 3, -1]), advantage=leave_one_out, eps=0.0)
    assert advantage[2] == 0
    advantage, signal = module.group_advantage(jnp.ones(4), ones(4), jnp.array([1, 3]), advantage=leave_one_out, eps=0.0)
    np.testing.assert_array_equal(advantage, 0)
    assert not signal


def test_an_unknown_advantage_is_refused_with_the_valid_names():
    with pytest.raises(ValueError, match=r"advantage.over='batch'.*kept, all, module:function"):
        find_advantage("batch")


def test_the_epsilon_is_set_by_its_own_key_alone():
    with pytest.raises(ValueError, match=r"advantage.options='eps=1'.*has: none"):
        find_advantage("kept", ["eps=1"])
