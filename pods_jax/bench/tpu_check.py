"""Compiles one step for a TPU that need not be there: ``python -m pods_jax.bench.tpu_check``.

Every program of a step (weights for decoding, prefill, decode, growth of the cache, selection, update) of a model with the
shape of Qwen2.5-0.5B is compiled by the real TPU compiler (libtpu) for a slice such as ``v5e:2x2``. Arguments are shapes with
shardings, and each program takes what the one before it returns, so these are the programs that a TPU would run. Printed for
each: compile seconds, memory of one device, what is donated, and what the token loop moves needlessly. The exit code is 1 when
a program does not compile, does not fit or is not donated what it should take over, or when its token loop gathers weights or
copies caches; 2 when there is no libtpu.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from pods_jax.algorithm.advantages import ADVANTAGES
from pods_jax.algorithm.keeping import make_keep
from pods_jax.algorithm.losses import LOSSES
from pods_jax.algorithm.selection import RULES
from pods_jax.assembly.policy import make_architecture, make_prepare
from pods_jax.bench.compiled import DoesNotCompileError, Program, compile_program
from pods_jax.config.sections import ModelConfig, OptimizerConfig
from pods_jax.devices.sharding import MESH_AXES, group_shards, make_mesh, named_sharding
from pods_jax.models.spec import DecoderSpec
from pods_jax.rollout.compaction import Move, default_width
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.programs import Stop
from pods_jax.rollout.sampling import sampling_params
from pods_jax.types import PromptBatch, Rollouts
from pods_jax.update.learner import Learner, UpdateSettings, abstract_state
from pods_jax.update.microbatches import Deal, default_multiple, micro_batch_shape
from pods_jax.update.optim import make_optimizer

# What the compiler leaves to a program on one device, by generation.
LIMIT_GIB = {"v4": 15.25, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}
QWEN2_5_0_5B = DecoderSpec(
    vocab_size=151_936,
    width=896,
    layers=24,
    q_heads=14,
    kv_heads=2,
    head_size=64,
    feed_forward=4_864,
    rope_theta=1e6,
    qkv_bias=True,
)
# Answers to what libtpu asks of the machine it runs on; without them it waits for a metadata server.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the step and how it is cut; each is an option of the command line."""

    prompts: int = 8
    n: int = 64
    m: int = 16
    prompt_length: int = 512
    completion_length: int = 1024
    chunk: int = 512
    micro_batch: int = 32


# --- reading the compiler's answer ------------------------------------------------------------------------------------------


# --- the step, program by program -------------------------------------------------------------------------------------------


