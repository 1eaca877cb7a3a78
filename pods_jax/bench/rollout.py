"""Tokens generated a second, against the floor of the matrix products.

Without options: the shape on which other trainers' samplers were measured, 64 rollouts of 32 prompt and 128 new tokens with a
random Qwen2 (vocabulary 512, width 256, 4 layers, 4 query and 2 key-value heads, feed-forward 1024, float32), as 4 prompts of
16 rollouts. No completion ends before its limit, unless --lengths.distribution draws lengths as real completions have them, the
same in every turn.

floor_fraction is the floor divided by the measured wall seconds. The floor is the larger of two: the FLOPs at the speed of the
same matrix products with nothing between them, and the bytes at the speed of passes over a buffer of one step's bytes. Both
are measured in turns with the rollout.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from pods_jax.bench.floors import Work, added, forward_flops, matmul_probe, memory_probe, rollout_bytes, rollout_work
from pods_jax.bench.lengths import LengthOptions
from pods_jax.bench.measure import SPREAD_COLUMNS, WHOLE, alternate, print_table, spread_cells, warm_up
from pods_jax.bench.workload import ModelOptions, ShapeOptions, policy
from pods_jax.config.fields import Checked, ConfigError, Count, CountOrZero, NonNegative, Seed
from pods_jax.devices.sharding import to_global
from pods_jax.rollout.sampling import sampling_params


@dataclass(frozen=True)
class RolloutOptions(Checked):
    """What is generated, and how often."""

    model: ModelOptions = field(default_factory=ModelOptions)
    shape: ShapeOptions = field(default_factory=ShapeOptions)
    prompts: Count = 4
    """Prompts (P)."""
    n: Count = 16
    """Rollouts of each prompt (N)."""
    prompt_length: Count = 32
    """Tokens of each prompt (L)."""
    completion_length: Count = 128
    """Most tokens generated for a rollout (C)."""
    lengths: LengthOptions = field(default_factory=LengthOptions)
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 is greedy."""
    chunk: CountOrZero = 0
    """Tokens by which the cache grows; 0 takes what suits the backend."""
    lanes: CountOrZero = 0
    """Parts of the prompts that are generated side by side; 0 takes what suits the backend and the model."""
    repeats: Count = 5
    """Measured runs after the warm-up."""
    seed: Seed = 0
    """Seed of prompts and sampling."""

    def __post_init__(self):
        super().__post_init__()
        if self.completion_length < 2:
            raise ConfigError(f"completion_length={self.completion_length} leaves nothing to decode; at least 2")


def work_of(length_PN: Int[np.ndarray, "P N"], prompt_length: int) -> Work:
    """Work of generating completions of these lengths: each prompt once, and what each rollout adds to it."""
    prompt = rollout_work(1, 1, prompt_length, 1)
    alone = [rollout_work(1, 1, prompt_length, int(length)) for length in length_PN.flat]
    return added(alone, prompt, len(alone) - len(length_PN))


