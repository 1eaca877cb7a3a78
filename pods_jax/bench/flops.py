"""FLOPs and cache bytes of a step's programs, counted by XLA: groups that share their prompt against copied prompts.

Nothing runs and nothing is allocated: each program is lowered for shapes, with its layers written out (XLA counts the body of a
loop once), and XLA's own cost analysis counts it. The copied form is the same program for P * n (or P * m) groups of one.
Decoding is counted for one token at the full cache. "formula" is the count of ``floors.py`` with the hidden pairs of attention
in it, as these programs multiply them, and the output head once more in the update, whose backward pass computes logits anew.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from pods_jax.algorithm.losses import LOSSES
from pods_jax.assembly.policy import Architecture, make_architecture
from pods_jax.bench.floors import Work, forward_flops, update_work
from pods_jax.bench.measure import print_table
from pods_jax.bench.workload import ShapeOptions
from pods_jax.config.fields import Checked, ConfigError, Count
from pods_jax.config.sections import ModelConfig, OptimizerConfig
from pods_jax.devices.sharding import make_mesh
from pods_jax.models.spec import DecoderSpec
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.programs import Call
from pods_jax.rollout.sampling import sampling_params
from pods_jax.types import KeptBatch, PromptBatch
from pods_jax.update.learner import Learner, UpdateSettings, abstract_state
from pods_jax.update.microbatches import Deal
from pods_jax.update.optim import make_optimizer


@dataclass(frozen=True)
class FlopsOptions(Checked):
    """The shape that is counted."""

    shape: ShapeOptions = field(default_factory=ShapeOptions)
    prompts: Count = 4
    """Prompts (P)."""
    n: Count = 16
    """Rollouts of each prompt (N)."""
    m: Count = 4
    """Kept rollouts of each prompt (M)."""
    prompt_length: Count = 256
    """Tokens of each prompt (L)."""
    completion_length: Count = 128
    """Tokens of each completion (C)."""

    def __post_init__(self):
        super().__post_init__()
        if self.m > self.n:
            raise ConfigError(f"m={self.m} cannot exceed n={self.n}")


@dataclass(frozen=True)
class Lengths:
    """Groups, rollouts of each, and tokens of prompts and completions."""

    groups: int
    rollouts: int
    prompt: int
    completion: int

    def copied(self) -> "Lengths":
        """The same rollouts, each with a prompt of its own."""
        return Lengths(self.groups * self.rollouts, 1, self.prompt, self.completion)


@dataclass(frozen=True)
class RolloutCount:
    """What XLA counts of a rollout; ``cache_bytes`` are those of the prompts and of full completions, in float32."""

    prefill_flops: float
    decode_flops: float
    cache_bytes: int


def run(options: FlopsOptions) -> dict[str, Any]:
    """Counts, prints the table, and returns the result."""
    spec = options.shape.spec()
    generated = Lengths(options.prompts, options.n, options.prompt_length, options.completion_length)
    kept = Lengths(options.prompts, options.m, options.prompt_length, options.completion_length)
    group, copied = rollout_count(spec, generated), rollout_count(spec, generated.copied())
    result = {
        "prefill_flops": _compared(group.prefill_flops, copied.prefill_flops),
        "prefill_formula": _compared(*(prefill_formula(spec, each) for each in (generated, generated.copied()))),
        "decode_flops_a_token": _compared(group.decode_flops, copied.decode_flops),
        "cache_bytes": _compared(group.cache_bytes, copied.cache_bytes),
        "update_flops": _compared(update_count(spec, kept), update_count(spec, kept.copied())),
        "update_formula": _compared(*(update_formula(spec, each) for each in (kept, kept.copied()))),
    }
    tokens = f"{options.prompt_length} + {options.completion_length} tokens"
    print_table(
        f"{options.prompts} prompts, {options.n} → {options.m} rollouts, {tokens}; FLOPs and bytes in millions",
        ("", "groups", "copied prompts", "groups / copied"),
        [
            [name.replace("_", " "), *(_shown(each[form]) for form in ("group", "copied")), f"{each['ratio']:.3f}"]
            for name, each in result.items()
        ],
    )
    sizes = {name: getattr(options, name) for name in ("prompts", "n", "m", "prompt_length", "completion_length")}
    return {"jax": jax.__version__, **sizes, **result}


def _compared(group: float, copied: float) -> dict[str, float]:
    return {"group": group, "copied": copied, "ratio": group / copied}


def _shown(number: float) -> str:
    return f"{number / 1e6:,.2f}"


# --- the formulas -------------------------------------------------------------------------------------------------------------


def prefill_formula(spec: DecoderSpec, lengths: Lengths) -> int:
    """FLOPs of the prompts' forward, and of one row of logits for each."""
    tokens = lengths.groups * lengths.prompt
    return forward_flops(spec, Work(tokens, tokens * lengths.prompt, lengths.groups))