def compile_step(mesh: Mesh, spec: DecoderSpec, sizes: Sizes, *, param_dtype: str, compute_dtype: str) -> Iterator[Program]:
    """Compiles one step's programs in their order, each for the results of those before it.

    Args:
        mesh: Devices, which may be those of a topology alone.
        spec: Shape of the decoder.
        sizes: Sizes of the step.
        param_dtype: Dtype of parameters and moments.
        compute_dtype: Dtype of activations, decoding weights and caches.
    """
    model = ModelConfig(param_dtype=param_dtype, compute_dtype=compute_dtype)  # type: ignore[arg-type]
    architecture = make_architecture(model, spec, mesh, remat=True)
    optimizer = make_optimizer(OptimizerConfig())
    state = abstract_state(architecture.shapes, optimizer=optimizer)
    with jax.set_mesh(mesh):
        prompts, rollouts = yield from _compile_rollout(mesh, architecture, sizes, compute_dtype, state)

        def per_rollout(*tail: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
            return _shape(mesh, (sizes.prompts, sizes.n, *tail), dtype)

        keep = make_keep(rule=RULES["max_variance"], m=sizes.m, ties="random", advantage=ADVANTAGES["kept"], eps=1e-4)
        rewards, valid = per_rollout(), per_rollout(dtype=jnp.bool_)
        parts = {name: per_rollout() for name in ("correct", "format", "tag_count")}
        arguments = (prompts, rollouts, rewards, parts, valid, _key())
        program, (kept, _) = compile_program("select", keep, *arguments, held=state, completion_length=sizes.completion_length)
        yield program
        settings = UpdateSettings(LOSSES["grpo"], micro_batch=sizes.micro_batch, multiple=default_multiple("tpu"))
        learner = Learner(architecture.graph, optimizer, optax.constant_schedule(1.0), settings, like=state)
        blocks, shards = sizes.prompts * sizes.m // sizes.micro_batch, group_shards()
        groups, each = micro_batch_shape(sizes.prompts, sizes.m, sizes.micro_batch, shards)
        indices = partial(_shape, mesh, dtype=jnp.int32, axes=(None, "prompts"))
        deal = Deal(
            indices((blocks, shards, groups)),
            indices((blocks, shards, groups, each)),
            jax.ShapeDtypeStruct((), jnp.int32),  # type: ignore[arg-type]
            places=groups * each * sizes.completion_length,
        )
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        yield compile_program("update", learner.update, state, kept, None, None, rate, deal, state=state)[0]


def _compile_rollout(mesh: Mesh, architecture: Any, sizes: Sizes, compute_dtype: str, state: Any) -> Any:
    """The engine's programs; returns the prompts and the rollouts as shapes."""
    engine = RolloutEngine(
        architecture.graph,
        rollouts=sizes.n,
        max_completion_length=sizes.completion_length,
        chunk=sizes.chunk,
        eos_ids=[0],
        width=default_width("tpu", architecture.spec, sizes.prompt_length),
        rungs=1,
        prepare=jax.jit(make_prepare(architecture, mesh, compute_dtype)),
    )
    sampling = sampling_params(temperature=1.0)
    tokens = _shape(mesh, (sizes.prompts, sizes.prompt_length), jnp.int32)
    prompts = PromptBatch(tokens, _shape(mesh, (sizes.prompts,), jnp.int32))  # type: ignore[arg-type]
    program, weights = compile_program("weights", engine.prepare, state.params, held=state.opt_state)
    yield program
    limit = _shape(mesh, (sizes.prompts, sizes.n), jnp.int32)
    program, (decoding, shared) = compile_program(
        "prefill", engine.prefill, weights, prompts, _key(), sampling, engine.eos_ids, limit, held=state
    )
    yield program
    stop = Stop(np.int32(0), np.int32(0))  # type: ignore[arg-type]
    for capacity in engine.capacities:
        if capacity in engine.grow:
            program, decoding = compile_program(
                f"grow {capacity}", engine.grow[capacity], weights, decoding, held=(state, weights, shared)
            )
            yield program
        args = (weights, decoding, shared, sampling, engine.eos_ids, stop)
        program, decoding = compile_program(
            f"decode {capacity}",
            engine.decode[capacity],
            *args,
            held=state,
            state=decoding,
            caches=(decoding.cache, shared.cache),
            token_loop=True,
        )
        yield program
    shards = group_shards()
    for size in engine.row_sizes(sizes.prompts // shards * sizes.n)[:1]:
        yield from _compile_smaller(mesh, engine, size, weights, decoding, shared, stop, state)
    return prompts, Rollouts(*decoding.rows, decoding.decoded_rows)  # type: ignore[arg-type]


def _compile_smaller(
    mesh: Mesh, engine: RolloutEngine, size: int, weights: Any, decoding: Any, shared: Any, stop: Stop, state: Any
) -> Iterator[Program]:
    """Rows that go on move into a batch of ``size`` rows a shard, and are decoded there."""
    shards, rows = group_shards(), partial(_shape, mesh, (group_shards(), size))
    tiles = _shape(mesh, (shards, size // engine.width), jnp.int32)
    move = Move(rows(jnp.int32), rows(jnp.bool_), tiles)
    program, (fewer, fewer_shared) = compile_program(
        f"shrink to {shards * size}", engine.shrink, weights, decoding, shared, move, held=state, width=engine.width
    )
    yield program
    sampling = sampling_params(temperature=1.0)
    decode, caches = engine.decode[engine.capacities[-1]], (fewer.cache, fewer_shared.cache)
    args = (weights, fewer, fewer_shared, sampling, engine.eos_ids, stop)
    yield compile_program(
        f"decode {shards * size} rows", decode, *args, held=state, state=fewer, caches=caches, token_loop=True
    )[0]


def _shape(mesh: Mesh, shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...] = ("prompts",)) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, axes))


def _key() -> Any:
    return jax.eval_shape(partial(jax.random.key, 0))


# --- the command --------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(argv)
    generation = options.topology.partition(":")[0]
    if generation not in LIMIT_GIB:
        print(
            f"tpu_check: error: --topology {options.topology}: known are {', '.join(LIMIT_GIB)}, as in v5e:2x2", file=sys.stderr
        )
        return 2
    if importlib.util.find_spec("libtpu") is None:
        print('tpu_check: error: libtpu is not installed; pip install "pods_jax[tpu]", or make tpu-check', file=sys.stderr)
        return 2
    os.environ.update(LIBTPU_ENVIRONMENT)
    # Nothing runs here, and a TPU that is there may be busy.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_optimization_level", options.optimization)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=options.topology)
    mesh = make_mesh(options.mesh, topology.devices)
    sizes = Sizes(**{field.name: getattr(options, field.name) for field in fields(Sizes)})
    programs = compile_step(mesh, QWEN2_5_0_5B, sizes, param_dtype="float32", compute_dtype="bfloat16")
    return report(
        programs, limit_gib=LIMIT_GIB[generation], about={"topology": options.topology, "mesh": options.mesh, **asdict(sizes)}
    )


def report(programs: Iterator[Program], *, limit_gib: float, about: dict[str, Any]) -> int:
    """Prints the table, the faults and, last, one JSON line; returns the exit code."""
    done, faults = [], []
    try:
        for program in programs:
            print(f"{program.name}: compiled in {program.compile_seconds} s", flush=True)
            done.append(program)
            faults += program.faults(limit_gib)
    except DoesNotCompileError as error:
        faults.append(str(error))
    columns = [
        "program",
        "compile s",
        "peak GiB",
        "held GiB",
        "of GiB",
        "donated / state GiB",
        "gathered GiB/token",
        "copied GiB/token",
    ]
    table = Table(*columns, title=" ".join(f"{name}={value}" for name, value in about.items()))
    for p in done:
        figures = [p.peak_gib, p.held_gib, limit_gib, f"{p.donated_gib:.2f} / {p.state_gib:.2f}", p.gathered_gib, p.copied_gib]
        table.add_row(p.name, f"{p.compile_seconds:.1f}", *[x if isinstance(x, str) else f"{x:.2f}" for x in figures])
    Console(width=128).print(table)
    for fault in faults:
        print(f"tpu_check: {fault}", file=sys.stderr)
    print(
        json.dumps(
            {"bench": "tpu_check", **about, "limit_gib": limit_gib, "faults": faults, "programs": [asdict(p) for p in done]}
        )
    )
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pods_jax.bench.tpu_check",
        description="Compile one step of a model shaped like Qwen2.5-0.5B with the real TPU compiler; no TPU is needed.",
    )
    parser.add_argument("--topology", default="v5e:2x2", help="slice to compile for, as v5e:2x2 (default %(default)s)")
    parser.add_argument("--mesh", default=(1, 2, 2), type=_mesh, help=f"sizes of {','.join(MESH_AXES)} (default 1,2,2)")
    parser.add_argument(
        "--optimization",
        default="O1",
        choices=["O0", "O1", "O2", "O3"],
        help="compiler's effort (default %(default)s: fast, and nearly the memory of O3)",
    )
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default, help="(default %(default)s)")
    return parser


def _mesh(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.split(","))
    if len(sizes) != len(MESH_AXES):
        raise argparse.ArgumentTypeError(f"needs {len(MESH_AXES)} sizes, {','.join(MESH_AXES)}; got {text}")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
