"""Worked examples: training problems shown in front of every prompt, solved in the form that is asked for."""

from collections.abc import Sequence
from itertools import pairwise

from pods_jax.problem import Problem
from pods_jax.rewards.choices import LETTERS

SEARCHED = 16
"""How many problems of each stretch are compared; the shortest becomes an example."""


def take_examples(problems: Sequence[Problem], count: int) -> tuple[list[Problem], list[Problem]]:
    """Returns ``count`` examples taken out of the training problems, and the problems that remain to be trained on.

    Each is the shortest of the first few problems of one of ``count`` equal stretches. Sources list their problems by subject,
    so that stretches show more subjects than the first problems would, and short examples leave more of
    ``data.max_prompt_length`` to the prompt. No seed plays a part: training and evaluation show the same examples.

    Raises:
        ValueError: No problem would remain.
    """
    if count and count >= len(problems):
        raise ValueError(f"data.few_shot={count} worked examples leave none of the {len(problems)} training problems")
    bounds = [index * len(problems) // max(count, 1) for index in range(count + 1)]
    chosen = {
        min(range(start, min(start + SEARCHED, end)), key=lambda index: _length(problems[index]))
        for start, end in pairwise(bounds)
    }
    return [problems[index] for index in sorted(chosen)], [p for index, p in enumerate(problems) if index not in chosen]


def worked_turns(problem: Problem) -> list[dict[str, str]]:
    """Returns the messages of a problem and the assistant's turn, with the right answer in think/answer form.

    Raises:
        ValueError: The problem has a scorer and no gold answer.
    """
    if not problem.answer:
        raise ValueError(f"problem {problem.id} has no gold answer to show in a worked example; set data.few_shot=0")
    content = f"<think>{_reasoning(problem)}</think>\n<answer>{problem.answer}</answer>"
    return [*problem.messages, {"role": "assistant", "content": content}]


def _length(problem: Problem) -> int:
    return sum(len(turn["content"]) for turn in worked_turns(problem))


def _reasoning(problem: Problem) -> str:
    if problem.solution:
        return problem.solution
    if problem.choices:
        return f"Of the options, {problem.answer} fits: {problem.choices[LETTERS.index(problem.answer)]}."
    return f"Working it out gives {problem.answer}."
