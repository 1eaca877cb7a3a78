r"""Where in a completion the answer stands: the table ``SOURCES``, in order of precedence.

This is the first stage of verification; ``answers.py`` compares what is found with the gold answer. The sources of a run are
tried in the order of the table, whatever order they are named in, and the first that the completion has decides: a wrong
``<answer>`` is not mended by a right ``\boxed{}`` next to it.

The first ``<answer>`` block that is closed outside the reasoning counts, and the last ``\boxed{}`` outside it. An unfinished
reasoning has no answer but a closed block. What stands behind the mark of a new turn never counts (``turns.py``). Answers that
only "or", "and" or a comma separates are one answer of several parts. Every function is linear in the length of the completion.
"""

import re
from collections.abc import Callable, Sequence

from pods_jax.lookup import lookup
from pods_jax.rewards.quantities import LONGEST_NUMBER, NUMBER
from pods_jax.rewards.spelling import tidy
from pods_jax.rewards.tags import TAGS, first_block
from pods_jax.rewards.turns import own_turn, split_reasoning

LAST_NUMBER_WINDOW = 2_000
"""Characters at the end of a completion in which the last number is looked for."""

LONGEST_JOINT = 40
"""Characters that may stand between two answers that belong together."""

BOX = r"\\(?:boxed|fbox)(?![A-Za-z])\s*"
"""What opens a box, up to its brace."""
_BARE = (
    r"(?P<bare>(?:[+-]?[0-9](?:[.,/]?[0-9]){0,63}|\\[A-Za-z]+(?:\s*\{[^{}]{0,99}\}){0,2}|[A-Za-z])"
    r"(?=[.,;:]?(?:\s|\$|\\[)\]]|\Z)))"
)
_BRACES = re.compile(rf"{BOX}(?:\{{|{_BARE})|\\.|[{{}}]", re.DOTALL)
_JOINT = re.compile(r"(?:[\s$,;]|\\[()\[\],;]|\\q?quad|\\text\s*\{)*(?:(?P<or>or)|and|,|;)(?:[\s$]|\\[()\[\],;]|\\q?quad|\})*")
_CUT_WORD = re.compile(r"\A\S+")
_DENIED = re.compile(r"(?:\b(?:not|never|than)|n't|!=|\\neq?)\W*(?:[A-Za-z]+\W+){0,2}\Z")
_OPERAND = re.compile(r"(?:[A-Za-z]\Z|[*/+^_]|[0-9)}%]\s*-|\\(?:times|cdot|div|pm)|(?:[\^_]|\\sqrt(?:\[[^\]]*\])?)\s*\{)\s*\Z")
_OPERATED = re.compile(
    r"\s*(?:[*/_!]|\^(?!\\circ)|[-+]\s*[0-9(\\]|\\(?:times|cdot|div|pm|sqrt|pi)\b)|[A-Za-z]?[0-9]|[a-z](?![A-Za-z])"
)


def answer_block(text: str) -> str | None:
    """Returns what stands in the first ``<answer>…</answer>`` block that is closed outside the reasoning, stripped.

    The first ``</answer>`` closes the block, and the last ``<answer>`` before it opens it; blocks that only "or" and the like
    separates are joined. A reasoning that was never closed ends with the block. A block that never closes, as in a completion
    cut at the limit, is no answer: ``None``.
    """
    text = own_turn(text)
    outside, unfinished = split_reasoning(text)
    # A lone </think> behind the only block ends no reasoning.
    for part in (outside, outside + unfinished, "" if TAGS[0] in text else text):
        if found := first_block(part, *TAGS[2:]):
            answer, place = part[found.first : found.last].strip(), found.end
            while (more := first_block(part, *TAGS[2:], place)) and (joint := _joint(part, place, more.start)):
                answer, place = _joined(answer, joint, part[more.first : more.last].strip()), more.end
            return answer
    return None


def last_box(text: str) -> str | None:
    r"""Returns what the last ``\boxed`` outside the reasoning holds (``boxed``); ``None`` without one."""
    if "box" not in text:
        return None
    text = own_turn(text)
    outside, _ = split_reasoning(text)
    answer = boxed(outside)
    return boxed(text) if answer is None and TAGS[0] not in text else answer


