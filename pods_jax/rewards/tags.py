"""The tags of a completion, and rewards for its form: the paper's format score and its count of tags, in linear time.

``extraction.py`` reads the same blocks, so that the answer that the form is paid for is the answer that is judged.
"""

from dataclasses import dataclass

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PENALTY_PER_CHARACTER = 0.01


@dataclass(frozen=True)
class Block:
    """Where a closed block stands: with its tags from ``start`` to ``end``, within them from ``first`` to ``last``."""

    start: int
    first: int
    last: int
    end: int


def first_block(text: str, opening: str, closing: str, place: int = 0) -> Block | None:
    """Returns the first closed block from a place on; of several openings in front of its end, the last one opens it."""
    while (last := text.find(closing, place)) >= 0:
        start = text.rfind(opening, place, last)
        if start >= 0:
            return Block(start, start + len(opening), last, last + len(closing))
        place = last + len(closing)
    return None


def format_score(completion: str) -> float:
    """Returns 1 for ``<think>…</think>`` and then ``<answer>…</answer>``, less 0.01 for each character outside, at least 0.

    The first closed block of each kind after the one before it counts; anything else, further tags included, stands outside.
    White space outside is free: the paper leaves that open, and a line break between the blocks is no fault.

    Reference: PODS (arXiv 2504.13818), format reward of the single-GPU set-up.
    """
    inside, outside = 0, []
    for opening, closing in (TAGS[:2], TAGS[2:]):
        block = first_block(completion, opening, closing, inside)
        if block is None:
            return 0.0
        outside.append(completion[inside : block.start])
        inside = block.end
    outside.append(completion[inside:])
    # A hundred words take the whole score already, so the rest of a huge completion need not be split.
    stray = sum(len(word) for part in outside for word in part.split(maxsplit=100))
    return max(0.0, 1.0 - PENALTY_PER_CHARACTER * stray)


def tag_count(completion: str) -> float:
    """Returns how many of the four tags ``<think> </think> <answer> </answer>`` stand exactly once: 0 to 4.

    Reference: PODS (arXiv 2504.13818), tag-count reward; its weight there is 0.025 a tag.
    """
    return float(sum(completion.count(tag) == 1 for tag in TAGS))
