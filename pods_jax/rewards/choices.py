"""Choices: which option of a multiple-choice question an answer names, by its letter or by its text."""

import re
from collections.abc import Sequence
from string import ascii_uppercase

from pods_jax.rewards.quantities import read_quantity, same_quantity
from pods_jax.rewards.spelling import tidy, without_lead

LETTERS = ascii_uppercase
"""Letters of options: option ``i`` has ``LETTERS[i]``, and a question has no more options than there are letters."""
USUAL_LETTERS = "ABCDEFGHIJ"
"""Letters that are looked for in any answer; later ones only where the options or the gold answer go beyond J."""
LONGEST_CHOICE = 2_000
"""Characters up to which a text is read as a choice."""

_LETTER = re.compile(
    r"[(\[]?\s*([A-Za-z])\s*[)\]]?\s*[.:)]?"
    r"|(?:[(\[]\s*([A-Za-z])\s*[)\]][.:]?|([A-Za-z])\s*[.:)]|([A-Z])\s+[-=])\s*(?P<rest>.+)",
    re.DOTALL,
)
# A letter in front of an option's text, not one within it: formulas such as CC(C)O are texts of options too.
_ANOTHER = re.compile(r"\b(?:or|and|but|not)\s+[(\[]?([A-Z])\b|(?<!\S)(?:[(\[]([A-Z])[)\]]|([A-Z])[.)](?=\s))")


def read_choice(text: str, options: Sequence[str] = (), gold: str = "") -> str | None:
    """Returns the letter that an answer names, in upper case; ``None`` when it names none, or more than one.

    ``A``, ``(A)``, ``A.``, ``A. 12``, ``(A) 12``, "The answer is A" and "Option (A)" name A. Where the options are known, the
    text of one names it too; a letter in front of another option's text names none, and neither does the letter of no option.

    Args:
        text: The answer.
        options: Texts of the options in order, where they are known.
        gold: The gold answer; without options, letters go up to J, or up to Z when this is a letter beyond J.
    """
    if len(text) > LONGEST_CHOICE:
        return None
    tidied, named = without_lead(tidy(text)), dict(zip(LETTERS, options, strict=False))
    # Case tells formulas apart (c1ccccc1 is not C1CCCCC1), so that it is left out of account only after an exact comparison.
    for same in (_same_spelling, _same_words):
        if letters := [letter for letter, option in named.items() if same(tidied, tidy(option))]:
            return letters[0] if len(letters) == 1 else None
    found = _LETTER.fullmatch(tidied)
    readable = {*USUAL_LETTERS, *(named or (LETTERS if _beyond_usual(gold) else ""))}
    if found and (letter := _letter(found)) in readable:
        rest = found["rest"]
        others = {_letter(another) for another in _ANOTHER.finditer(rest or "")}
        follows = {other for other, option in named.items() if rest and _same_text(rest, option)}
        fits = not others & readable and letter in (follows or named or readable)
        return letter if fits else None
    letters = [letter for letter, option in named.items() if _same_text(tidied, option)]
    return letters[0] if len(letters) == 1 else None


def same_choice(answer: str, gold: str, options: Sequence[str] = ()) -> bool | None:
    """Returns whether the answer names the letter of the gold answer; ``None`` when the gold answer names none."""
    letter = read_choice(gold, options, gold)
    return None if letter is None else read_choice(answer, options, gold) == letter


def _letter(found: re.Match[str]) -> str:
    return next(filter(None, found.groups())).upper()


def _beyond_usual(gold: str) -> bool:
    found = _LETTER.fullmatch(without_lead(tidy(gold)))
    return found is not None and not found["rest"] and _letter(found) not in USUAL_LETTERS


def _same_spelling(text: str, option: str) -> bool:
    return text == option


def _same_words(text: str, option: str) -> bool:
    return text.casefold() == option.casefold()


def _same_text(text: str, option: str) -> bool:
    if tidy(text) == tidy(option):
        return True
    value, wanted = read_quantity(text), read_quantity(option)
    return value is not None and wanted is not None and same_quantity(value, wanted)
