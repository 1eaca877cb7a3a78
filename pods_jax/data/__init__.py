"""From a task's name to the prompts of each step, on the host: tasks -> prompts -> loader."""

from pods_jax.data.loader import make_loader
from pods_jax.data.prompts import PromptReport, build_prompts, eos_ids, load_tokenizer, pad_prompts
from pods_jax.data.tasks import TASKS, THINK_ANSWER_PROMPT, Splits, Task, find_task, load_splits, load_task

__all__ = [
    "TASKS",
    "THINK_ANSWER_PROMPT",
    "PromptReport",
    "Splits",
    "Task",
    "build_prompts",
    "eos_ids",
    "find_task",
    "load_splits",
    "load_task",
    "load_tokenizer",
    "make_loader",
    "pad_prompts",
]
