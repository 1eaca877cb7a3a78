"""Rewards for the form of a completion: the paper's format score and its count of tags, both in linear time."""

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PENALTY_PER_CHARACTER = 0.01


def format_score(completion: str) -> float:
    """Returns 1 for ``<think>…</think>`` and then ``<answer>…</answer>``, less 0.01 for each character outside, at least 0.

    The first tag of each kind after the one before it counts; anything else, further tags included, stands outside. White space
    outside is free: the paper leaves that open, and a line break between the blocks is no fault.

    Reference: PODS (arXiv 2504.13818), format reward of the single-GPU set-up.
    """
    inside, outside = 0, []
    for opening, closing in (TAGS[:2], TAGS[2:]):
        start = completion.find(opening, inside)
        end = completion.find(closing, start + len(opening)) if start >= 0 else -1
        if end < 0:
            return 0.0
        outside.append(completion[inside:start])
        inside = end + len(closing)
    outside.append(completion[inside:])
    # A hundred words take the whole score already, so the rest of a huge completion need not be split.
    stray = sum(len(word) for part in outside for word in part.split(maxsplit=100))
    return max(0.0, 1.0 - PENALTY_PER_CHARACTER * stray)


def tag_count(completion: str) -> float:
    """Returns how many of the four tags ``<think> </think> <answer> </answer>`` stand exactly once: 0 to 4.

    Reference: PODS (arXiv 2504.13818), tag-count reward; its weight there is 0.025 a tag.
    """
    return float(sum(completion.count(tag) == 1 for tag in TAGS))
