"""What a run will hold in memory and compile, said before it starts."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pods_jax.assembly.policy import Architecture
from pods_jax.config.entries import Config
from pods_jax.models.lora import split_adapters
from pods_jax.rollout.engine import Engine
from pods_jax.update.learner import Learner


def program_lines(engine: Engine, learner: Learner, *, config: Config, prompt_lengths: int) -> list[str]:
    """Lines that say which programs a run may compile, each once and when it is first needed."""
    prompts = config.data.prompts_per_step
    foretold = engine.foretell(prompts, config.data.max_prompt_length)
    updates = learner.most_programs(prompts, config.kept) * len(foretold.completion_lengths)
    return [
        f"compiled at most, for each of {prompt_lengths} prompt length{'s' if prompt_lengths > 1 else ''}: "
        f"{foretold.programs} programs of the rollout ({foretold.sizes}), {updates} of the update",
    ]


def memory_lines(config: Config, architecture: Architecture, mesh: Mesh, engine: Engine) -> list[str]:
    """Lines that say what the run holds on each device, in MiB; activations come on top."""
    spec = architecture.spec
    trained, frozen = split_adapters(architecture.shapes)
    # The reference policy of new adapters is the frozen base; otherwise the KL term keeps a copy of what is trained.
    copies = 5 if config.loss.beta > 0 and (not frozen or architecture.continues_adapters) else 4
    foretold = engine.foretell(config.data.prompts_per_step, config.data.max_prompt_length)
    kv_heads = max(1, spec.kv_heads // mesh.shape["tensor"])
    token_bytes = 2 * spec.layers * kv_heads * spec.head_size * jnp.dtype(config.model.compute_dtype).itemsize
    held = {
        "parameters, gradient and two moments" + ", reference" * (copies == 5): copies * _bytes_each(trained),
        "frozen base": _bytes_each(frozen),
        "caches of the rollout": foretold.cache_tokens * token_bytes,
        "logits of a chunk at most": 4 * config.tuning.logit_chunk,
    }
    axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    adapters = f", of which {_count(trained):,} in adapters are trained" if frozen else ""
    exported = config.model.param_dtype
    wider = "" if frozen or exported == "float32" else f", trained in float32 (model.param_dtype={exported} is for the export)"
    return [
        f"model: {_count(architecture.shapes):,} parameters{adapters}{wider}; {spec.layers} layers, "
        f"vocabulary {spec.vocab_size:,}; mesh {axes}",
        "memory of each device: " + "; ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in held.items() if size),
    ]


def _bytes_each(shapes: Any) -> int:
    return sum(math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in jax.tree.leaves(shapes))


def _count(shapes: Any) -> int:
    return sum(math.prod(s.shape) for s in jax.tree.leaves(shapes))
