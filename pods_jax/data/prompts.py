"""From problems to prompt tokens: tokenizer, chat template, exactly one BOS, length limit, padding.

This is the stage between ``tasks.py`` and ``loader.py``. The chat template is applied here, once for the whole run; completions
are never tokenised again from text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from jaxtyping import Int32
from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from pods_jax.data.examples import worked_turns
from pods_jax.data.templates import default_template
from pods_jax.json_file import read_object
from pods_jax.problem import Problem
from pods_jax.rewards.tags import TAGS
from pods_jax.types import Prompt

TEMPLATE_DATE = "26 Jul 2024"
"""Date for chat templates that write one (Llama 3), their own default; today's would change a run that is continued later."""
SAMPLE = "What is 12 + 30?\n\nLet x = 3.5·10^2 (naïve, Größe, 数学), so <think>x\t> 7</think> and \\boxed{42}  \N{ROCKET}"
"""Words, digits, spaces, tags, LaTeX, and letters beyond ASCII."""
_TAG = re.compile("|".join(TAGS))
_LAST_TAG = re.compile(r"<(?:think|answer)>\s*\Z")


@dataclass(frozen=True)
class PromptReport:
    """How many prompts were kept, how many were dropped as over-long, and the longest kept one in tokens."""

    kept: int
    dropped: int
    longest: int


