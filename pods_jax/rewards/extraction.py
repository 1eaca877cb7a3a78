r"""Where in a completion the answer stands: the table ``SOURCES``, in order of precedence.

This is the first stage of verification; ``answers.py`` compares what is found with the gold answer. The sources of a run are
tried in the order of the table, whatever order they are named in, and the first that the completion has decides: a wrong
``<answer>`` is not mended by a right ``\boxed{}`` next to it. Every function is linear in the length of the completion.
"""

import re
from collections.abc import Callable, Sequence

from pods_jax.lookup import lookup
from pods_jax.rewards.quantities import LONGEST_NUMBER, NUMBER
from pods_jax.rewards.spelling import tidy

LAST_NUMBER_WINDOW = 2_000
"""Characters at the end of a completion in which the last number is looked for."""

BOX = r"\\(?:boxed|fbox)(?![A-Za-z])\s*"
"""What opens a box, up to its brace."""
_BRACES = re.compile(BOX + r"\{|\\.|[{}]", re.DOTALL)
_CUT_WORD = re.compile(r"\A\S+")
_DENIED = re.compile(r"(?:\b(?:not|never|than)|n't|!=|\\neq?)\W*(?:[A-Za-z]+\W+){0,2}\Z")
_OPERAND = re.compile(r"(?:[A-Za-z]\Z|[*/+^_]|[0-9)}%]\s*-|\\(?:times|cdot|div|pm)|(?:[\^_]|\\sqrt(?:\[[^\]]*\])?)\s*\{)\s*\Z")
_OPERATED = re.compile(
    r"\s*(?:[*/_!]|\^(?!\\circ)|[-+]\s*[0-9(\\]|\\(?:times|cdot|div|pm|sqrt|pi)\b)|[A-Za-z]?[0-9]|[a-z](?![A-Za-z])"
)


def answer_block(text: str) -> str | None:
    """Returns what stands in the last complete ``<answer>…</answer>`` block, stripped; ``None`` without one.

    The last ``</answer>`` closes the block, and the last ``<answer>`` before it opens it. A block that never closes, as in a
    completion cut at the limit, is no answer.
    """
    end = text.rfind("</answer>")
    if end < 0:
        return None
    start = text.rfind("<answer>", 0, end)
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def boxed(text: str) -> str | None:
    r"""Returns what stands in the last complete ``\boxed{…}`` or ``\fbox{…}``, stripped; ``None`` without one.

    Nested braces belong to the answer, and an escaped brace is a character like any other.
    """
    if "box" not in text:
        return None
    opened: list[tuple[bool, int]] = []
    box: tuple[int, int] | None = None
    for brace in _BRACES.finditer(text):
        if brace.group().endswith("{") and brace.group() != r"\{":
            opened.append((len(brace.group()) > 1, brace.end()))
        elif brace.group() == "}" and opened:
            is_box, start = opened.pop()
            if is_box and (box is None or start > box[0]):
                box = (start, brace.start())
    return None if box is None else text[box[0] : box[1]].strip()


def last_number(text: str) -> str | None:
    """Returns the last number of the text with its sign, fraction and percent sign; ``None`` without one.

    A number that is denied ("7 (not 18)") or compared ("less than 18") is no answer, and neither is an operand of a calculation
    without its result ("180 * 3") or a number of too many digits. An earlier number is not taken instead.
    """
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


SOURCES: dict[str, Callable[[str], str | None]] = {"answer": answer_block, "boxed": boxed, "last_number": last_number}
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
