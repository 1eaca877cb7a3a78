"""Is a completion's answer the gold answer? Text alone decides; nothing from a completion is ever evaluated.

Every function here is linear in the length of the completion, whatever it holds.
"""

import re
from decimal import Decimal

from pods_jax.types import Problem

LONGEST_NUMBER = 64
"""Characters up to which a text is read as a number; longer ones are compared as text."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+)?")
_LEADING_ZERO = re.compile(r"[+-]?0[0-9,]")


def extract_answer(text: str) -> str | None:
    """Return what stands in the last complete ``<answer>…</answer>`` block, stripped; ``None`` without one.

    Precedence: the last ``</answer>`` closes the block, and the last ``<answer>`` before it opens it. An opened block that
    never closes (a completion cut at the limit) is no answer, and neither is a number outside the block.
    """
    end = text.rfind("</answer>")
    if end < 0:
        return None
    start = text.rfind("<answer>", 0, end)
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def same_answer(answer: str, gold: str) -> bool:
    """Compare an extracted answer with the gold answer.

    Equal texts are equal answers. Otherwise both must be numbers as a whole, and exactly equal in value: an optional sign,
    digits with or without thousands separators, optional decimals (``1,000`` = ``1000.0``). Any rest makes it text:
    ``7 (not 18)`` is not 18, and ``-5`` is not 5. Digits with a leading zero are a code, not a number: where ``018`` is asked,
    ``18`` is wrong. An empty answer is always wrong.
    """
    answer, gold = answer.strip(), gold.strip()
    if not answer:
        return False
    if answer == gold:
        return True
    value = _number(answer)
    return value is not None and value == _number(gold)


def is_correct(problem: Problem, completion: str) -> bool:
    """Tell whether a completion answers its problem; the measure of accuracy, in training and in evaluation."""
    answer = extract_answer(completion)
    return answer is not None and same_answer(answer, problem.answer)


def _number(text: str) -> Decimal | None:
    if len(text) > LONGEST_NUMBER or not _NUMBER.fullmatch(text) or _LEADING_ZERO.match(text):
        return None
    return Decimal(text.replace(",", ""))
