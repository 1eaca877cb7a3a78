import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pods_jax.devices.sharding import make_mesh
from pods_jax.run.checkpoint import Checkpoints, Progress
from pods_jax.update.learner import TrainState


def progress(step, **changes):
    values = {
        "wall_seconds": 1.5 * step,
        "loader": {"next_index": 7 * step, "nested": {"epoch": 2}},
        "config": "run:\n  name: ä\n",
    }
    return Progress(step, **(values | changes))


def state(mesh_shape, scale=1.0):
    """A state of both float dtypes, spread over a mesh of that shape."""
    mesh = make_mesh(mesh_shape, jax.devices()[: int(np.prod(mesh_shape))])

    def put(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    rng = np.random.default_rng(0)
    weights = put(scale * rng.normal(size=(8, 6)).astype(np.float32), "fsdp", "tensor")
    params = {"w": weights, "b": put(jnp.asarray(scale * rng.normal(size=12), jnp.bfloat16), "fsdp")}
    return TrainState(params, (jax.tree.map(lambda x: x * 3, params), put(np.int32(5))), put(np.int32(4)))


@pytest.fixture
def checkpoints(tmp_path):
    manager = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield manager
    manager.close()


def assert_identical(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_new_folder_has_no_checkpoint(checkpoints):
    assert checkpoints.latest() is None


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 2), (2, 2, 2)])
def test_state_and_progress_come_back_on_any_mesh_bit_by_bit(checkpoints, shape):
    saved = state((2, 2, 2))
    checkpoints.save(saved, progress(3))
    like = state(shape, scale=0.0)
    restored = checkpoints.restore(3, like)
    assert_identical(restored, saved)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert checkpoints.progress(3) == progress(3)


def test_the_newest_are_kept_and_found_by_another_process(checkpoints, tmp_path):
    for step in (2, 5, 11):
        checkpoints.save(state((1, 1, 1), scale=step), progress(step))
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert again.latest() == 11
    assert again.progress(5).wall_seconds == 7.5
    assert_identical(again.restore(5, state((1, 1, 1))), state((1, 1, 1), scale=5))
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [5, 11]
    again.close()


def test_the_state_may_be_freed_as_soon_as_save_returns(checkpoints):
    saved, expected = state((1, 4, 2)), jax.tree.map(np.array, state((1, 4, 2)))
    checkpoints.save(saved, progress(1))
    for leaf in jax.tree.leaves(saved):
        leaf.delete()
    assert_identical(checkpoints.restore(1, state((1, 4, 2), scale=0.0)), expected)


def test_what_was_not_written_to_the_end_is_no_checkpoint(checkpoints, tmp_path):
    for step in (1, 2):
        checkpoints.save(state((1, 1, 1)), progress(step))
    checkpoints.close()
    folder = tmp_path / "checkpoints"
    (folder / "2").rename(folder / "2.orbax-checkpoint-tmp")
    again = Checkpoints(folder, keep=2)
    assert again.latest() == 1
    again.save(state((1, 1, 1), scale=2.0), progress(2))
    again.close()
    last = Checkpoints(folder, keep=2)
    assert last.latest() == 2
    assert_identical(last.restore(2, state((1, 1, 1))), state((1, 1, 1), scale=2.0))
    last.close()
