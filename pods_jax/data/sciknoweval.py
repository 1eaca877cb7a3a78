"""SciKnowEval, Chemistry, level 3: multiple choice on molecules and reactions, and balancing of equations.

The data set is published as one collection for tests; here one question in eight is held out, and the rest is for training.

Reference: SciKnowEval: Evaluating Multi-level Scientific Knowledge of Large Language Models, arXiv 2406.09098.
"""

from pods_jax.data.gold import equation
from pods_jax.data.questions import Question, choices_of, letter_of, text_of
from pods_jax.data.rows import Columns, Origin, Row, Split

_HUB = Origin("hicai-zju/SciKnowEval", "test")
ORIGINS: dict[Split, Origin] = {"train": _HUB, "held_out": _HUB}
BALANCING = "balancing_chemical_equation"


def read_question(row: Row, columns: Columns) -> Question | None:
    """Reads a four-choice question or an equation of chemistry at level 3; any other row is not of this task.

    Raises:
        UnparsableError: There is no question, the key names no option, or the gold equation is none.
    """
    del columns
    details = row.get("details") or {}
    if (row.get("domain"), details.get("level")) != ("Chemistry", "L3"):
        return None
    if row.get("type") == "mcq-4-choices":
        choices = choices_of(row.get("choices"))
        return Question(text_of(row, "question"), letter_of(row.get("answerKey"), choices), "choice", choices=choices)
    if details.get("subtask") == BALANCING:
        return Question(
            text_of(row, "question"),
            equation(text_of(row, "answer")),
            "equation",
            instruction="Keep the order of reactants and products, and answer with the whole balanced equation.",
        )
    return None
