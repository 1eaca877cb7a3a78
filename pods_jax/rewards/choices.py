"""Choices: which option of a multiple-choice question an answer names, by letter or by the option's own text."""

import re
from collections.abc import Sequence

from pods_jax.rewards.quantities import read_quantity, same_quantity
from pods_jax.rewards.spelling import tidy, without_lead

LETTERS = "ABCDEFGHIJ"
LONGEST_CHOICE = 2_000
"""Characters up to which a text is read as a choice."""

_LETTER = re.compile(r"[(\[]?\s*([A-Ja-j])\s*[)\]]?\s*[.:)]?")
_LETTER_AND_TEXT = re.compile(r"(?:[(\[]\s*([A-Ja-j])\s*[)\]][.:]?|([A-Ja-j])\s*[.:)]|([A-J])\s+[-=])\s*(.+)", re.DOTALL)
# A letter in front of an option's text, not one within it: formulas such as CC(C)O are texts of options too.
_ANOTHER = re.compile(r"\b(?:or|and|but|not)\s+[(\[]?[A-J]\b|(?<!\S)(?:[(\[][A-J][)\]]|[A-J][.)](?=\s))")


def read_choice(text: str, options: Sequence[str] = ()) -> str | None:
    """Return the letter that an answer names, upper-case; ``None`` when it names none, or more than one.

    ``A``, ``(A)``, ``A.``, ``A. 12``, ``(A) 12``, "The answer is A" and "Option (A)" name A. With the options' texts, an
    option's text alone names it too, and a letter followed by the text of another option names none.

    Args:
        text: The answer.
        options: Texts of the options in order, where they are known; option ``i`` has letter ``LETTERS[i]``.
    """
    if len(text) > LONGEST_CHOICE:
        return None
    tidied, options = without_lead(tidy(text)), options[: len(LETTERS)]
    # Case tells formulas apart (c1ccccc1 is not C1CCCCC1), so that it is left out of account only after an exact comparison.
    for same in (_same_spelling, _same_words):
        if named := [LETTERS[i] for i, option in enumerate(options) if same(tidied, tidy(option))]:
            return named[0] if len(named) == 1 else None
    alone, labelled = _LETTER.fullmatch(tidied), _LETTER_AND_TEXT.fullmatch(tidied)
    if alone:
        return _within(alone[1].upper(), options)
    if labelled:
        letter, rest = (labelled[1] or labelled[2] or labelled[3]).upper(), labelled[4]
        named = {LETTERS[i] for i, option in enumerate(options) if _same_text(rest, option)}
        if _ANOTHER.search(rest) or (named and letter not in named):
            return None
        return _within(letter, options)
    named = [LETTERS[i] for i, option in enumerate(options) if _same_text(tidied, option)]
    return named[0] if len(named) == 1 else None


def same_choice(answer: str, gold: str, options: Sequence[str] = ()) -> bool | None:
    """Tell whether the answer names the gold letter; ``None`` when the gold answer names none."""
    letter = read_choice(gold, options)
    return None if letter is None else read_choice(answer, options) == letter


def _within(letter: str, options: Sequence[str]) -> str | None:
    return letter if not options or letter in LETTERS[: len(options)] else None


def _same_spelling(text: str, option: str) -> bool:
    return text == option


def _same_words(text: str, option: str) -> bool:
    return text.casefold() == option.casefold()


def _same_text(text: str, option: str) -> bool:
    if tidy(text) == tidy(option):
        return True
    value, wanted = read_quantity(text), read_quantity(option)
    return value is not None and wanted is not None and same_quantity(value, wanted)
