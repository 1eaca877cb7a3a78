import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pods_jax.assembly.opening import load_model
from pods_jax.assembly.policy import load_policy, make_architecture, make_prepare, model_folder
from pods_jax.config.entries import Config
from pods_jax.config.fields import ConfigError
from pods_jax.config.sections import LoraConfig, ModelConfig
from pods_jax.devices.sharding import make_mesh
from pods_jax.models.decoder import Decoder
from pods_jax.models.families import read_spec
from pods_jax.models.hf_weights import load_params
from pods_jax.models.lora import split_adapters
from pods_jax.update.learner import init_state
from pods_jax.update.optim import make_optimizer


def mesh_of(*shape):
    return make_mesh(shape, jax.devices()[: int(np.prod(shape))])


def leaves(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_a_policy_is_read_from_its_folder_straight_to_its_shards(tiny_model, shape):
    mesh = mesh_of(*shape)
    architecture, params = load_policy(ModelConfig(path=str(tiny_model)), mesh)
    plain = leaves(load_params(tiny_model, read_spec(tiny_model), dtype=jnp.float32))
    shapes = leaves(architecture.shapes)
    assert plain.keys() == leaves(params).keys() == shapes.keys()
    for name, leaf in leaves(params).items():
        np.testing.assert_array_equal(leaf, plain[name])
        assert leaf.sharding.is_equivalent_to(shapes[name].sharding, leaf.ndim)
        assert (leaf.shape, leaf.dtype) == (shapes[name].shape, shapes[name].dtype)
    _, fsdp, tensor = shape
    gate = params["layers"]["gate"]
    assert gate.addressable_shards[0].data.shape == (2, 16 // fsdp, 24 // tensor)
    assert len(gate.addressable_shards) == np.prod(shape)


def test_the_architecture_fits_the_parameters(tiny_model):
    architecture, params = load_policy(ModelConfig(path=str(tiny_model)), mesh_of(1, 1, 1))
    tokens = jnp.arange(10, dtype=jnp.int32)[None]
    logits = nnx.merge(architecture.graph, params)(tokens)
    scanned, _ = load_policy(ModelConfig(path=str(tiny_model)), mesh_of(1, 1, 1), layers="scan")
    assert architecture.graph != scanned.graph
    np.testing.assert_allclose(nnx.merge(scanned.graph, params)(tokens), logits, rtol=1e-5, atol=1e-5)
    assert np.ptp(np.asarray(logits)) > 1


def test_building_an_architecture_allocates_nothing(tiny_model):
    before = len(jax.live_arrays())
    architecture = make_architecture(ModelConfig(), read_spec(tiny_model), mesh_of(1, 4, 2))
    assert len(jax.live_arrays()) == before
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(architecture.shapes))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 4), r"layers\.k.*'kv_heads' of size 2 cannot be split over tensor=4"),
        ((1, 3, 1), r"'embed' of size 16 cannot be split over fsdp=3"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_by_parameter(tiny_model, shape, message):
    with pytest.raises(ValueError, match=message):
        make_architecture(ModelConfig(), read_spec(tiny_model), mesh_of(*shape))


def test_parameters_take_the_configured_dtype(tiny_model):
    _, params = load_policy(ModelConfig(path=str(tiny_model), param_dtype="bfloat16"), mesh_of(1, 1, 1))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("rank", [0, 2])
def test_what_is_trained_is_float32_whatever_the_dtype_of_the_rest(rank, tiny_model):
    """In bfloat16 an update of 1e-6 of a weight rounds to nothing, and so does most of Adam's second moment."""
    model, mesh = ModelConfig(path=str(tiny_model), param_dtype="bfloat16"), mesh_of(1, 1, 1)
    config = Config(model=model, lora=LoraConfig(rank=rank))
    architecture, params = load_model(config, mesh)
    trained, frozen = split_adapters(params) if rank else (params, None)
    assert {leaf.dtype for leaf in jax.tree.leaves(trained)} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(frozen)} <= {jnp.dtype(jnp.bfloat16)}
    assert jax.tree.map(lambda x: x.dtype, architecture.shapes) == jax.tree.map(lambda x: x.dtype, params)
    state = init_state(trained, optimizer=make_optimizer(config.optimizer))
    assert {x.dtype for x in jax.tree.leaves(state.opt_state) if x.ndim} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("path", ["nowhere/at/all", "config.json"])
def test_a_path_that_is_no_folder_is_refused(path, tiny_model):
    with pytest.raises(ConfigError, match=r"model\.path=.* is not a folder"):
        model_folder(str(tiny_model / path))


def test_a_home_folder_is_found(tiny_model, monkeypatch):
    monkeypatch.setenv("HOME", str(tiny_model.parent))
    assert model_folder(f"~/{tiny_model.name}") == tiny_model


def test_decoding_gathers_over_fsdp_and_keeps_tensor(tiny_model):
    mesh = mesh_of(2, 2, 2)
    architecture, params = load_policy(ModelConfig(path=str(tiny_model)), mesh)
    ready = make_prepare(architecture, mesh, "float32")(params)
    assert params["layers"]["gate"].addressable_shards[0].data.shape == (2, 8, 12)
    assert ready["layers"]["gate"].addressable_shards[0].data.shape == (2, 16, 12)
    for a, b in zip(jax.tree.leaves(ready), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_decoding_casts_to_the_compute_dtype(tiny_model):
    mesh = mesh_of(1, 1, 1)
    architecture, params = load_policy(ModelConfig(path=str(tiny_model)), mesh)
    ready = make_prepare(architecture, mesh, "bfloat16")(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(ready)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(ready["embed"], params["embed"].astype(jnp.bfloat16))


def test_nothing_is_copied_where_decoding_reads_the_same_parameters(tiny_model):
    mesh = mesh_of(2, 1, 2)
    architecture, params = load_policy(ModelConfig(path=str(tiny_model)), mesh)
    assert make_prepare(architecture, mesh, "float32")(params) is params


def test_remat_and_the_layer_loop_are_part_of_the_graph(tiny_model):
    spec, mesh = read_spec(tiny_model), mesh_of(1, 1, 1)
    for remat in (False, True):
        architecture = make_architecture(ModelConfig(), spec, mesh, layers="scan", remat=remat)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), architecture.shapes)
        decoder = nnx.merge(architecture.graph, zeros)
        assert isinstance(decoder, Decoder)
        assert (decoder.remat, decoder.unroll) == (remat, False)
