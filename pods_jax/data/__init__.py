"""From the name of a task to the prompts of each step, on the host: rows -> questions -> tasks -> prompts -> loader."""

from pods_jax.data.loader import make_loader
from pods_jax.data.prompts import PromptReport, build_prompts, eos_ids, load_tokenizer, pad_prompts
from pods_jax.data.rows import Columns, Source, make_source
from pods_jax.data.tasks import TASKS, THINK_ANSWER_PROMPT, LoadReport, Splits, Task, find_task, load_splits

__all__ = [
    "TASKS",
    "THINK_ANSWER_PROMPT",
    "Columns",
    "LoadReport",
    "PromptReport",
    "Source",
    "Splits",
    "Task",
    "build_prompts",
    "eos_ids",
    "find_task",
    "load_splits",
    "load_tokenizer",
    "make_loader",
    "make_source",
    "pad_prompts",
]
