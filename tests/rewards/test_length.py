import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_jax.rewards.length import overlong_penalty


@pytest.mark.parametrize(("tokens", "penalty"), [(1, 0), (16384, 0), (18432, -0.5), (20480, -1), (30000, -1)])
def test_hand_worked_values_of_the_paper(tokens, penalty):
    assert overlong_penalty(tokens, limit=20480, margin=0.2) == penalty


@given(tokens=st.integers(1, 200), limit=st.integers(1, 200), margin=st.floats(0.01, 1))
def test_the_penalty_falls_with_length_within_bounds(tokens, limit, margin):
    penalty = overlong_penalty(tokens, limit=limit, margin=margin)
    assert -1 <= overlong_penalty(tokens + 1, limit=limit, margin=margin) <= penalty <= 0
    assert overlong_penalty(limit, limit=limit, margin=margin) == pytest.approx(-1)
