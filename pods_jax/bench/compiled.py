"""What a compiler says of one program: seconds, memory, what is donated, and what its token loop moves needlessly."""

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

GIB = 2**30


# A gather below this size is one of partial sums or of candidates, not of weights or logits.
LARGE_BYTES = 2**20


@dataclass(frozen=True)
class Program:
    """What the compiler says about one program; sizes are GiB of one device.

    Attributes:
        name: The program.
        compile_seconds: Wall time of the compilation.
        peak_gib: Most memory of its arguments, results and temporaries at one time.
        held_gib: What else of the step lies on the device meanwhile (parameters, moments, caches).
        donated_gib: Arguments whose memory the results take over.
        state_gib: Arguments whose memory the results should take over.
        gathered_gib: Weights or logits gathered for one token, each loop body counted once.
        copied_gib: Caches copied for one token, each loop body counted once.
    """

    name: str
    compile_seconds: float
    peak_gib: float
    held_gib: float
    donated_gib: float
    state_gib: float
    gathered_gib: float
    copied_gib: float

    def faults(self, limit_gib: float) -> list[str]:
        """What is wrong with the program on devices of ``limit_gib``."""
        total = self.peak_gib + self.held_gib
        checks = [
            (total > limit_gib, f"needs {total:.2f} GiB of {limit_gib} GiB"),
            (
                self.donated_gib < self.state_gib,
                f"takes over {self.donated_gib:.3f} GiB of a state of {self.state_gib:.3f} GiB",
            ),
            (self.gathered_gib > 0, f"gathers {self.gathered_gib:.3f} GiB of weights or logits for each token"),
            (self.copied_gib > 0, f"copies {self.copied_gib:.3f} GiB of caches for each token"),
        ]
        return [f"{self.name} {text}" for wrong, text in checks if wrong]


def device_bytes(tree: Any) -> int:
    """Bytes on one device of a tree of shapes with shardings; random keys and scalars count nothing."""
    shapes = [x for x in jax.tree.leaves(tree) if x.ndim and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in shapes)


def loop_results(hlo: str, operation: str) -> Iterator[tuple[tuple[int, ...], int]]:
    """Shape and bytes of each result of ``operation`` in compiled HLO text, outside the entry computation."""
    body = re.sub(r"^ENTRY .*?^}", "", hlo, flags=re.MULTILINE | re.DOTALL)
    for result in re.findall(rf"= (.*?) {operation}(?:-start)?\(", body):
        arrays = [
            (name, [int(size) for size in sizes.split(",") if size]) for name, sizes in re.findall(r"(\w+)\[([\d,]*)\]", result)
        ]
        sizes = [(tuple(shape), math.prod(shape) * int(re.sub(r"\D", "", name) or 8) // 8) for name, shape in arrays]
        yield max(sizes, key=lambda size: size[1])


def gathered_bytes(hlo: str) -> int:
    """Bytes of large all-gathers outside the entry computation."""
    return sum(size for _, size in loop_results(hlo, "all-gather") if size >= LARGE_BYTES)


def copied_bytes(hlo: str, caches: Any) -> int:
    """Bytes of copies, outside the entry computation, that have the shape of a whole cache or of one layer's."""

    def key(shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(size for size in shape if size > 1))

    whole = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(caches)]
    known = {key(part) for shape in whole for part in (shape, shape[1:])}
    return sum(size for shape, size in loop_results(hlo, "copy") if key(shape) in known)


class DoesNotCompileError(RuntimeError):
    """A program that the compiler refuses; the message names it and gives the compiler's words."""


def compile_program(
    name: str,
    function: Any,
    *args: Any,
    held: Any = (),
    state: Any = (),
    caches: Any = (),
    token_loop: bool = False,
    **kwargs: Any,
) -> tuple[Program, Any]:
    """Compiles a jitted function for shapes.

    Args:
        name: Name of the program.
        function: The jitted function.
        args: Its arguments, shapes with shardings for arrays.
        held: What lies on the device besides.
        state: The argument that is donated.
        caches: Caches that its token loop must not copy.
        token_loop: The program is a loop over tokens.
        kwargs: Static arguments.

    Returns:
        The compiler's answer, and the results as shapes with shardings.

    Raises:
        DoesNotCompileError: the compiler refuses the program, for want of memory or otherwise.
    """
    lowered = function.lower(*args, **kwargs)
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise DoesNotCompileError(f"{name} does not compile: {error}") from error
    seconds = time.perf_counter() - start
    memory, hlo = compiled.memory_analysis(), compiled.as_text() if token_loop else ""
    program = Program(
        name=name,
        compile_seconds=round(seconds, 1),
        peak_gib=memory.peak_memory_in_bytes / GIB,
        held_gib=device_bytes(held) / GIB,
        donated_gib=memory.alias_size_in_bytes / GIB,
        state_gib=device_bytes(state) / GIB,
        gathered_gib=gathered_bytes(hlo) / GIB,
        copied_gib=copied_bytes(hlo, caches) / GIB,
    )
    results = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        lowered.out_info,
        compiled.output_shardings,
    )
    return program, results
