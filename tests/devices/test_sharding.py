import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pods_jax.devices.sharding import (
    LOGICAL_TO_MESH,
    MESH_AXES,
    ROLLOUT_TABLE,
    check_divisible,
    constrain,
    exchange,
    make_mesh,
    named_sharding,
    own_rows,
    partition_spec,
    replicate,
    to_global,
    to_local,
)

SHAPES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2)]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("layers", "embed", "q_heads", "head"), PartitionSpec(None, "fsdp", "tensor")),
        (("layers", "q_heads", "head", "embed"), PartitionSpec(None, "tensor", None, "fsdp")),
        (("vocab", "embed"), PartitionSpec("tensor", "fsdp")),
        (("layers", "mlp", "embed"), PartitionSpec(None, "tensor", "fsdp")),
        (("layers", "norm"), PartitionSpec()),
        (("prompts", "rollouts", "tokens"), PartitionSpec(("data", "fsdp"))),
        (("prompts", "rollouts", "tokens", "kv_heads", "head"), PartitionSpec(("data", "fsdp"), None, None, "tensor")),
        ((None, "prompts", None), PartitionSpec(None, ("data", "fsdp"))),
        ((), PartitionSpec()),
    ],
)
def test_logical_axes_map_to_mesh_axes(axes, expected):
    assert partition_spec(axes) == expected


def test_every_entry_of_the_tables_is_a_mesh_axis():
    for table in (LOGICAL_TO_MESH, ROLLOUT_TABLE):
        for axis in table:
            entry = (*partition_spec((axis,), table), None)[0]
            assert {entry} <= {None, *MESH_AXES} if not isinstance(entry, tuple) else set(entry) <= set(MESH_AXES)


def test_decoding_parameters_are_spread_over_tensor_alone():
    for axes in (("layers", "embed", "q_heads", "head"), ("vocab", "embed"), ("layers", "mlp", "embed")):
        entries = set(partition_spec(axes, ROLLOUT_TABLE))
        assert entries - {None} == {"tensor"}
    assert partition_spec(("prompts",), ROLLOUT_TABLE) == partition_spec(("prompts",))


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        (("vocab", "mlp"), ("vocab", "mlp", "tensor")),
        (("prompts", "embed"), ("prompts", "embed", "fsdp")),
        (("q_heads", "head", "kv_heads"), ("q_heads", "kv_heads", "tensor")),
        (("embed", "embed"), ("embed", "fsdp")),
    ],
)
def test_two_dimensions_on_one_mesh_axis_are_refused_by_name(axes, names):
    with pytest.raises(ValueError, match="both claim") as error:
        partition_spec(axes)
    assert all(repr(name) in str(error.value) for name in names)


def test_an_unknown_axis_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'heads' is not in the sharding table; known: .*q_heads.*kv_heads"):
        partition_spec(("embed", "heads"))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mesh_has_each_device_once_under_the_three_names(shape):
    mesh = make_mesh(shape)
    assert mesh.axis_names == MESH_AXES
    assert mesh.devices.shape == shape
    assert set(mesh.devices.flat) == set(jax.devices())


def test_a_mesh_over_fewer_devices_takes_the_given_ones():
    assert list(make_mesh((1, 2, 1), jax.devices()[3:5]).devices.flat) == jax.devices()[3:5]


@pytest.mark.parametrize("shape", [(2, 2, 1), (4, 2, 2), (1, 1, 1)])
def test_a_mesh_that_does_not_cover_the_devices_is_refused(shape):
    with pytest.raises(ValueError, match=rf"'data': {shape[0]}.* needs {np.prod(shape)} devices, got 8"):
        make_mesh(shape)


