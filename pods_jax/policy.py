"""From a Hugging Face folder to a policy on the mesh, and back."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from pods_jax.config import ConfigError, ModelConfig
from pods_jax.models.attention import decode_form
from pods_jax.models.decoder import Decoder
from pods_jax.models.families import read_spec
from pods_jax.models.hf_weights import load_params
from pods_jax.models.spec import DecoderSpec
from pods_jax.sharding import ROLLOUT_TABLE, check_divisible, named_sharding

BUNDLED = "bundled"


@dataclass(frozen=True)
class Architecture:
    """A decoder without its parameters: what compiled programs close over.

    Attributes:
        spec: The decoder's shape.
        graph: Graph definition; ``nnx.merge(graph, params)`` is the decoder.
        shapes: Tree of ``ShapeDtypeStruct`` with the learner's sharding.
        rollout_shardings: Tree of shardings while decoding: over ``tensor`` alone.
    """

    spec: DecoderSpec
    graph: nnx.GraphDef
    shapes: Any
    rollout_shardings: Any


def model_folder(path: str) -> Path:
    """The folder behind ``model.path``.

    Raises:
        ConfigError: it is not a folder.
    """
    folder = Path(str(resources.files("pods_jax") / "assets" / "tally")) if path == BUNDLED else Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"model.path={path} is not a folder")
    return folder


def make_architecture(config: ModelConfig, spec: DecoderSpec, mesh: Mesh, *, remat: bool = False) -> Architecture:
    """Builds the decoder abstractly: nothing is allocated, and what cannot be sharded is refused by name."""
    platform = mesh.devices.flat[0].platform
    unroll = config.layers == "unroll" or (config.layers == "auto" and platform == "cpu")

    def build() -> Decoder:
        return Decoder(
            spec,
            rngs=nnx.Rngs(0),
            param_dtype=jnp.dtype(config.param_dtype),
            compute_dtype=jnp.dtype(config.compute_dtype),
            unroll=unroll,
            remat=remat,
            form=decode_form(platform),
        )

    graph, state = nnx.split(nnx.eval_shape(build))
    axes = nnx.to_pure_dict(jax.tree.map(lambda v: v.get_metadata()["axes"], state, is_leaf=_is_variable))
    values = nnx.to_pure_dict(state)

    def shape(path: Any, value: Any, names: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        check_divisible(".".join(str(k.key) for k in path), value.shape, names, mesh)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=named_sharding(mesh, names))

    shapes = jax.tree_util.tree_map_with_path(shape, values, axes)
    rollout = jax.tree.map(lambda _, names: named_sharding(mesh, names, ROLLOUT_TABLE), values, axes)
    return Architecture(spec, graph, shapes, rollout)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def load_policy(config: ModelConfig, mesh: Mesh, *, remat: bool = False) -> tuple[Architecture, Any]:
    """Reads a Hugging Face folder, each tensor straight to its shards.

    Returns:
        The architecture and the parameters.
    """
    folder = model_folder(config.path)
    architecture = make_architecture(config, read_spec(folder), mesh, remat=remat)

    def place(path: tuple[str, ...], array: np.ndarray) -> jax.Array:
        target = architecture.shapes
        for key in path:
            target = target[key]
        return jax.make_array_from_callback(array.shape, target.sharding, lambda index: array[index])

    return architecture, load_params(folder, architecture.spec, dtype=jnp.dtype(config.param_dtype), place=place)


def make_prepare(architecture: Architecture, mesh: Mesh, compute_dtype: str) -> Any:
    """What the rollout engine does to the learner's parameters before decoding: cast, and gather over ``fsdp``; or nothing."""
    same_dtype = all(s.dtype == jnp.dtype(compute_dtype) for s in jax.tree.leaves(architecture.shapes))
    if same_dtype and mesh.shape["fsdp"] == 1:
        return lambda params: params

    def cast(params: Any) -> Any:
        return jax.tree.map(lambda p: p.astype(compute_dtype), params)

    return jax.jit(cast, out_shardings=architecture.rollout_shardings)
