"""One optimiser step over m kept rollouts of each group: kept tokens a second, CPU seconds, memory, and the floor.

The floor is three forwards (one forward, and a backward of twice its cost) over prompt_length + m * completion_length tokens of
each group, at the speed of the same matrix products with nothing between them. "concatenated" is what a batch with copied
prompts would have to multiply: m * (prompt_length + completion_length) tokens. With --lengths.distribution completions are as
long as drawn, the floor is of their tokens, and the same update with all its padding is measured in turns.
"""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from pods_jax.bench.floors import Work, added, forward_flops, matmul_probe, update_work
from pods_jax.bench.lengths import LengthOptions
from pods_jax.bench.measure import SPREAD_COLUMNS, WHOLE, alternate, print_table, spread_cells, warm_up
from pods_jax.bench.training import UpdateCut, make_learner
from pods_jax.bench.workload import ModelOptions, Policy, ShapeOptions, policy
from pods_jax.config.entries import micro_batch_sizes
from pods_jax.config.fields import Checked, ConfigError, Count, Seed
from pods_jax.devices.sharding import to_global
from pods_jax.types import KeptBatch
from pods_jax.update.microbatches import place


@dataclass(frozen=True)
class UpdateOptions(Checked):
    """What is trained, and how often."""

    model: ModelOptions = field(default_factory=ModelOptions)
    shape: ShapeOptions = field(default_factory=ShapeOptions)
    update: UpdateCut = field(default_factory=UpdateCut)
    prompts: Count = 4
    """Prompts (P)."""
    m: Count = 4
    """Kept rollouts of each prompt (M)."""
    prompt_length: Count = 32
    """Tokens of each prompt (L)."""
    completion_length: Count = 128
    """Most tokens of a completion (C)."""
    lengths: LengthOptions = field(default_factory=LengthOptions)
    repeats: Count = 5
    """Measured updates after the warm-up."""
    seed: Seed = 0
    """Seed of prompts and completions."""

    def __post_init__(self):
        super().__post_init__()
        check_cut(self.update, self.prompts, self.m)


def check_cut(cut: UpdateCut, prompts: int, kept: int) -> None:
    """Refuses a micro-batch that cannot cut the batch, before anything is compiled.

    Raises:
        ConfigError: naming the sizes that can.
    """
    sizes = micro_batch_sizes(prompts, kept, 1)
    if cut.micro_batch and cut.micro_batch not in sizes:
        raise ConfigError(
            f"update.micro_batch={cut.micro_batch} cannot cut {prompts} groups of {kept} kept rollouts: "
            f"possible are {', '.join(map(str, sizes))}"
        )


