"""Worked examples: training problems shown in front of every prompt, solved in the form that is asked for."""

from collections.abc import Sequence
from itertools import pairwise

from pods_jax.problem import Problem
from pods_jax.rewards.choices import LETTERS

SEARCHED = 16
"""Problems of each stretch among which the shortest becomes an example."""


def take_examples(problems: Sequence[Problem], count: int) -> tuple[list[Problem], list[Problem]]:
    """Take examples out of training problems: of each of ``count`` equal stretches, the shortest of its first few problems.

    Sources list their problems by subject, so stretches show more of them than the first few problems would; short ones leave
    more of ``data.max_prompt_length`` to the prompt. Neither a seed nor the number of problems that are trained on plays a
    part: training and evaluation show the same examples.

    Returns:
        The examples, and the problems that remain to be trained on.

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
    """Return a problem's messages and the assistant's, whose answer is right and in think/answer form.

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
