"""MATH: competition problems with LaTeX answers; trained on the original training split, evaluated on MATH-500.

References: Measuring Mathematical Problem Solving With the MATH Dataset, arXiv 2103.03874; MATH-500 is the subset of its test
split that Let's Verify Step by Step, arXiv 2305.20050, holds out.
"""

from pods_jax.data.gold import last_boxed
from pods_jax.data.questions import Question, text_of
from pods_jax.data.rows import Columns, Origin, Row, Split

SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
ORIGINS: dict[Split, Origin] = {
    "train": Origin("EleutherAI/hendrycks_math", "train", SUBJECTS),
    "held_out": Origin("HuggingFaceH4/MATH-500", "test"),
}


def read_question(row: Row, columns: Columns) -> Question:
    """Read a row: the gold answer is the column ``answer`` where there is one (MATH-500), else the solution's last box.

    Raises:
        UnparsableError: No problem, no solution, or no box in it.
    """
    del columns
    solution = text_of(row, "solution")
    answer = text_of(row, "answer") if row.get("answer") else last_boxed(solution)
    return Question(text_of(row, "problem"), answer, "math", solution=solution)
