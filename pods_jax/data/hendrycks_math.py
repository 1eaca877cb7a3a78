"""MATH: competition problems with LaTeX answers; the original training split, and MATH-500 held out.

References: Measuring Mathematical Problem Solving With the MATH Dataset, arXiv 2103.03874; Let's Verify Step by Step, arXiv
2305.20050, which holds the 500 out of its test split.
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
    """Reads a row: the gold answer is the column ``answer`` where there is one (MATH-500), or the last box of the solution.

    Raises:
        UnparsableError: There is no problem, no solution, or no box in it.
    """
    del columns
    solution = text_of(row, "solution")
    answer = text_of(row, "answer") if row.get("answer") else last_boxed(solution)
    return Question(text_of(row, "problem"), answer, "math", solution=solution)