def load_tokenizer(path: str | Path, *, key: str = "model.path", model: Path | None = None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a Hugging Face folder, without running code from it.

    Args:
        path: The folder.
        key: Configuration key that named it, for the error message.
        model: Folder of a model next to whose ``config.json`` it will lie, which may decide how transformers reads its files.

    Raises:
        ValueError: The folder is missing, or holds no tokenizer that transformers can read.
    """
    if not Path(path).is_dir():
        raise ValueError(f"{key}={str(path)!r} is not a folder")
    try:
        config = {} if model is None else {"config": AutoConfig.from_pretrained(str(model), trust_remote_code=False)}
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True, **config)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{key}={str(path)!r} holds no readable tokenizer: {error}") from error


def tokenizer_difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """Returns in what two tokenizers differ, or None: the encoding of a sample, special tokens, the chat template."""
    for what, one, other in (
        ("encoding of a sample", ours(SAMPLE)["input_ids"], theirs(SAMPLE)["input_ids"]),
        ("special tokens", ours.special_tokens_map, theirs.special_tokens_map),
        ("chat template", default_template(ours), default_template(theirs)),
    ):
        if one != other:
            return what
    return None


def eos_ids(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> tuple[int, ...]:
    """Returns every token id that ends a completion, in ascending order.

    These are the tokenizer's EOS and the ``eos_token_id`` (one or several) of ``generation_config.json``, or of ``config.json``
    where the folder has no such file, as in transformers.

    Raises:
        ValueError: No EOS id is known, one is not a non-negative integer, or the file is no JSON object.
    """
    ids = {tokenizer.eos_token_id} if isinstance(tokenizer.eos_token_id, int) else set()
    for file in (Path(path) / "generation_config.json", Path(path) / "config.json"):
        if file.is_file():
            ids |= set(_id_list(read_object(file).get("eos_token_id"), file))
            break
    if not ids:
        raise ValueError(f"model.path={str(path)!r}: neither tokenizer nor generation_config.json names an EOS token")
    return tuple(sorted(ids))


def build_prompts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    over_long: Literal["drop", "error"],
    system_prompt: str | None,
    examples: Sequence[Problem] = (),
    template_options: Mapping[str, Any] | None = None,
) -> tuple[list[Prompt], PromptReport]:
    """Turns problems into prompts: chat template with the generation prompt, and exactly one BOS where the model uses one.

    Without a chat template (a base model) a prompt is the contents of the messages with a blank line between them. A model uses
    a BOS when its template writes one in front or its tokenizer puts one before every text; whichever does, or both, the prompt
    starts with one.

    Args:
        problems: Training or held-out problems.
        tokenizer: What ``load_tokenizer`` returned.
        max_length: Longest prompt in tokens, BOS included.
        over_long: Whether to drop longer prompts and count them, or refuse the first. Prompts are never truncated.
        system_prompt: Put before every problem; ``None`` or empty puts none.
        examples: Worked examples between system prompt and problem, each a user's and an assistant's turn.
        template_options: Values of the chat template's own variables.

    Returns:
        The prompts, in the problems' order, whose problems say what the prompt opened; and the count of what was kept and
        dropped.

    Raises:
        ValueError: A prompt is empty, or over-long when ``over_long`` is ``"error"``; no prompt is left; or the chat template
            refuses the system prompt or leaves parts of the examples out.
    """
    head = [{"role": "system", "content": system_prompt}] if system_prompt else []
    head += [turn for example in examples for turn in worked_turns(example)]
    kept: list[Prompt] = []
    texts = _render([head + list(p.messages) for p in problems], tokenizer, template_options or {})
    for problem, text, tokens in zip(problems, texts, _tokenise(texts, tokenizer), strict=True):
        if not tokens:
            raise ValueError(f"the prompt of problem {problem.id} has no token")
        if len(tokens) <= max_length:
            kept.append(Prompt(replace(problem, opened=opened_by(text, problem.messages[-1]["content"])), tuple(tokens)))
        elif over_long == "error":
            raise ValueError(
                f"the prompt of problem {problem.id} has {len(tokens)} tokens; the limit is data.max_prompt_length={max_length}"
            )
    if not kept:
        shown = f", {len(examples)} worked examples included" if examples else ""
        raise ValueError(f"none of {len(problems)} prompts is within data.max_prompt_length={max_length} tokens{shown}")
    longest = max(len(prompt.tokens) for prompt in kept)
    return kept, PromptReport(kept=len(kept), dropped=len(problems) - len(kept), longest=longest)


def pad_prompts(prompts: Sequence[Prompt], *, multiple: int) -> tuple[Int32[np.ndarray, "P L"], Int32[np.ndarray, "P"]]:
    """Pads prompts on the right to a common length.

    Args:
        prompts: P prompts, at least one.
        multiple: L is the longest prompt's length rounded up to a multiple of this, so that few shapes are ever compiled.

    Returns:
        The tokens, 0 beyond each prompt's end (every mask comes from the lengths), and the lengths.

    Raises:
        ValueError: There is no prompt, or ``multiple`` is below 1.
    """
    if not prompts or multiple < 1:
        raise ValueError(f"cannot pad {len(prompts)} prompts to a multiple of {multiple}; both must be at least 1")
    length_P = np.array([len(prompt.tokens) for prompt in prompts], np.int32)
    padded = -(-int(length_P.max()) // multiple) * multiple
    tokens_PL = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_PL[row, : len(prompt.tokens)] = prompt.tokens
    return tokens_PL, length_P


def opened_by(prompt: str, question: str) -> str:
    """Returns what a prompt has written of the model's turn, from its first tag on; empty where it has written no tag.

    That is what a chat template puts behind the question (``<think>`` for models that always reason), or a tag that the
    question itself ends with where no turn of the model's own follows.
    """
    place = prompt.rfind(question.strip())
    tag = _TAG.search(prompt, place + len(question.strip())) if place >= 0 else None
    tag = tag or _LAST_TAG.search(prompt)
    return prompt[tag.start() :] if tag else ""


def _tokenise(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not texts:
        return []
    tokenised: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if not isinstance(bos, int):
        return tokenised
    adds_bos = tokenizer("0")["input_ids"][0] == bos
    return [_one_bos(tokens, bos, adds_bos) for tokens in tokenised]


def _render(
    conversations: list[list[dict[str, str]]], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> list[str]:
    if not conversations:
        return []
    if tokenizer.chat_template is None:
        return ["\n\n".join(message["content"] for message in messages) for messages in conversations]
    try:
        rendered = tokenizer.apply_chat_template(
            conversations, add_generation_prompt=True, tokenize=False, **{"date_string": TEMPLATE_DATE, **options}
        )
    except TemplateError as error:
        raise ValueError(
            f"the model's chat template refuses the messages ({error}); data.system_prompt='' sends none"
        ) from error
    texts = cast(list[str], rendered)
    for message in conversations[0]:
        if message["role"] == "assistant" and message["content"].strip() not in texts[0]:
            raise ValueError(
                "the model's chat template leaves the reasoning of earlier turns out, so worked examples would teach to answer "
                "without any; set data.few_shot=0"
            )
    return texts


def _one_bos(tokens: list[int], bos: int, adds_bos: bool) -> list[int]:
    # Only the front is looked at: some models use their BOS token again to open every later turn.
    doubled = next((i for i, token in enumerate(tokens) if token != bos), len(tokens))
    return [bos] * (adds_bos or doubled > 0) + tokens[doubled:]


def _id_list(found: object, file: Path) -> list[int]:
    listed = found if isinstance(found, list) else [] if found is None else [found]
    ids = [token for token in listed if type(token) is int and token >= 0]
    if len(ids) < len(listed):
        raise ValueError(f"{file.name} has eos_token_id={found!r}; expected a non-negative integer or a list of them")
    return ids
