"""GSM8K: grade-school word problems with whole-number answers.

Reference: Training Verifiers to Solve Math Word Problems, arXiv 2110.14168.
"""

import re

from pods_jax.data.gold import UnparsableError, number
from pods_jax.data.questions import Question, text_of
from pods_jax.data.rows import Columns, Origin, Row, Split

ORIGINS: dict[Split, Origin] = {
    "train": Origin("openai/gsm8k", "train", ("main",)),
    "held_out": Origin("openai/gsm8k", "test", ("main",)),
}
_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


def read_question(row: Row, columns: Columns) -> Question:
    """Reads a row: in front of the last ``####`` stands the solution, with calculator marks, and behind it the gold answer.

    Raises:
        UnparsableError: There is no question, no ``####``, or no number behind it.
    """
    del columns
    solution, mark, answer = text_of(row, "answer").rpartition("####")
    if not mark:
        raise UnparsableError("no #### in the answer")
    return Question(text_of(row, "question"), number(answer), "number", solution=_CALCULATOR_MARK.sub("", solution).strip())