def update_formula(spec: DecoderSpec, lengths: Lengths) -> int:
    """FLOPs of three forwards, and of the logits that the backward pass computes anew."""
    work = update_work(lengths.groups, lengths.rollouts, lengths.prompt, lengths.completion, causal=False)
    return 3 * forward_flops(spec, work) + forward_flops(spec, Work(0, 0, work.logits))


# --- what XLA counts ----------------------------------------------------------------------------------------------------------


def rollout_count(spec: DecoderSpec, lengths: Lengths) -> RolloutCount:
    """What XLA counts of the engine's programs."""
    mesh, architecture = _architecture(spec)
    counted: list[tuple[Call, float]] = []

    def count(call: Call) -> Any:
        lowered = call.lower()
        counted.append((call, _flops(lowered)))
        return lowered.out_info

    with jax.set_mesh(mesh):
        engine = RolloutEngine(
            architecture.graph,
            rollouts=lengths.rollouts,
            max_completion_length=lengths.completion,
            chunk=lengths.completion,
            eos_ids=[spec.vocab_size],
            rungs=0,
        )
        engine.visit_programs(count, architecture.shapes, _prompts(lengths), sampling_params(temperature=1.0))
    (_, prefill), (decode, token) = counted
    caches = jax.tree.leaves(decode.caches)
    return RolloutCount(prefill, token, sum(leaf.size * leaf.dtype.itemsize for leaf in caches))


def update_count(spec: DecoderSpec, lengths: Lengths) -> float:
    """FLOPs that XLA counts of the learner's update, its micro-batch and its chunk of logits the whole batch."""
    mesh, architecture = _architecture(spec)
    optimizer = make_optimizer(OptimizerConfig())
    logits = lengths.groups * lengths.rollouts * lengths.completion * spec.vocab_size
    with jax.set_mesh(mesh):
        settings = UpdateSettings(LOSSES["grpo"], logit_chunk=logits)
        learner = Learner(architecture.graph, optimizer, optax.constant_schedule(1.0), settings)
        state, rate = abstract_state(architecture.shapes, optimizer=optimizer), _shape(dtype=jnp.float32)
        groups = (1, 1, lengths.groups)
        deal = Deal(_shape(*groups), _shape(*groups, lengths.rollouts), _shape(), places=0)
        return _flops(learner.update.lower(state, _kept(lengths), None, None, rate, deal))


def _architecture(spec: DecoderSpec) -> tuple[Mesh, Architecture]:
    mesh = make_mesh((1, 1, 1), jax.devices("cpu")[:1])
    return mesh, make_architecture(ModelConfig(), spec, mesh, layers="unroll")


def _prompts(lengths: Lengths) -> PromptBatch:
    return PromptBatch(_shape(lengths.groups, lengths.prompt), _shape(lengths.groups))


def _kept(lengths: Lengths) -> KeptBatch:
    per_rollout: Callable[..., Any] = partial(_shape, lengths.groups, lengths.rollouts)
    prompts = _prompts(lengths)
    return KeptBatch(
        prompt_PL=prompts.tokens_PL,
        prompt_length_P=prompts.length_P,
        tokens_PMC=per_rollout(lengths.completion),
        length_PM=per_rollout(),
        logp_old_PMC=per_rollout(lengths.completion, dtype=jnp.float32),
        advantage_PM=per_rollout(dtype=jnp.float32),
        weight_PM=per_rollout(dtype=jnp.float32),
        index_PM=per_rollout(),
    )


def _shape(*sizes: int, dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _flops(lowered: jax.stages.Lowered) -> float:
    costs = lowered.cost_analysis()
    if costs is None:
        raise RuntimeError("this backend of XLA does not count FLOPs")
    return costs["flops"]
