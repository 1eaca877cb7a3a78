r"""Mathematical answers, as far as text alone can decide in the training process.

It decides equal spellings, numbers against numbers, words, letters of options and numerals of another base. The rest needs
``algebra.py``, which runs in worker processes alone because untrusted text can make it hang.
"""

import re

from pods_jax.rewards.choices import same_choice
from pods_jax.rewards.quantities import read_quantity, same_quantity
from pods_jax.rewards.spelling import compact, tidy, without_lead
from pods_jax.rewards.workers import Job

LONGEST_EXPRESSION = 1_000
"""Characters up to which an answer is handed to algebra; a longer one that is not spelled as the gold answer is wrong."""

_ALGEBRA = "pods_jax.rewards.algebra:same_expression"

_LETTER = re.compile(r"\\(?:text|mbox|mathrm|textbf)\s*\{\s*\(?[A-Z]\)?\s*\}|\([A-Z]\)")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ '-][A-Za-z]+)*")
_AS_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf)\b")
_ASSIGNED = re.compile(r"\A\\?[A-Za-z]+ ?= ?")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_VALUE = re.compile(r"[0-9\\]")
_NUMERAL = re.compile(r"(-?[0-9A-F]+)_\{?([0-9]+)\}?")
_SEGMENT = re.compile(r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$", re.DOTALL)
_PROSE_WORD = re.compile(
    r"(?<![\\A-Za-z])(?!(?:sqrt|pi|sin|cos|tan|cot|sec|csc|log|ln|exp|infinity|and|or|cup|in)\b)[A-Za-z]{2,}"
)
_SAYS = re.compile(r"(?:=|:|\b(?:is|are|was|were|be|equals|has|have|gives))\s*\Z")
_SAYS_TEXT = re.compile(r"(?::|\b(?:is|are|was|were|be|equals))\s+")
_DENIES = re.compile(r"\b(?:not|never|wrong|incorrect|cannot|than)\b|n't\b")


def same_mathematics(answer: str, gold: str) -> bool | Job | None:
    """Returns whether two answers are equal; a ``Job`` where only algebra can tell, ``None`` for an empty gold answer."""
    gold_tidy = tidy(gold)
    if not gold_tidy:
        return None
    if _LETTER.fullmatch(gold.strip()):
        return same_choice(answer, gold)
    if _is_words(gold, gold_tidy):
        return without_lead(tidy(answer)).casefold() == gold_tidy.casefold()
    value = _ASSIGNED.sub("", gold_tidy)
    wanted = None if "=" in value else read_quantity(value)
    if wanted is not None and (given := read_quantity(answer)) is not None:
        return same_quantity(given, wanted)
    if len(answer) > LONGEST_EXPRESSION:
        return compact(tidy(answer)) == compact(gold_tidy)
    said = stated_expression(answer)
    answer_tidy = tidy(said) if said is not None else ""
    if not answer_tidy or compact(answer_tidy) == compact(gold_tidy):
        return bool(answer_tidy)
    if _UNPRINTABLE.search(answer_tidy) or (wanted is not None and not _VALUE.search(answer_tidy)):
        return False
    numeral = _NUMERAL.fullmatch(compact(gold_tidy))
    if numeral:
        return _same_numeral(compact(answer_tidy), numeral)
    return Job(_ALGEBRA, (answer_tidy, gold_tidy))


def stated_expression(answer: str) -> str | None:
    r"""Returns the expression that an answer states; ``None`` when its words deny one, or state none of several.

    Without words it is the whole answer: ``(3, \(\frac{\pi}{2}\))``. Among words it is the only formula, or the last one
    when it stands right behind "is", "=", ":" and the like and only words follow. Without delimiters it is what follows such a
    word.
    """
    segments = list(_SEGMENT.finditer(answer))
    outside = _SEGMENT.sub(" ", answer)
    if not _PROSE_WORD.search(re.sub(r"\\[a-zA-Z]+\s*(?:\{[^{}]*\})?", " ", outside)):
        return answer
    if _DENIES.search(outside):
        return None
    if not segments:
        said = list(_SAYS_TEXT.finditer(answer))
        return answer[said[-1].end() :] if said else answer
    last = segments[-1]
    trails = re.search(r"[0-9\\]", answer[last.end() :])
    if len(segments) > 1 and (trails or not _SAYS.search(answer[: last.start()])):
        return None
    return last.group()


def _is_words(gold: str, gold_tidy: str) -> bool:
    if not _WORDS.fullmatch(gold_tidy):
        return False
    return bool(_AS_TEXT.search(gold)) or ("\\" not in gold and max(map(len, gold_tidy.split())) > 3)


def _same_numeral(answer: str, gold: re.Match[str]) -> bool:
    given = _NUMERAL.fullmatch(answer)
    return (given[1], given[2]) == (gold[1], gold[2]) if given else answer == gold[1]
