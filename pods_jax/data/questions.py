"""From rows to problems: the file of each task reads one row, and this one reads them all and reports what cannot be read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pods_jax.data.gold import UnparsableError
from pods_jax.data.rows import Columns, Origin, Row, Source, Split, read_rows
from pods_jax.data.splitting import is_held_out
from pods_jax.problem import Problem
from pods_jax.rewards.choices import LETTERS


@dataclass(frozen=True)
class Question:
    """What one row asks.

    Attributes:
        text: The question itself.
        answer: Gold answer, in the form that verifiers of ``kind`` compare with.
        kind: Kind of answer, as in ``Problem.answer_kind``.
        choices: Texts of the options; ``answer`` is then the letter of the right one.
        solution: Worked solution without the answer line, where the row has one.
        instruction: What is said about the form of the answer, after the question.
    """

    text: str
    answer: str
    kind: str
    choices: tuple[str, ...] = ()
    solution: str = ""
    instruction: str = ""


@dataclass(frozen=True)
class Loaded:
    """The problems of one split, and what is wrong with the rows that became none."""

    problems: list[Problem]
    unparsable: list[str] = field(default_factory=list)


ReadQuestion = Callable[[Row, Columns], Question | None]
"""Reads one row; ``None`` for a row of another task, and ``UnparsableError`` for one that cannot be read."""


def load_questions(split: Split, *, task: str, source: Source, origins: Mapping[Split, Origin], read: ReadQuestion) -> Loaded:
    """Reads all problems of one split, in the order of the rows, which their ids count: ``gsm8k/train/17``.

    Where both splits read the same rows, ``is_held_out`` divides them by the text of the question.

    Raises:
        ValueError: As in ``read_rows``.
    """
    rows, divided = read_rows(split, source=source, origins=origins)
    loaded = Loaded([])
    for index, row in enumerate(rows):
        problem_id = f"{task}/{split}/{index}"
        try:
            question = read(row, source.columns)
        except UnparsableError as error:
            loaded.unparsable.append(f"{problem_id}: {error}")
            continue
        if question is not None and (not divided or is_held_out(question.text) == (split == "held_out")):
            loaded.problems.append(_problem(problem_id, task, question))
    return loaded


def text_of(row: Row, column: str) -> str:
    """Returns the text in a column, stripped.

    Raises:
        UnparsableError: The row has no such column, or no text in it.
    """
    if column not in row:
        raise UnparsableError(f"no column {column!r}; there are: {', '.join(map(str, row))}")
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise UnparsableError(f"column {column!r} holds {str(value)[:60]!r}, not text")
    return value.strip()


def choices_of(value: object) -> tuple[str, ...]:
    """Returns the texts of the options: of a list of texts, or of lists named ``text`` and ``label`` (ARC, SciKnowEval).

    Raises:
        UnparsableError: There are fewer than two options or more than letters, one is no text, or labels are not A, B, C, ...
    """
    texts, labels = (value.get("text"), value.get("label")) if isinstance(value, dict) else (value, None)
    if not isinstance(texts, list | tuple) or not 2 <= len(texts) <= len(LETTERS):
        raise UnparsableError(f"{str(value)[:60]!r} is no list of 2 to {len(LETTERS)} options")
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise UnparsableError(f"not every option is a text: {str(texts)[:60]}")
    if labels is not None and list(labels) != list(LETTERS[: len(texts)]):
        raise UnparsableError(f"options are labelled {labels}, not {list(LETTERS[: len(texts)])}")
    return tuple(text.strip() for text in texts)


def letter_of(value: object, choices: Sequence[str]) -> str:
    """Returns the letter of the right option, given as a letter or as an index from 0.

    Raises:
        UnparsableError: The value names none of the options.
    """
    letters = LETTERS[: len(choices)]
    if type(value) is int and 0 <= value < len(choices):
        return letters[value]
    if isinstance(value, str) and len(value.strip()) == 1 and value.strip() in letters:
        return value.strip()
    raise UnparsableError(f"{str(value)[:60]!r} names none of the options {letters[0]} to {letters[-1]}")


def _problem(problem_id: str, task: str, question: Question) -> Problem:
    parts = [question.text]
    if question.choices:
        parts.append("\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, question.choices, strict=False)))
        parts.append("Answer with the letter of the right option.")
    parts += [question.instruction] if question.instruction else []
    return Problem(
        id=problem_id,
        messages=({"role": "user", "content": "\n\n".join(parts)},),
        answer=question.answer,
        task=task,
        answer_kind=question.kind,
        choices=question.choices,
        solution=question.solution,
    )
