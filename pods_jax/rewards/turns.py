r"""What of a completion is the model's own turn, and what of that is not reasoning.

A model that is not stopped in time goes on with the user's next question and answers that one too. What stands behind the mark
of a new turn is no part of its answer. Everything here is linear in the length of the text.
"""

# ruff: noqa: RUF001 - marks of turns are meant as they stand

import re

from pods_jax.rewards.tags import TAGS

_OPENING, _CLOSING = TAGS[:2]
_TOKEN = re.compile(
    r"<\|(?:im_start|im_end|im_sep|eot_id|eom_id|start_header_id|end_of_turn|endoftext|end_of_text|begin_of_text|start_of_role|"
    r"end_of_role|user|assistant|system|endofprompt|eos|bos)\|>|<(?:start|end)_of_turn>|</?s>|\[/?INST\]"
    r"|<｜(?:User|Assistant|begin▁of▁sentence|end▁of▁sentence)｜>"
)
_SPEAKER = re.compile(
    r"^[ \t]*(?:#+[ \t]*(?:User|Human|Instruction|Assistant)\b|(?:\*\*)?(?:User|USER|Human|HUMAN|Assistant)"
    r"(?:\*\*)?:)",
    re.MULTILINE,
)
_QUESTION = re.compile(
    r"^[ \t]*(?:#+[ \t]*|\*\*)?(?:(?:New |Next )?(?:Question|Problem|Exercise)(?: [0-9]+)?|Q[0-9]*)(?:\*\*)?:", re.MULTILINE
)
_ANSWERED = re.compile(r"\\(?:boxed|fbox)|</answer>|####|\banswer(?: is\b|:)", re.IGNORECASE)


def own_turn(text: str) -> str:
    """Returns the text up to where another turn begins.

    That is a token of chat templates (``<|im_start|>``, ``[INST]``), or behind the reasoning a line that begins with "User:",
    "Human:", "Assistant:" or the like, or with "Question:" or the like once an answer has been given. What the text itself
    begins with opens its own turn.
    """
    start = len(text) - len(text.lstrip())
    found = _TOKEN.search(text, start + 1)
    text = text[: found.start()] if found else text
    place = max(text.find(_CLOSING), start)
    if found := _SPEAKER.search(text, place + 1):
        text = text[: found.start()]
    answered = _ANSWERED.search(text, place)
    found = _QUESTION.search(text, answered.end()) if answered else None
    return text[: found.start()] if found else text


def split_reasoning(text: str) -> tuple[str, str]:
    """Returns what stands outside the reasoning, and what an unfinished reasoning has at the end of the text.

    Reasoning goes from ``<think>`` to the next ``</think>``. Up to a first ``</think>`` without an opening, which a prompt may
    have written, all is reasoning. A ``<think>`` that is never closed opens an unfinished one.
    """
    outside: list[str] = []
    closed, place = text.find(_CLOSING), 0
    if closed >= 0 and text.find(_OPENING, 0, closed) < 0:
        place = closed + len(_CLOSING)
    while (opened := text.find(_OPENING, place)) >= 0:
        outside.append(text[place:opened])
        closed = text.find(_CLOSING, opened)
        if closed < 0:
            return "\n".join(outside), text[opened:]
        place = closed + len(_CLOSING)
    return "\n".join([*outside, text[place:]]), ""
