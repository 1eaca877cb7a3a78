r"""One spelling for answers: Unicode signs, LaTeX delimiters, spacing and fractions are written in one way.

The readers of numbers, expressions, choices and words share it. Nothing here decides what an answer means, and every pattern is
linear in the length of the text.
"""

# ruff: noqa: RUF001 - signs that models write are meant as they stand

import re

_FRACTIONS = ("⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "121234151357", "335555668888")
_SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "＝": "=", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ",
        "√": r"\sqrt ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ",
        "≠": r"\ne ", "°": r"^\circ ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "θ": r"\theta ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2007": " ", "\u3000": " ",
        "‐": "-", "‑": "-", "﹣": "-", "⁄": "/", "∕": "/", "…": r"\ldots ", "≈": r"\approx ", "ℝ": r"\mathbb{R} ",
        **{sign: rf"\frac{{{over}}}{{{under}}}" for sign, over, under in zip(*_FRACTIONS, strict=True)},
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F) if chr(code) not in "＝＼"},
    }
)  # fmt: skip
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_SUPERSCRIPT = re.compile(f"[{_SUPERSCRIPTS}]{{2,}}|[{_SUPERSCRIPTS}]")
_NORMAL = str.maketrans(_SUPERSCRIPTS, "0123456789+-")
_GAP = re.compile(
    r"(?<!\\)\\!\s*|(?<=\\\\)\s*\[[^\[\]]{0,9}\]|\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])\.?"
)
_SPACE = re.compile(r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])")
_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]|(?<!\\)\$")
_MONEY = re.compile(r"\\([$%#&])")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|mathbf|mathit|operatorname|textrm|boxed|fbox)\s*\{([^{}]*)\}")
_FRACTION_NAME = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_BARE_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_BARE_ROOT = re.compile(r"\\sqrt\s*(?:([0-9]+)|\(([^()]*)\))")
_WORD_SIGN = re.compile(r"(?<![\\A-Za-z])(sqrt|pi|infinity)(?![A-Za-z])")
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ\b)")
_LEAD = re.compile(
    r"(?:so|thus|therefore|hence)?,?\s*(?:(?:the|my)\s+)?(?:(?:final|correct|right|best)\s+)?(?:answer|option|choice)\s*(?:is\b|:)?\s*:?\s*",
    re.IGNORECASE,
)
_START, _END = " *`'\"“”,;:", " *`'\"“”,;:.\\"


def tidy(text: str) -> str:
    r"""Returns the text without math delimiters, ``\left``, thin spaces or markup, with ``\frac{a}{b}`` and ``\sqrt{a}``.

    ``\text{…}`` and its like give their contents, ``\%`` becomes a plain sign, and every ``$`` (currency or delimiter) is
    dropped. White space is kept, one blank at a time.
    """
    text = _SUPERSCRIPT.sub(_raised, text.translate(_SIGNS))
    text = _MONEY.sub(lambda found: " " if found[1] == "$" else found[1], text)
    text = _SPACE.sub(" ", _GAP.sub("", _DELIMITER.sub(" ", text)).replace("{,}", ","))
    text = _TEXT.sub(r" \1 ", _TEXT.sub(r" \1 ", text))
    text = _WORD_SIGN.sub(lambda found: "\\" + {"infinity": "infty"}.get(found[1], found[1]), text)
    text = _BARE_ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text)
    text = _BARE_FRACTION.sub(_fraction, _FRACTION_NAME.sub(r"\\frac", text))
    text = _DEGREE.sub(r"^\\circ ", text)
    return " ".join(text.replace("**", " ").split()).lstrip(_START).rstrip(_END)


def _raised(found: re.Match[str]) -> str:
    digits = found.group().translate(_NORMAL)
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def _fraction(found: re.Match[str]) -> str:
    over, under = found[1] or found[2] or "", found[3] or found[4] or ""
    return rf"\frac{{{over.strip()}}}{{{under.strip()}}}"


def compact(tidied: str) -> str:
    """Returns a tidied text without white space, for comparison character by character."""
    return "".join(tidied.split())


def without_lead(text: str) -> str:
    """Returns the text without an opening such as "The answer is"."""
    found = _LEAD.match(text)
    return text[found.end() :] if found else text
