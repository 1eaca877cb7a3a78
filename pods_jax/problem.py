"""One problem of a data set: the record that data, rewards and the workers of the rewards share.

It stands apart from ``types.py``, which hands it on, because worker processes read problems and must not import jax.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem of a data set, as the data layer hands it on (host only).

    Attributes:
        id: Unique and stable within the task, for example ``"arithmetic/train/17"``.
        messages: Chat messages, each ``{"role": ..., "content": ...}``.
        answer: Gold answer in the form that the task's verifier compares with.
        task: Name of the task in the ``TASKS`` table.
        answer_kind: How an answer is compared with the gold one: ``exact``, ``number``, ``math``, ``choice``, ``equation``,
            ``text`` or ``reasoning_gym``.
        choices: Texts of the options of a multiple choice, in order; option ``i`` has the letter ``"ABC...Z"[i]``.
        extra: What else the verifier of this kind needs, as JSON; empty for most kinds.
        solution: The data set's own worked solution, without the answer line; shown in worked examples alone, never scored.
        opened: What the prompt has already written of the model's turn, from its first tag on, such as ``"<think>\\n"``; the
            built-in rewards read a completion as its continuation.
    """

    id: str
    messages: tuple[dict[str, str], ...]
    answer: str
    task: str
    answer_kind: str = "exact"
    choices: tuple[str, ...] = ()
    extra: str = ""
    solution: str = ""
    opened: str = ""