def run(options: RolloutOptions) -> dict[str, Any]:
    """Measures, prints the table, and returns the result."""
    length_PN = options.lengths.draw((options.prompts, options.n), options.completion_length, options.seed)
    longest, mean = int(length_PN.max()), max(2, round(float(length_PN.mean())))
    with policy(options.model, options.shape, trained=False) as model:
        spec, dtype = model.spec, jnp.dtype(options.model.compute_dtype)
        limits = {"prompt_length": options.prompt_length, "completion_length": options.completion_length}
        engine = model.engine(n=options.n, **limits, chunk=options.chunk, lanes=options.lanes)
        lanes = engine.foretell(options.prompts, options.prompt_length).lanes
        batch = model.prompts(options.prompts, options.prompt_length, options.seed)
        sampling = sampling_params(temperature=options.temperature)
        keys = map(jax.random.key, itertools.count(options.seed))
        limit_PN = to_global(model.mesh, length_PN)
        nbytes = rollout_bytes(spec, options.prompts, options.n, options.prompt_length, mean, dtype.itemsize)
        matmuls = matmul_probe(spec, options.prompts * options.n, dtype, longest - 1)
        moves = memory_probe(nbytes // (longest - 1), longest - 1)
        runs = {
            "rollout": lambda watch: engine(model.params, batch, next(keys), sampling, limit_PN),
            "matrix products": lambda watch: matmuls.run(),
            "memory": lambda watch: moves.run(),
        }
        first = warm_up(runs)
        decoded_rows = float(runs["rollout"](None).decoded_rows)  # type: ignore[union-attr]
        spreads = {name: parts[WHOLE] for name, parts in alternate(runs, options.repeats).items()}
    rollout, product, memory = spreads.values()
    tokens, flops = int(length_PN.sum()), forward_flops(spec, work_of(length_PN, options.prompt_length))
    flop_seconds, byte_seconds = flops / matmuls.amount * product.seconds, nbytes / moves.amount * memory.seconds
    floor_seconds = max(flop_seconds, byte_seconds)
    floor_cpu_seconds = max(flops / matmuls.amount * product.cpu_seconds, nbytes / moves.amount * memory.cpu_seconds)
    result = model.describe() | {
        "prompts": options.prompts,
        "n": options.n,
        "prompt_length": options.prompt_length,
        "completion_length": options.completion_length,
        "lengths": options.lengths.distribution,
        "lanes": lanes,
        "mean_length": float(length_PN.mean()),
        "padding_fraction": 1 - (tokens - length_PN.size) / decoded_rows,
        "tokens_per_second": tokens / rollout.seconds,
        "tokens_per_cpu_second": tokens / rollout.cpu_seconds,
        "seconds": rollout.seconds,
        "seconds_min": rollout.seconds_min,
        "seconds_max": rollout.seconds_max,
        "cpu_seconds": rollout.cpu_seconds,
        "compile_seconds": first["rollout"] - rollout.seconds,
        "compiled_programs": engine.compiled_programs(),
        "flops": flops,
        "bytes": nbytes,
        "matmul_gflops_per_second": matmuls.amount / product.seconds / 1e9,
        "matmul_gflops_per_cpu_second": matmuls.amount / product.cpu_seconds / 1e9,
        "memory_gbytes_per_second": moves.amount / memory.seconds / 1e9,
        "floor_seconds": floor_seconds,
        "floor_cpu_seconds": floor_cpu_seconds,
        "floor_fraction": floor_seconds / rollout.seconds,
        "floor_cpu_fraction": floor_cpu_seconds / rollout.cpu_seconds,
    }
    print_table(
        f"rollout of {options.prompts} x {options.n} x ({options.prompt_length} + {options.completion_length}) tokens, "
        f"{lanes} side by side, {options.repeats} runs",
        ("", *SPREAD_COLUMNS, "tokens/s", "tokens/CPU-s"),
        [
            [
                "rollout",
                *spread_cells(rollout),
                f"{result['tokens_per_second']:,.0f}",
                f"{result['tokens_per_cpu_second']:,.0f}",
            ],
            [f"matrix products ({matmuls.amount / 1e9:.1f} GFLOP)", *spread_cells(product), "", ""],
            [f"memory ({moves.amount / 1e9:.1f} GB)", *spread_cells(memory), "", ""],
        ],
    )
    print(
        f"{tokens:,} tokens, mean length {result['mean_length']:.1f}; {result['padding_fraction']:.1%} of the decoded rows "
        "were padding. "
        f"compile {result['compile_seconds']:.1f} s ({result['compiled_programs']} programs). "
        f"Floor: {flops / 1e9:.1f} GFLOP at {result['matmul_gflops_per_second']:.0f} GFLOP/s = {flop_seconds:.3f} s; "
        f"{nbytes / 1e9:.2f} GB at {result['memory_gbytes_per_second']:.0f} GB/s = {byte_seconds:.3f} s; "
        f"reached {result['floor_fraction']:.0%} of it in wall, {result['floor_cpu_fraction']:.0%} in CPU seconds."
    )
    return result
