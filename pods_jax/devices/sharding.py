"""The device mesh and the one table that maps logical axes to mesh axes.

Groups (the ``prompts`` axis) are spread over ``data`` and ``fsdp``; parameters over ``fsdp`` and ``tensor``. While decoding,
parameters are sharded over ``tensor`` alone, or every token would gather every layer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

LOGICAL_TO_MESH: dict[str, str | tuple[str, ...] | None] = {
    "prompts": ("data", "fsdp"),
    "rollouts": None,
    "tokens": None,
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "q_heads": "tensor",
    "kv_heads": "tensor",
    "head": None,
    "mlp": "tensor",
    "norm": None,
    "rank": None,
    "width": None,
}

ROLLOUT_TABLE = LOGICAL_TO_MESH | {"embed": None}


def make_mesh(shape: Sequence[int], devices: Sequence[Any] | None = None) -> Mesh:
    """Mesh of shape ``(data, fsdp, tensor)`` over ``devices`` (all of them when not given).

    Raises:
        ValueError: the shape does not cover the devices exactly.
    """
    devices = list(jax.devices() if devices is None else devices)
    if int(np.prod(shape)) != len(devices):
        raise ValueError(
            f"mesh {dict(zip(MESH_AXES, shape, strict=True))} needs {int(np.prod(shape))} devices, got {len(devices)}"
        )
    if devices[0].platform == "cpu":
        grid = np.asarray(devices).reshape(shape)
    else:
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_device_mesh(tuple(shape), devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def partition_spec(
    axes: Sequence[str | None], table: Mapping[str, str | tuple[str, ...] | None] = LOGICAL_TO_MESH
) -> PartitionSpec:
    """Mesh axes of an array whose dimensions carry the logical names ``axes`` (``None``: not sharded).

    Raises:
        ValueError: a name is not in the table, or two dimensions claim one mesh axis.
    """
    entries: list[str | tuple[str, ...] | None] = []
    taken: dict[str, str] = {}
    for axis in axes:
        if axis is not None and axis not in table:
            raise ValueError(f"logical axis {axis!r} is not in the sharding table; known: {', '.join(table)}")
        entry = None if axis is None else table[axis]
        for mesh_axis in (entry,) if isinstance(entry, str) else entry or ():
            if mesh_axis in taken:
                raise ValueError(f"logical axes {taken[mesh_axis]!r} and {axis!r} of {tuple(axes)} both claim {mesh_axis!r}")
            taken[mesh_axis] = str(axis)
        entries.append(entry)
    # Written as compiled programs write theirs: a state that comes back spelled otherwise would be traced anew.
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def named_sharding(
    mesh: Mesh, axes: Sequence[str | None], table: Mapping[str, str | tuple[str, ...] | None] = LOGICAL_TO_MESH
) -> NamedSharding:
    """Sharding on ``mesh`` of an array with the logical ``axes``."""
    return NamedSharding(mesh, partition_spec(axes, table))


def check_divisible(name: str, shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh) -> None:
    """Raises ValueError when a dimension of the parameter ``name`` does not split evenly over its mesh axes."""
    for size, axis in zip(shape, axes, strict=True):
        entry = None if axis is None else LOGICAL_TO_MESH[axis]
        names = (entry,) if isinstance(entry, str) else entry or ()
        shards = math.prod(mesh.shape[name] for name in names)
        if size % shards:
            raise ValueError(f"{name}: axis {axis!r} of size {size} cannot be split over {'x'.join(names)}={shards} devices")


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Pins ``x`` to its sharding under the mesh set by ``jax.set_mesh``; does nothing without one."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes))


def take_by_shard(x: jax.Array, index: jax.Array) -> jax.Array:
    """``out[s, i] = x[s, index[s, i]]``; with the first axis spread over shards each gathers from its own rows."""
    # Under vmap it is a gather with a batch axis, which the partitioner leaves where it is.
    return jax.vmap(lambda own, rows: own.at[rows].get(mode="promise_in_bounds"))(x, index)


def to_global(mesh: Mesh, tree: Any, axes: Sequence[str | None] = ("prompts",)) -> Any:
    """Host arrays, whole and alike on every process, as global arrays whose first dimensions carry the logical ``axes``."""
    sharding = named_sharding(mesh, axes)
    if jax.process_count() == 1:
        return jax.device_put(jax.tree.map(np.asarray, tree), sharding)

    def place(x: Any) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    # The loop forbids transfers that nobody asked for; this one was asked for.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.tree.map(place, tree)


def replicate(tree: Any) -> Any:
    """Host values on every device of the mesh set by ``jax.set_mesh``, or on the default device without one."""
    return spread(tree, ())


def spread(tree: Any, axes: Sequence[str | None] = ("prompts",)) -> Any:
    """``to_global`` on the mesh set by ``jax.set_mesh``; on the default device without one."""
    mesh = jax.sharding.get_mesh()
    return jax.device_put(tree) if mesh.empty else to_global(mesh, tree, axes)


def spread_shape(shape: Sequence[int], dtype: Any, axes: Sequence[str | None] = ("prompts",)) -> Any:
    """The shape of an array that ``spread`` puts on the devices, for programs that are compiled and not run."""
    mesh = jax.sharding.get_mesh()
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=None if mesh.empty else named_sharding(mesh, axes))


def group_shards() -> int:
    """Shards over which groups are spread on the mesh set by ``jax.set_mesh``; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in LOGICAL_TO_MESH["prompts"] or ())


def to_local(tree: Any) -> Any:
    """Device arrays as host arrays, whole on every process: what is spread over processes is gathered."""
    with jax.transfer_guard_device_to_host("allow"):
        for leaf in jax.tree.leaves(tree):
            leaf.copy_to_host_async()
        return jax.tree.map(_whole, tree)


def _whole(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(jax.device_get(x))
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def own_rows(count: int) -> slice:
    """The rows of ``count`` whose work on the host (scoring, judging) falls to this process."""
    first, last = (count * (jax.process_index() + i) // jax.process_count() for i in (0, 1))
    return slice(first, last)


def exchange(tree: Any, shape: Sequence[int]) -> Any:
    """Host arrays of this process's ``own_rows``, completed to ``shape`` with the rows of the other processes."""
    if jax.process_count() == 1:
        return tree

    def complete(x: np.ndarray) -> np.ndarray:
        rows = np.zeros(shape, x.dtype)
        rows[own_rows(shape[0])] = x.reshape(-1, *shape[1:])
        return np.asarray(multihost_utils.process_allgather(rows)).sum(axis=0).astype(x.dtype)

    with jax.transfer_guard_host_to_device("allow"):
        return jax.tree.map(complete, tree)


def add_up(counts: dict[str, int]) -> dict[str, int]:
    """Counts of this process, which has the same names as the others, summed over all processes."""
    if jax.process_count() == 1:
        return counts
    with jax.transfer_guard_host_to_device("allow"):
        sums = np.asarray(multihost_utils.process_allgather(np.array(list(counts.values()), np.int32))).sum(axis=0)
    return dict(zip(counts, sums.tolist(), strict=True))