def test_a_dimension_that_does_not_split_evenly_is_refused_by_parameter_and_axis():
    mesh = make_mesh((1, 4, 2))
    check_divisible("layers.q", (3, 16, 6, 5), ("layers", "embed", "q_heads", "head"), mesh)
    with pytest.raises(ValueError, match=re.escape("layers.q: axis 'q_heads' of size 7 cannot be split over tensor=2")):
        check_divisible("layers.q", (3, 16, 7, 5), ("layers", "embed", "q_heads", "head"), mesh)
    with pytest.raises(ValueError, match=re.escape("embed: axis 'embed' of size 18 cannot be split over fsdp=4")):
        check_divisible("embed", (32, 18), ("vocab", "embed"), mesh)
    with pytest.raises(ValueError, match=re.escape("tokens: axis 'prompts' of size 6 cannot be split over dataxfsdp=4")):
        check_divisible("tokens", (6, 3), ("prompts", "tokens"), mesh)


def test_constrain_pins_the_sharding_under_a_mesh_and_does_nothing_without_one():
    x = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    pinned = jax.jit(lambda x: constrain(x + 1, ("prompts", "vocab")))
    np.testing.assert_array_equal(pinned(x), x + 1)
    assert len(pinned(x).sharding.device_set) == 1
    mesh = make_mesh((2, 2, 2))
    with jax.set_mesh(mesh):
        result = pinned(jax.device_put(x, NamedSharding(mesh, PartitionSpec())))
    assert result.sharding.is_equivalent_to(named_sharding(mesh, ("prompts", "vocab")), 2)
    np.testing.assert_array_equal(result, x + 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_host_arrays_go_to_the_mesh_and_come_back(shape):
    mesh = make_mesh(shape)
    rng = np.random.default_rng(0)
    tree = {"tokens": rng.integers(0, 99, (8, 3, 5)), "length": rng.integers(0, 5, 8), "valid": rng.random((8, 3)) < 0.5}
    tree = {name: x.astype(jnp.int32) if x.dtype == np.int64 else x for name, x in tree.items()}
    spread = to_global(mesh, tree)
    shards = shape[0] * shape[1]
    for name, x in spread.items():
        assert x.sharding.is_equivalent_to(named_sharding(mesh, ("prompts",)), x.ndim)
        assert {shard.data.shape for shard in x.addressable_shards} == {(8 // shards, *tree[name].shape[1:])}
    back = to_local(spread)
    for name, x in tree.items():
        assert isinstance(back[name], np.ndarray)
        assert back[name].dtype == x.dtype
        np.testing.assert_array_equal(back[name], x)


def test_scalars_and_replicated_arrays_come_back_whole():
    mesh = make_mesh((2, 2, 2))
    replicated = jax.device_put(np.arange(3.0), NamedSharding(mesh, PartitionSpec()))
    scalar, vector = to_local((jnp.float32(2.5), replicated))
    assert scalar.shape == ()
    assert scalar == 2.5
    np.testing.assert_array_equal(vector, np.arange(3.0))


def test_replicated_values_lie_whole_on_every_device_of_the_mesh_that_is_set():
    tree = {"scalar": np.float32(2.5), "vector": np.arange(3, dtype=np.int32)}
    assert {len(x.sharding.device_set) for x in replicate(tree).values()} == {1}
    with jax.set_mesh(make_mesh((2, 2, 2))):
        spread = replicate(tree)
    for name, x in spread.items():
        assert len(x.sharding.device_set) == 8
        assert x.sharding.is_fully_replicated
        assert x.dtype == tree[name].dtype
        np.testing.assert_array_equal(x, tree[name])


def test_placing_and_fetching_is_allowed_where_implicit_transfers_are_not():
    mesh = make_mesh((8, 1, 1))
    with jax.transfer_guard_host_to_device("disallow"), jax.transfer_guard_device_to_host("disallow"):
        rows = to_local(to_global(mesh, np.arange(8.0, dtype=np.float32)))
        replicate(np.float32(1.0))
    np.testing.assert_array_equal(rows, np.arange(8.0))


@pytest.mark.parametrize(("count", "processes"), [(8, 1), (8, 4), (7, 3), (2, 4)])
def test_every_row_of_host_work_belongs_to_exactly_one_process(count, processes, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    rows = []
    for index in range(processes):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        rows += range(count)[own_rows(count)]
    assert rows == list(range(count))


def test_one_process_exchanges_nothing():
    tree = {"rewards": np.array([[1.0, np.nan]], np.float32)}
    assert exchange(tree, (1, 2)) is tree
