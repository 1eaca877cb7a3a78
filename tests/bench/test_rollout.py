import numpy as np
import pytest

from pods_jax.bench.floors import rollout_work
from pods_jax.bench.lengths import LengthOptions
from pods_jax.bench.rollout import work_of


def test_without_a_distribution_every_rollout_runs_to_the_limit():
    assert (LengthOptions().draw((3, 5), 7, seed=0) == np.full((3, 5), 7)).all()


@pytest.mark.parametrize("name", ["geometric", "lognormal"])
def test_drawn_lengths_have_the_mean_and_stay_within_the_limit(name):
    options = LengthOptions(name, mean=0.2)
    length_PN = options.draw((100, 100), 1000, seed=0)
    assert (length_PN.min() >= 1, length_PN.max() <= 1000) == (True, True)
    assert abs(length_PN.mean() - 200) < 10  # the standard error is 1 to 2; few are cut
    np.testing.assert_array_equal(length_PN, options.draw((100, 100), 1000, seed=0))


def test_the_work_of_equal_lengths_is_that_of_a_rectangle_and_of_unequal_ones_the_sum():
    assert work_of(np.full((3, 5), 7), 11) == rollout_work(3, 5, 11, 7)
    both = work_of(np.array([[4, 9]]), 11)
    alone = [rollout_work(1, 1, 11, steps) for steps in (4, 9)]
    prompt = rollout_work(1, 1, 11, 1)
    for name in ("tokens", "pairs", "logits"):
        assert getattr(both, name) == sum(getattr(one, name) for one in alone) - getattr(prompt, name)
