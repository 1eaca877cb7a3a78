"""What a run will hold in memory and compile, said before it starts."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pods_jax.assembly.policy import Architecture
from pods_jax.config.entries import Config
from pods_jax.devices.sharding import group_shards
from pods_jax.models.lora import part
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.update.learner import Learner


def compiled_at_most(engine: RolloutEngine, learner: Learner, *, prompts: int, kept: int, prompt_lengths: int) -> list[str]:
    """Lines that say which programs a run may compile, each once and when it is first needed."""
    lanes = engine.lanes_of(prompts)
    piece, rows = "lane" if lanes > 1 else "shard", prompts // (group_shards() * lanes) * engine.rollouts
    shapes = ", ".join(f"{size:,}" for size in [rows, *engine.row_sizes(rows)])
    caches = ", ".join(f"{size:,}" for size in engine.capacities)
    updates = learner.most_programs(prompts, kept) * len(engine.capacities)
    return [
        f"compiled at most, for each of {prompt_lengths} prompt length{'s' if prompt_lengths > 1 else ''}: "
        f"{engine.most_programs(prompts)} programs of the rollout (rows of a {piece} {shapes}; caches of {caches} tokens), "
        f"{updates} of the update",
    ]


def memory_plan(config: Config, architecture: Architecture, mesh: Mesh, engine: RolloutEngine) -> list[str]:
    """Lines that say what the run holds on each device, in MiB; activations come on top."""
    spec = architecture.spec
    trained, frozen = part(architecture.shapes)
    # Beside adapters the frozen base is the reference policy; without, the KL term keeps a copy of the parameters.
    copies = 5 if config.loss.beta > 0 and not frozen else 4
    held = {
        "parameters, gradient and two moments" + ", reference" * (copies == 5): copies * _bytes_each(trained),
        "frozen base": _bytes_each(frozen),
        "caches of the rollout": _cache_bytes(config, architecture, mesh, engine),
        "logits of a chunk at most": 4 * config.update.logit_chunk,
    }
    axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    adapters = f", of which {_count(trained):,} in adapters are trained" if frozen else ""
    return [
        f"model: {_count(architecture.shapes):,} parameters{adapters}; {spec.layers} layers, vocabulary {spec.vocab_size:,}; "
        f"mesh {axes}",
        "memory of each device: " + "; ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in held.items() if size),
    ]


def _cache_bytes(config: Config, architecture: Architecture, mesh: Mesh, engine: RolloutEngine) -> int:
    """Most bytes of keys and values on one device: what grows, or moves into a smaller batch, is there twice meanwhile."""
    spec, prompt = architecture.spec, config.data.max_prompt_length
    prompts = config.data.prompts_per_step // (mesh.shape["data"] * mesh.shape["fsdp"])
    rows, full = prompts * engine.rollouts, engine.capacities[-1]
    before = [0, *engine.capacities][-2]
    most = prompts * prompt + rows * (before + full)
    lanes = engine.lanes_of(prompts)
    for size in (lanes * size for size in engine.row_sizes(rows // lanes)[:1]):
        tiles = size // engine.width
        most = max(most, prompts * prompt + rows * full + tiles * prompt + size * full)
    kv_heads = max(1, spec.kv_heads // mesh.shape["tensor"])
    return most * 2 * spec.layers * kv_heads * spec.head_size * jnp.dtype(config.model.compute_dtype).itemsize


def _bytes_each(shapes: Any) -> int:
    return sum(math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in jax.tree.leaves(shapes))


def _count(shapes: Any) -> int:
    return sum(math.prod(s.shape) for s in jax.tree.leaves(shapes))
