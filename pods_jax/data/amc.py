"""AMC 2023: forty competition problems with whole-number answers, for evaluation alone."""

from pods_jax.data.gold import number
from pods_jax.data.questions import Question, text_of
from pods_jax.data.rows import Columns, Origin, Row, Split

ORIGINS: dict[Split, Origin] = {"held_out": Origin("math-ai/amc23", "test")}


def read_question(row: Row, columns: Columns) -> Question:
    """Reads a row, whose answer is a float (27.0) or the text of one.

    Raises:
        UnparsableError: There is no question, or the answer is no number.
    """
    del columns
    return Question(text_of(row, "question"), number(row.get("answer")), "number")
