"""The prompts of a step on the devices, as an engine takes them."""

from collections.abc import Sequence

from jax.sharding import Mesh

from pods_jax.data.prompts import pad_prompts
from pods_jax.devices.sharding import to_global
from pods_jax.types import Prompt, PromptBatch


def place_prompts(mesh: Mesh, prompts: Sequence[Prompt], *, multiple: int) -> PromptBatch:
    """Pads prompts on the right to a multiple of so many tokens, and spreads them over the shards of the groups."""
    return to_global(mesh, PromptBatch(*pad_prompts(prompts, multiple=multiple)))  # type: ignore[arg-type]
