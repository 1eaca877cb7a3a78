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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
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
from pods_jax.rollout.compaction import default_width
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.programs import Call
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
Found = Callable[[Program], None]
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


# --- the step, program by program -------------------------------------------------------------------------------------------


def compile_step(mesh: Mesh, spec: DecoderSpec, sizes: Sizes, found: Found, *, param_dtype: str, compute_dtype: str) -> None:
    """Compiles one step's programs in their order, each for the results of those before it.

    Args:
        mesh: Devices, which may be those of a topology alone.
        spec: Shape of the decoder.
        sizes: Sizes of the step.
        found: Gets each program once it is compiled.
        param_dtype: Dtype of parameters and moments.
        compute_dtype: Dtype of activations, decoding weights and caches.
    """
    model = ModelConfig(param_dtype=param_dtype, compute_dtype=compute_dtype)  # type: ignore[arg-type]
    architecture = make_architecture(model, spec, mesh, remat=True)
    optimizer = make_optimizer(OptimizerConfig())
    state = abstract_state(architecture.shapes, optimizer=optimizer)
    with jax.set_mesh(mesh):
        prompts, rollouts = _compile_rollout(mesh, architecture, sizes, compute_dtype, state, found)

        def per_rollout(*tail: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
            return _shape(mesh, (sizes.prompts, sizes.n, *tail), dtype)

        keep = make_keep(rule=RULES["max_variance"], m=sizes.m, ties="random", advantage=ADVANTAGES["kept"], eps=1e-4)
        rewards, valid = per_rollout(), per_rollout(dtype=jnp.bool_)
        parts = {name: per_rollout() for name in ("correct", "format", "tag_count")}
        arguments = (prompts, rollouts, rewards, parts, valid, _key())
        program, (kept, _) = compile_program("select", keep, *arguments, held=state, completion_length=sizes.completion_length)
        found(program)
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
        found(compile_program("update", learner.update, state, kept, None, None, rate, deal, state=state)[0])


def _compile_rollout(
    mesh: Mesh, architecture: Any, sizes: Sizes, compute_dtype: str, state: Any, found: Found
) -> tuple[PromptBatch, Rollouts]:
    """The engine's programs; returns the prompts and the rollouts as shapes."""
    prepare = jax.jit(make_prepare(architecture, mesh, compute_dtype))
    engine = RolloutEngine(
        architecture.graph,
        rollouts=sizes.n,
        max_completion_length=sizes.completion_length,
        chunk=sizes.chunk,
        eos_ids=[0],
        width=default_width("tpu", architecture.spec, sizes.prompt_length),
        rungs=1,
        prepare=prepare,
    )
    tokens = _shape(mesh, (sizes.prompts, sizes.prompt_length), jnp.int32)
    prompts = PromptBatch(tokens, _shape(mesh, (sizes.prompts,), jnp.int32))  # type: ignore[arg-type]
    program, weights = compile_program("weights", prepare, state.params, held=state.opt_state)
    found(program)

    def visit(call: Call) -> Any:
        held, loop = (state, call.kept), call.caches is not None
        donated = () if call.donated is None else call.donated
        answer = {"held": held, "state": donated, "caches": call.caches, "token_loop": loop}
        program, results = compile_program(call.name, call.function, *call.args, **answer, **call.static)
        found(program)
        return results

    return prompts, engine.visit_programs(visit, weights, prompts, sampling_params(temperature=1.0))


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
    about = {"topology": options.topology, "mesh": options.mesh, **asdict(sizes)}

    def step(found: Found) -> None:
        compile_step(mesh, QWEN2_5_0_5B, sizes, found, param_dtype="float32", compute_dtype="bfloat16")

    return report(step, limit_gib=LIMIT_GIB[generation], about=about)


def report(step: Callable[[Found], Any], *, limit_gib: float, about: dict[str, Any]) -> int:
    """Prints each program that ``step`` finds, the table, the faults and, last, one JSON line; returns the exit code."""
    done: list[Program] = []
    faults: list[str] = []

    def found(program: Program) -> None:
        print(f"{program.name}: compiled in {program.compile_seconds} s", flush=True)
        done.append(program)
        faults.extend(program.faults(limit_gib))

    try:
        step(found)
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
