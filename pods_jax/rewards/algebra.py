r"""Whether two expressions are equal: the algebra behind mathematical answers, for worker processes alone.

Tuples, intervals, sets and lists are taken apart here, so that brackets and order count. The rest goes to math-verify, of which
only the LaTeX grammar is used, so that nothing is evaluated as Python. Its own time-outs are off: the worker's limits hold.
"""

import re
from dataclasses import dataclass

from math_verify import LatexExtractionConfig, parse, verify

from pods_jax.rewards.quantities import read_quantity, same_quantity
from pods_jax.rewards.spelling import compact

_LATEX = (LatexExtractionConfig(boxed_match_priority=-1),)
_ASSIGNMENT = re.compile(r"\s*(\\?[A-Za-z]+|[A-Za-z]\([A-Za-z]\)|[A-Za-z]_\{?\w\}?)\s*(?:=|\\in(?![a-z]))\s*(.+)", re.DOTALL)
_EQUALITY = re.compile(r"(?<![<>!:\\])=")
_UNBOUNDED = re.compile(r"\\infty|\\cup|\[|\]")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_JOINED = re.compile(r",?\s+(?:and|or)\s+")
_BRACKETS = ((r"\{", r"\}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"))


def warm_up() -> None:
    """Makes the grammar and sympy build their tables, which takes longer than an answer."""
    same_expression(r"(\frac{x+1}{2}, \sqrt{8}]", r"(\frac{1+x}{2}, 2\sqrt{2}]")


@dataclass(frozen=True)
class _Parts:
    """The items between the outermost brackets of a tuple or an interval, a set (braces) or a list (no brackets)."""

    brackets: str
    items: tuple[str, ...]


def same_expression(answer: str, gold: str) -> bool | None:
    r"""Returns whether two tidied expressions (``spelling.tidy``) are equal; ``None`` when the gold one cannot be read.

    ``x = 5`` answers 5, and 5 answers ``x = 5``; of a chain of equalities the last member counts. A tuple or an interval needs
    the same brackets, items and order, or its items in order, each assigned to a name. A set or a list needs the same items in
    any order, where ``\pm`` stands for both signs.
    """
    answer, gold = _values(_JOINED.sub(", ", answer).strip(), _JOINED.sub(", ", gold).strip())
    if compact(answer) == compact(gold):
        return True
    given, wanted = _parts(answer), _parts(gold)
    if wanted and wanted.brackets not in ("", "{}"):
        return _same_tuple(given, wanted) if given else _equal(answer, gold)
    if wanted or given:
        return _same_set(given or _Parts("", (answer,)), wanted or _Parts("", (gold,)))
    return _equal(answer, gold)


def _values(answer: str, gold: str) -> tuple[str, str]:
    """Leaves out the name that an expression is assigned to, where one of the two has none or both have the same."""
    given, wanted = _ASSIGNMENT.fullmatch(answer), _ASSIGNMENT.fullmatch(gold)
    if wanted and given and compact(given[1]) == compact(wanted[1]):
        return given[2], wanted[2]
    if wanted and not _EQUALITY.search(answer):
        return answer, wanted[2]
    if wanted or _EQUALITY.search(gold) or len(_split(answer, thousands=True)) > 1:
        return answer, gold
    return _EQUALITY.split(given[2] if given else answer)[-1].strip(), gold


def _same_tuple(given: _Parts, wanted: _Parts) -> bool:
    items = given.items
    if not given.brackets and all(assigned := [_ASSIGNMENT.fullmatch(item) for item in items]):
        items = tuple(found[2] for found in assigned if found)
    elif given.brackets != wanted.brackets:
        return False
    return len(items) == len(wanted.items) and all(
        same_expression(item, gold) is True for item, gold in zip(items, wanted.items, strict=True)
    )


def _same_set(given: _Parts, wanted: _Parts) -> bool:
    if given.brackets not in ("", "{}"):
        return False
    left = _both_signs(given.items)
    golds = _both_signs(wanted.items)
    if len(left) != len(golds):
        return False
    for gold in golds:
        match = next((i for i, item in enumerate(left) if same_expression(item, gold) is True), None)
        if match is None:
            return False
        del left[match]
    return True


def _both_signs(items: tuple[str, ...]) -> list[str]:
    values = []
    for item in items:
        found = _ASSIGNMENT.fullmatch(item)
        value = found[2] if found else item
        values += [value.replace(r"\pm", sign) for sign in "+-"] if r"\pm" in value else [value]
    return values


def _parts(text: str) -> _Parts | None:
    for opening, closing in _BRACKETS:
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and _balanced(inner):
            items = _split(inner)
            if len(items) > 1 or opening == r"\{":
                return _Parts((opening + closing).replace("\\", ""), items)
    items = _split(text, thousands=True)
    return _Parts("", items) if len(items) > 1 or r"\pm" in text else None


def _balanced(inner: str) -> bool:
    depth = 0
    for character in inner:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _split(text: str, *, thousands: bool = False) -> tuple[str, ...]:
    """Cuts a text at the commas outside all brackets; with ``thousands`` not at those that only group digits."""
    depth, start, items = 0, 0, []
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character in ",;" and depth == 0 and not (thousands and _THOUSANDS.match(text, position)):
            items.append(text[start:position].strip())
            start = position + 1
    return (*items, text[start:].strip())


def _equal(answer: str, gold: str) -> bool | None:
    if "=" not in answer + gold:
        given, wanted = read_quantity(answer), read_quantity(gold)
        if given is not None and wanted is not None:
            return same_quantity(given, wanted)
    # Within parentheses a comma separates: (12,102) is an interval.
    answer, gold = (text if "(" in text or "[" in text else _THOUSANDS.sub("", text) for text in (answer, gold))
    gold_parsed = _parsed(gold)
    if not gold_parsed:
        return None
    answer_parsed = _parsed(answer)
    if not answer_parsed:
        return False
    try:
        # An inequality answers an interval only where the gold answer cannot be a point.
        relations = bool(_UNBOUNDED.search(gold))
        return bool(
            verify(gold_parsed, answer_parsed, timeout_seconds=0, allow_set_relation_comp=relations, raise_on_error=True)
        )
    except MemoryError:
        raise
    except Exception:  # what sympy cannot compare is not equal
        return False


def _parsed(text: str) -> list:
    try:
        return parse(f"${text}$", extraction_config=_LATEX, fallback_mode="no_fallback", parsing_timeout=0, raise_on_error=True)  # pyright: ignore[reportArgumentType]
    except MemoryError:
        raise
    except Exception:  # what the grammar refuses is no expression
        return []
