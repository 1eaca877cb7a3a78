"""Which questions are held out, where a data set has no split of its own."""

import hashlib

HELD_OUT_SHARE = 1 / 8
"""Share of all questions that is held out."""


def is_held_out(question: str) -> bool:
    """Tell by a stable hash of its text whether a question belongs to the held-out split.

    The text alone decides, so no seed, no size and no order of rows can bring a held-out question into training.
    """
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64
