"""Whether the answer of a completion is the gold answer: the table ``KINDS`` of ways to compare them.

``extraction.py`` finds the answer, and the problem's ``answer_kind`` says how it is compared. Here text alone decides, in time
linear in its length, and nothing of a completion is ever evaluated. What needs algebra or the scorer of another package comes
back as a ``Job`` for the worker processes.
"""

import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal

from pods_jax.lookup import lookup
from pods_jax.problem import Problem
from pods_jax.rewards.chemistry import same_equation
from pods_jax.rewards.choices import read_choice, same_choice
from pods_jax.rewards.expressions import same_mathematics
from pods_jax.rewards.extraction import DEFAULT_SOURCES, boxed, extract_answer
from pods_jax.rewards.quantities import LONGEST_NUMBER, Quantity, decimal_of, read_quantity, same_quantity
from pods_jax.rewards.spelling import compact, tidy, without_lead
from pods_jax.rewards.workers import Job

Verdict = bool | Job | None
"""Right or wrong; a job whose number says how right (1 is right); or ``None`` when the gold answer cannot be read."""

_LEADING_ZERO = re.compile(r"[+-]?0[0-9,]")
_GYM = "pods_jax.rewards.gym:score_answer"


def same_answer(answer: str, gold: str) -> bool:
    """Returns whether two answers of kind ``exact`` are equal.

    Equal texts are equal answers. Otherwise both must be numbers as a whole, of exactly equal value: ``1,000`` is ``1000.0``,
    but ``7 (not 18)`` is not 18. Digits with a leading zero are a code, not a number: where ``018`` is asked, ``18`` is wrong.
    An empty answer is always wrong.
    """
    answer, gold = answer.strip(), gold.strip()
    if not answer:
        return False
    if answer == gold:
        return True
    value = _number(answer)
    return value is not None and value == _number(gold)


def same_number(answer: str, gold: str) -> bool | None:
    """Returns whether two texts say the same number (``quantities.py``); ``None`` when the gold answer says none."""
    wanted = read_quantity(gold)
    if wanted is None:
        return None
    given = read_quantity(answer)
    return given is not None and same_quantity(given, wanted)


def same_text(answer: str, gold: str) -> bool | None:
    """Returns whether two texts have equal words, whatever their case and markup; ``None`` for an empty gold answer."""
    wanted = tidy(gold).casefold()
    return without_lead(tidy(answer)).casefold() == wanted if wanted else None


KINDS: dict[str, Callable[[Problem, str], Verdict]] = {
    "exact": lambda problem, answer: same_answer(answer, problem.answer),
    "number": lambda problem, answer: same_number(_inner(answer), problem.answer),
    "math": lambda problem, answer: same_mathematics(_inner(answer), problem.answer),
    "choice": lambda problem, answer: same_choice(_inner(answer), problem.answer, problem.choices),
    "equation": lambda problem, answer: same_equation(_inner(answer), problem.answer),
    "text": lambda problem, answer: same_text(_inner(answer), problem.answer),
    "reasoning_gym": lambda problem, answer: Job(_GYM, (answer, problem.extra)),
}
"""How an answer is compared with the gold answer of a problem, by ``Problem.answer_kind``."""


def check_kind(name: str) -> None:
    """Refuses a kind of answer that the user's own rows, whose gold answers are texts, cannot have.

    Raises:
        ValueError: There is no such kind; the message gives the nearest and all valid names.
    """
    lookup({kind: same for kind, same in KINDS.items() if kind != "reasoning_gym"}, name, "data.answer_kind")


def judge(problem: Problem, completion: str, sources: Sequence[str] = DEFAULT_SOURCES) -> Verdict:
    """Returns the verdict on a completion; one without an answer is wrong.

    Raises:
        ValueError: The problem's kind of answer does not exist.
    """
    same = lookup(KINDS, problem.answer_kind, "answer_kind")
    answer = extract_answer(problem.opened + completion, sources)
    if answer is None:  # wrong, unless no answer could be judged
        return False if problem.answer_kind == "reasoning_gym" or same(problem, "") is not None else None
    return same(problem, answer)


def vote(problem: Problem, completion: str, sources: Sequence[str] = DEFAULT_SOURCES) -> str | None:
    """Returns a spelling that equal answers share, so that a vote counts them together; ``None`` without an answer."""
    answer = extract_answer(problem.opened + completion, sources)
    if answer is None or problem.answer_kind in ("exact", "reasoning_gym"):
        return answer
    answer = _inner(answer)
    if problem.answer_kind == "choice":
        return read_choice(answer, problem.choices, problem.answer) or answer
    value = read_quantity(answer) if problem.answer_kind in ("number", "math") else None
    return _spelled(value) if value else compact(tidy(answer)) or answer


def gold_fault(problem: Problem) -> str | None:
    """Returns why a problem's gold answer cannot be used, for a report at load time; ``None`` when it can."""
    gold, kind = problem.answer, problem.answer_kind
    if kind == "reasoning_gym":
        readable = {"dataset", "options", "entry"} <= json.loads(problem.extra or "{}").keys()
    else:
        readable = lookup(KINDS, kind, "answer_kind")(problem, "") is not None
    return None if readable else f"{gold!r} cannot be read as an answer of kind {kind}"


def _inner(answer: str) -> str:
    # A box within an answer is the answer. Exact answers forgive nothing.
    inner = boxed(answer)
    return answer if inner is None else inner


def _number(text: str) -> Decimal | None:
    return None if len(text) > LONGEST_NUMBER or _LEADING_ZERO.match(text) else decimal_of(text)


def _spelled(quantity: Quantity) -> str:
    return f"{quantity.value}%" if quantity.percent else str(quantity.value)