def boxed(text: str) -> str | None:
    r"""Returns what stands in the last complete ``\boxed{…}`` or ``\fbox{…}`` that is not empty, stripped.

    Nested braces belong to the answer, and an escaped brace is a character like any other. Without braces, as in
    ``\boxed 9``, a box holds a number, a letter or a command with its arguments. Boxes that only "or", "and" or a comma
    separates are joined. ``None`` without a box, and the empty text where all are empty.
    """
    if "box" not in text:
        return None
    boxes = _boxes(text)
    filled = [box for box in boxes if text[box[1] : box[2]].strip()]
    if not filled:
        return "" if boxes else None
    start, first, last, _ = filled.pop()
    answer = text[first:last].strip()
    while filled and (joint := _joint(text, filled[-1][3], start)):
        start, first, last, _ = filled.pop()
        answer = _joined(text[first:last].strip(), joint, answer)
    return answer


def _boxes(text: str) -> list[tuple[int, int, int, int]]:
    """Returns the complete boxes in order: where each starts, where its content starts and ends, and where it ends."""
    opened: list[tuple[int, int, bool]] = []
    boxes = []
    for brace in _BRACES.finditer(text):
        if bare := brace["bare"]:
            boxes.append((brace.start(), brace.end() - len(bare), brace.end(), brace.end()))
        elif brace.group().endswith("{") and brace.group() != r"\{":
            opened.append((brace.start(), brace.end(), len(brace.group()) > 1))
        elif brace.group() == "}" and opened:
            start, first, is_box = opened.pop()
            if is_box:
                boxes.append((start, first, brace.start(), brace.end()))
    return sorted(boxes)


def _joint(text: str, place: int, end: int) -> re.Match[str] | None:
    return _JOINT.fullmatch(text, place, end) if place < end < place + LONGEST_JOINT else None


def _joined(one: str, joint: re.Match[str], other: str) -> str:
    return one if one == other else f"{one} or {other}" if joint["or"] else f"{one}, {other}"


def last_number(text: str) -> str | None:
    """Returns the last number of the text with its sign, fraction and percent sign; ``None`` without one.

    A number that is denied ("7 (not 18)") or compared ("less than 18") is no answer, and neither is an operand of a calculation
    without its result ("180 * 3") or a number of too many digits. An earlier number is not taken instead.
    """
    text = own_turn(text)
    window = text[-LAST_NUMBER_WINDOW:]
    if len(text) > LAST_NUMBER_WINDOW:
        window = _CUT_WORD.sub("", window)
    window, found = tidy(window), None
    for found in NUMBER.finditer(window):  # noqa: B007 - the last one is wanted
        pass
    if found is None or len(found.group()) > LONGEST_NUMBER:
        return None
    before, after = window[max(0, found.start() - 60) : found.start()], window[found.end() : found.end() + 20]
    minus = "-" if found.group().startswith("-") else ""
    if _DENIED.search(before) or _OPERAND.search(before + minus) or _OPERATED.match(after):
        return None
    return found.group().strip()


SOURCES: dict[str, Callable[[str], str | None]] = {"answer": answer_block, "boxed": last_box, "last_number": last_number}
"""Sources of an answer, in order of precedence."""

DEFAULT_SOURCES = ("answer", "boxed")
"""Both say "this is my answer"; the last number of a text does so only where a run asks for it."""


def check_sources(sources: Sequence[str], key: str = "verify.sources") -> tuple[str, ...]:
    """Returns the sources in order of precedence.

    Raises:
        ValueError: There is no source, one is named twice, or one does not exist; the message names ``key``, their setting.
    """
    for name in sources:
        lookup(SOURCES, name, key)
    if not sources or len(set(sources)) < len(sources):
        raise ValueError(f"{key}={list(sources)} must name at least one source, and each once")
    return tuple(name for name in SOURCES if name in sources)


def extract_answer(text: str, sources: Sequence[str] = ("answer",)) -> str | None:
    """Returns the answer of a completion as it is written, from the first of the sources that it has; ``None`` without any."""
    found = (SOURCES[name](text) for name in SOURCES if name in sources)
    return next((answer for answer in found if answer is not None), None)
