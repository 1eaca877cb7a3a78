"""The user's own rows, whose columns the configuration names."""

from pods_jax.data.gold import UnparsableError, equation, number
from pods_jax.data.questions import Question, choices_of, letter_of, text_of
from pods_jax.data.rows import Columns, Row


def read_question(row: Row, columns: Columns) -> Question:
    """Reads a row: the gold answer is a text or a number; with options it is a letter, or an index from 0.

    Raises:
        UnparsableError: A column is missing, or the gold answer is not of the configured kind.
    """
    question = text_of(row, columns.question)
    solution = text_of(row, columns.solution) if columns.solution and row.get(columns.solution) else ""
    if columns.choices:
        choices = choices_of(row.get(columns.choices))
        return Question(question, letter_of(row.get(columns.answer), choices), "choice", choices=choices, solution=solution)
    return Question(question, _answer(row, columns), columns.answer_kind, solution=solution)


def _answer(row: Row, columns: Columns) -> str:
    value = row.get(columns.answer)
    if type(value) in (int, float):
        return number(value)
    text = text_of(row, columns.answer)
    if columns.answer_kind == "choice" and len(text) != 1:
        raise UnparsableError(f"{text[:60]!r} is not the letter of an option")
    return {"number": number, "equation": equation}.get(columns.answer_kind, str)(text)
