"""The bundled task "tally": evaluate a chain of operations from left to right, modulo 10.

    prompt      +4*3+5-2*7+1=
    completion  <think>+4=4*3=2+5=7-2=5*7=5+1=6</think><answer>556</answer>

The total starts at 0 and there is no precedence. ``<think>`` echoes every operation with the running total after it, and
``<answer>`` holds the last three totals, so that a guess is right about once in a thousand. With six operations a prompt is 13
tokens and its completion 31, each without BOS or EOS.

The hash of an expression alone decides whether it is held out (``splitting.py``). The module also writes the demonstrations,
right or sloppy, from which the bundled models were warm-started.
"""

import numpy as np

from pods_jax.data.splitting import is_held_out
from pods_jax.problem import Problem

OPERATIONS = 6
"""Operations of a problem, the leading + included."""
TIMES_SHARE = 0.2
"""Probability that an operation after the first is a multiplication; + and - share the rest."""
MAX_TIMES_SHARE = 0.9
"""Largest such probability; beyond it there are too few different expressions."""
ANSWER_DIGITS = 3
"""How many of the last running totals the answer holds."""
MAX_PROBLEMS = 1_000_000
"""Most problems of one split; there are about 129 million expressions."""


def generate(rng: np.random.Generator, *, times_share: float = TIMES_SHARE) -> str:
    """Draws an expression such as ``+4*3+5-2*7+1=``: digits 1 to 9, and a + in front.

    Args:
        rng: Source of randomness, advanced by the draw.
        times_share: Probability that an operation after the first is ``*``.
    """
    plain = (1 - times_share) / 2
    signs = rng.choice(list("+-*"), size=OPERATIONS, p=[plain, plain, times_share])
    digits = rng.integers(1, 10, size=OPERATIONS)
    signs[0] = "+"  # a leading * or - would make the first total trivial or a special case
    return "".join(f"{sign}{digit}" for sign, digit in zip(signs, digits, strict=True)) + "="


def demonstration(expression: str, *, slip: float, rng: np.random.Generator) -> str:
    """Writes the completion of an expression, without EOS; a slip adds where it should multiply and carries the total on.

    Args:
        expression: What ``generate`` wrote.
        slip: Probability of a slip, drawn for each ``*`` on its own; 0 demonstrates the right rule.
        rng: Source of randomness, advanced once for every operation.

    Raises:
        ValueError: The expression is not of the form that ``generate`` writes.
    """
    written = _operations(expression)
    slips = rng.random(len(written)) < slip
    read = [("+" if sign == "*" and slipped else sign, digit) for (sign, digit), slipped in zip(written, slips, strict=True)]
    running = _run(read)
    return f"<think>{_steps(written, running)}</think><answer>{_answer(running)}</answer>"


def load_problems(split: str, *, count: int, seed: int, times_share: float = TIMES_SHARE) -> list[Problem]:
    """Generates distinct problems of one split, the same ones for the same seed.

    Args:
        split: ``"train"`` or ``"held_out"``.
        count: How many, from 1 to ``MAX_PROBLEMS``.
        seed: Seed of the expressions drawn.
        times_share: Probability that an operation after the first is ``*``, at most ``MAX_TIMES_SHARE``.

    Raises:
        ValueError: ``count`` or ``times_share`` is out of range.
    """
    if not 1 <= count <= MAX_PROBLEMS:
        raise ValueError(f"{count} {split} problems asked of the arithmetic task; it generates 1 to {MAX_PROBLEMS}")
    if isinstance(times_share, bool) or not isinstance(times_share, int | float) or not 0 <= times_share <= MAX_TIMES_SHARE:
        raise ValueError(f"data.options has times_share={times_share}; it must be a number from 0 to {MAX_TIMES_SHARE}")
    held_out = split == "held_out"
    rng = np.random.default_rng([seed, int(held_out)])
    expressions: dict[str, None] = {}  # a dict keeps the order drawn
    while len(expressions) < count:
        expression = generate(rng, times_share=times_share)
        if is_held_out(expression) == held_out:
            expressions[expression] = None
    return [_problem(f"arithmetic/{split}/{index}", expression) for index, expression in enumerate(expressions)]


def _problem(problem_id: str, expression: str) -> Problem:
    operations = _operations(expression)
    running = _run(operations)
    return Problem(
        problem_id,
        ({"role": "user", "content": expression},),
        _answer(running),
        "arithmetic",
        solution=_steps(operations, running),
    )


def _operations(expression: str) -> list[tuple[str, int]]:
    body = expression.removesuffix("=")
    signs, digits = body[::2], body[1::2]
    well_formed = expression.endswith("=") and len(signs) == len(digits) >= ANSWER_DIGITS
    if not (well_formed and set(signs) <= set("+-*") and set(digits) <= set("0123456789")):
        raise ValueError(f"{expression!r} is not a tally expression such as '+4*3+5-2*7+1='")
    return [(sign, int(digit)) for sign, digit in zip(signs, digits, strict=True)]


def _run(operations: list[tuple[str, int]]) -> list[int]:
    total, running = 0, []
    for sign, digit in operations:
        total = {"+": total + digit, "-": total - digit, "*": total * digit}[sign] % 10
        running.append(total)
    return running


def _steps(operations: list[tuple[str, int]], running: list[int]) -> str:
    return "".join(f"{sign}{digit}={total}" for (sign, digit), total in zip(operations, running, strict=True))


def _answer(running: list[int]) -> str:
    return "".join(str(total) for total in running[-ANSWER_DIGITS:])