def run(options: UpdateOptions) -> dict[str, Any]:
    """Measures, prints the table, and returns the result."""
    shape = (options.prompts, options.m, options.prompt_length, options.completion_length)
    prompts, m, length, steps = shape
    length_PM = options.lengths.draw((prompts, m), steps, options.seed)
    varied = bool((length_PM < steps).any())
    with policy(options.model, options.shape, remat=options.update.remat) as model:
        work = work_of(length_PM, length)
        learner, new_state = make_learner(model, options.update)
        kept = random_kept(model, options, length_PM)
        padding = make_learner(model, replace(options.update, rungs=0))[0]
        deal, dealt = learner.deal(kept)
        assert deal is not None
        state, plain = new_state(), new_state()
        start = time.perf_counter()
        update = learner.update.lower(state, kept, None, None, jnp.float32(1), place(deal)).compile()
        compile_seconds = time.perf_counter() - start
        matmuls = matmul_probe(model.spec, work.tokens, jnp.dtype(options.model.compute_dtype), 3)

        def one_update(_):
            nonlocal state
            state, _ = learner(state, kept, step=1)
            return state

        def with_padding(_):
            nonlocal plain
            plain, _ = padding(plain, kept, step=1)
            return plain

        runs = {"update": one_update, "matrix products": lambda watch: matmuls.run()}
        runs |= {"with all padding": with_padding} if varied else {}
        warm_up(runs)
        spreads = {name: parts[WHOLE] for name, parts in alternate(runs, options.repeats).items()}
        taken = int(jax.device_get(state.updates))
    trained_in, product = spreads["update"], spreads["matrix products"]
    flops = 3 * forward_flops(model.spec, work)
    concatenated = 3 * forward_flops(model.spec, update_work(prompts * m, 1, length, steps))
    trained = int(length_PM.sum())
    result = model.describe() | {
        "prompts": prompts,
        "m": m,
        "prompt_length": length,
        "completion_length": steps,
        "lengths": options.lengths.distribution,
        "mean_length": trained / length_PM.size,
        "padding_fraction": dealt["update/padding_fraction"],
        "padded_cpu_seconds": spreads["with all padding"].cpu_seconds if varied else None,
        "tokens_per_second": trained / trained_in.seconds,
        "tokens_per_cpu_second": trained / trained_in.cpu_seconds,
        "seconds": trained_in.seconds,
        "seconds_min": trained_in.seconds_min,
        "seconds_max": trained_in.seconds_max,
        "cpu_seconds": trained_in.cpu_seconds,
        "compile_seconds": compile_seconds,
        "updates_taken": taken,
        "temporary_bytes": _temporary_bytes(update),
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "flops": flops,
        "flops_concatenated": concatenated,
        "matmul_gflops_per_second": matmuls.amount / product.seconds / 1e9,
        "floor_seconds": flops / matmuls.amount * product.seconds,
        "floor_cpu_seconds": flops / matmuls.amount * product.cpu_seconds,
        "floor_fraction": flops / matmuls.amount * product.seconds / trained_in.seconds,
        "floor_cpu_fraction": flops / matmuls.amount * product.cpu_seconds / trained_in.cpu_seconds,
    }
    print_table(
        f"update of {prompts} x {m} x ({length} + {steps}) tokens, {options.repeats} runs",
        ("", *SPREAD_COLUMNS, "kept tokens/s", "tokens/CPU-s"),
        [
            [
                "update",
                *spread_cells(trained_in),
                f"{trained / trained_in.seconds:,.0f}",
                f"{trained / trained_in.cpu_seconds:,.0f}",
            ],
            *([["with all padding", *spread_cells(spreads["with all padding"]), "", ""]] if varied else []),
            [f"matrix products ({matmuls.amount / 1e9:.1f} GFLOP)", *spread_cells(product), "", ""],
        ],
    )
    print(
        f"{trained:,} tokens, mean length {trained / length_PM.size:.1f}; {result['padding_fraction']:.1%} of what is computed "
        "is padding. "
        f"compile {result['compile_seconds']:.1f} s. Memory: state {result['state_bytes'] / 2**20:.1f} MiB, temporaries "
        f"{result['temporary_bytes'] / 2**20:.1f} MiB. Floor: {flops / 1e9:.1f} GFLOP ({flops / concatenated:.2f} of the "
        f"concatenated form's) at {result['matmul_gflops_per_second']:.0f} GFLOP/s = {result['floor_seconds']:.3f} s; "
        f"reached {result['floor_fraction']:.0%} of it in wall, {result['floor_cpu_fraction']:.0%} in CPU seconds."
    )
    return result


def _temporary_bytes(compiled: jax.stages.Compiled) -> int:
    memory = compiled.memory_analysis()
    return 0 if memory is None else memory.temp_size_in_bytes


def work_of(length_PM: Int[np.ndarray, "P M"], prompt_length: int) -> Work:
    """Work of one forward over completions of these lengths: each prompt once, and what each completion adds to it."""
    prompt = update_work(1, 1, prompt_length, 0)
    alone = [update_work(1, 1, prompt_length, int(length)) for length in length_PM.flat]
    return added(alone, prompt, len(alone) - len(length_PM))


def random_kept(model: Policy, options: UpdateOptions, length_PM: Int[np.ndarray, "P M"] | None = None) -> KeptBatch:
    """Kept rollouts of random tokens, of full length unless told otherwise, with advantages of both signs."""
    shape = (options.prompts, options.m, options.completion_length)
    rng = np.random.default_rng(options.seed)
    prompts = model.prompts(options.prompts, options.prompt_length, options.seed)
    arrays = {
        "tokens_PMC": rng.integers(model.spec.vocab_size, size=shape, dtype=np.int32),
        "length_PM": np.full(shape[:2], options.completion_length, np.int32) if length_PM is None else length_PM,
        "logp_old_PMC": np.full(shape, -np.log(model.spec.vocab_size), np.float32),
        "advantage_PM": rng.standard_normal(shape[:2]).astype(np.float32),
        "weight_PM": np.ones(shape[:2], np.float32),
        "index_PM": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
    }
    return KeptBatch(prompt_PL=prompts.tokens_PL, prompt_length_P=prompts.length_P, **to_global(model.mesh, arrays))
