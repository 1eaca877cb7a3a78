"""The curves are read and fitted rightly, and what follows from them is found by hand."""

import numpy as np
import pytest

from pods_jax.bench.tradeoff import Curve, largest, sentence, tradeoff


def line(sizes, intercept, slope):
    return Curve.through(sizes, [intercept + slope * size for size in sizes])


def test_a_straight_line_is_found_and_followed_on_both_sides():
    curve = line([2, 4, 16], 3.0, 0.5)
    assert (curve.intercept, curve.slope) == pytest.approx((3.0, 0.5))
    for size in (1, 2, 3, 10, 16, 40):
        assert curve.at(size) == pytest.approx(3.0 + 0.5 * size)
    assert [curve.covers(size) for size in (1, 2, 16, 17)] == [False, True, True, False]


def test_the_line_has_the_least_relative_errors():
    sizes, seconds = np.array([1, 2, 4, 8]), np.array([1.0, 1.3, 2.9, 4.1])
    curve = Curve.through(sizes.tolist(), seconds.tolist())

    def error(intercept, slope):
        return np.sum(((intercept + slope * sizes) / seconds - 1) ** 2)

    best = error(curve.intercept, curve.slope)
    for change in ((1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3)):
        assert error(curve.intercept + change[0], curve.slope + change[1]) > best


def test_noise_does_not_make_a_larger_size_cheaper():
    curve = Curve.through([2, 4, 8], [1.0, 0.9, 1.5])
    values = [curve.at(size) for size in range(1, 20)]
    assert values == sorted(values)
    assert curve.at(4) == 1.0
    falling = Curve.through([2, 4], [1.0, 0.9])
    assert falling.at(100) == falling.at(1) == 1.0


@pytest.mark.parametrize(("seconds", "expected"), [(0.5, 0), (1.0, 1), (6.9, 6), (7.0, 7), (99.0, 10)])
def test_the_largest_size_within_a_time(seconds, expected):
    assert largest(lambda size: 1.0 * size, seconds, 10) == expected


def test_what_follows_from_two_lines_by_hand():
    # Generating: 1 + 0.1 n. Training: 2 + 0.5 m. A step of 16 -> 4 takes 2.6 + 4 = 6.6.
    rollout, update = line([4, 8, 16, 32], 1.0, 0.1), line([2, 4, 8, 16], 2.0, 0.5)
    answer = tradeoff(rollout, update, 16, 4, pairs=[2, 4, 6, 8])
    assert answer["step_seconds"] == pytest.approx(6.6)
    assert answer["asymmetry_marginal"] == pytest.approx(5.0)
    assert answer["asymmetry_average"] == pytest.approx((4 / 4) / (2.6 / 16))
    assert answer["train_all_seconds"] == pytest.approx(2.6 + 10)
    assert answer["saved_fraction"] == pytest.approx(6 / 12.6)
    assert answer["same_time_without"] == 6  # 1.6 + 5 = 6.6
    # For m=2, 6.6 - 3 = 3.6 is 26 rollouts; for m=6, 1.6 is 6; for m=8, 0.6 is none.
    assert answer["iso_cost"] == [{"m": 2, "n": 26}, {"m": 4, "n": 16}, {"m": 6, "n": 6}, {"m": 8, "n": 0}]


def test_a_pair_that_keeps_more_than_it_generates_is_none():
    rollout, update = line([4, 8], 1.0, 1.0), line([2, 4], 1.0, 0.01)
    answer = tradeoff(rollout, update, 4, 2, pairs=[2, 5])
    assert answer["iso_cost"] == [{"m": 2, "n": 4}, {"m": 5, "n": 0}]


def test_the_sentence_says_whether_it_pays():
    dear = tradeoff(line([4, 16], 1.0, 0.1), line([4, 16], 2.0, 0.5), 16, 4, pairs=[])
    assert sentence(dear, 16, 4).startswith("Down-sampling pays here: training one more rollout costs 5.0 times generating one")
    assert "48% less than one that trains all 16" in sentence(dear, 16, 4)
    assert "generates and trains 6 of 6" in sentence(dear, 16, 4)
    cheap = tradeoff(line([4, 16], 1.0, 0.1), line([4, 16], 2.0, 0.001), 16, 4, pairs=[])
    assert "hardly pays" in sentence(cheap, 16, 4)
    flat = tradeoff(Curve.through([4, 16], [1.0, 1.0]), line([4, 16], 2.0, 0.5), 16, 4, pairs=[])
    assert "costs nothing measurable" in sentence(flat, 16, 4)
