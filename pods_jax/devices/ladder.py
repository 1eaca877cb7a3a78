"""The few sizes that a batch of varying size is rounded up to, because each is a compiled program."""

import math

SMALLEST_PART = 8
"""No size is below one part in this many of the whole: the padding of so small a batch costs little."""


def ladder(most: int, multiple: int, per_halving: int) -> list[int]:
    """Sizes up to ``most``, ascending: that one, and smaller ones at equal ratios that are multiples of ``multiple``.

    Args:
        most: The whole.
        multiple: What smaller sizes are multiples of.
        per_halving: Sizes from one half to the next; 0 is the whole alone.
    """
    steps = range(per_halving * (SMALLEST_PART.bit_length() - 1))
    ratios = [1.0] + [2 ** (-(k + 1) / per_halving) for k in steps]
    return sorted({min(most, math.ceil(most * ratio / multiple) * multiple) for ratio in ratios})


def most_rungs(per_halving: int) -> int:
    """Most sizes that a ladder has."""
    return per_halving * (SMALLEST_PART.bit_length() - 1) + 1
