import pytest

from pods_jax.devices.ladder import ladder, ladder_length


@pytest.mark.parametrize(
    ("most", "multiple", "rungs", "expected"),
    [
        (64, 1, 1, [8, 16, 32, 64]),
        (64, 1, 2, [8, 12, 16, 23, 32, 46, 64]),
        (10, 4, 1, [4, 8, 10]),
        (6, 1, 1, [1, 2, 3, 6]),
        (1, 8, 3, [1]),
        (64, 1, 0, [64]),
    ],
)
def test_sizes_are_few_and_end_with_the_whole(most, multiple, rungs, expected):
    assert ladder(most, multiple, rungs) == expected
    assert len(expected) <= ladder_length(rungs)
