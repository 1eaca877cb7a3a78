"""The few sizes that a batch of varying size is rounded up to, because each is a compiled program."""

import math

SMALLEST_PART = 8
"""No size is below one part in this many of the whole: the padding of so small a batch costs little."""


def ladder(most: int, multiple: int, rungs: int) -> list[int]:
    """Sizes up to ``most``, ascending: that one, and smaller ones at equal ratios that are multiples of ``multiple``.

    Args:
        most: The whole.
        multiple: What smaller sizes are multiples of.
        rungs: Sizes from one half to the next; 0 is the whole alone.
    """
    ratios = [1.0] + [2 ** (-(k + 1) / rungs) for k in range(ladder_length(rungs) - 1)]
    return sorted({min(most, math.ceil(most * ratio / multiple) * multiple) for ratio in ratios})


def ladder_length(rungs: int) -> int:
    """Most sizes that a ladder has."""
    return rungs * (SMALLEST_PART.bit_length() - 1) + 1
