"""Finds the folders of a model, and loads it as a policy on the mesh."""

import re
from dataclasses import dataclass, replace
from functools import partial, reduce
from importlib import resources
from operator import getitem
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub import snapshot_download
from jax.sharding import Mesh, Sharding

from pods_jax.config.fields import ConfigError
from pods_jax.config.sections import LoraConfig, ModelConfig
from pods_jax.devices.sharding import ROLLOUT_TABLE, check_divisible, named_sharding, replicate
from pods_jax.models.attention import decode_form
from pods_jax.models.decoder import Decoder
from pods_jax.models.families import read_spec
from pods_jax.models.hf_weights import load_params
from pods_jax.models.lora import LoraSpec, initial_adapters, join, split_adapters
from pods_jax.models.peft_adapters import CONFIG_FILE, Base, is_adapter_folder, load_adapters, read_lora
from pods_jax.models.side_files import GENERATION, holds_tokenizer
from pods_jax.models.spec import DecoderSpec
from pods_jax.models.weight_files import holds_weights

BUNDLED = {"bundled": "tally", "bundled-scarce": "tally_scarce"}
"""Folders of pods_jax/assets by the names that ``model.path`` knows them under."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Never code, never pickled weights.
DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*", "USE_POLICY*")


@dataclass(frozen=True)
class Architecture:
    """A decoder without its parameters: what compiled programs close over.

    Attributes:
        spec: The decoder's shape.
        graph: Graph definition; ``nnx.merge(graph, params)`` is the decoder.
        shapes: Tree of ``ShapeDtypeStruct`` with the learner's sharding.
        rollout_shardings: Tree of shardings while decoding: over ``tensor`` alone.
        lora: The adapters, or None when every parameter is trained.
        base_graph: Graph definition of the decoder without adapters; ``graph`` when there are none.
        continues_adapters: The adapters were read and not drawn, so that the policy starts away from its base.
    """

    spec: DecoderSpec
    graph: nnx.GraphDef
    shapes: Any
    rollout_shardings: Any
    lora: LoraSpec | None
    base_graph: nnx.GraphDef
    continues_adapters: bool = False

    @property
    def reference_graph(self) -> nnx.GraphDef:
        """Graph definition of the policy that training starts from, which the KL term is measured against."""
        return self.graph if self.continues_adapters else self.base_graph


@dataclass(frozen=True)
class ModelFolders:
    """The folders in which the pieces of a policy lie, which are one where ``model.path`` is a model's.

    Attributes:
        model: Holds ``config.json`` and the weights; of adapters, those of the model that they adapt.
        adapters: The PEFT folder, or None.
        tokenizer: Holds the tokenizer and chat templates: the PEFT folder where it has any, as its adapters were trained with
            them.
        generation: Holds ``generation_config.json``, which names stop ids: likewise.
    """

    model: Path
    adapters: Path | None
    tokenizer: Path
    generation: Path


def find_folders(path: str, revision: str | None = None) -> ModelFolders:
    """Returns the folders behind ``model.path``; those of the Hub are downloaded.

    Raises:
        ConfigError: It is neither a folder nor a model that the Hub has, or holds a model and adapters, or adapters whose base
            is not a model.
        ValueError: The adapters' config is refused.
    """
    folder = find_folder(path, revision)
    if not is_adapter_folder(folder):
        return ModelFolders(folder, None, folder, folder)
    base, key = read_lora(folder)[1], f"{folder / CONFIG_FILE}: base_model_name_or_path"
    if holds_weights(folder):
        raise ConfigError(
            f"model.path={path} holds a model and adapters, which may belong to it or to {base.name}: give each its own folder"
        )
    model = find_folder(base.name, base.revision, key=key)
    if is_adapter_folder(model):
        raise ConfigError(f"{key}={base.name} holds adapters; supported: a model")
    tokenizer = folder if holds_tokenizer(folder) else model
    generation = folder if (folder / GENERATION).is_file() else model
    return ModelFolders(model, folder, tokenizer, generation)


def model_folder(path: str, revision: str | None = None) -> Path:
    """Returns the folder of the model behind ``model.path``; of adapters, that of the model which they adapt.

    Raises:
        ConfigError: As ``find_folders``.
        ValueError: As ``find_folders``.
    """
    return find_folders(path, revision).model


def find_base(path: str, revision: str | None = None) -> Base:
    """Returns what adapters trained on ``model.path`` name as their base: a Hub id at its revision, or an absolute folder."""
    folder = find_folder(path, revision)
    if is_adapter_folder(folder):
        base = read_lora(folder)[1]
        return find_base(base.name, base.revision)
    local = path in BUNDLED or Path(path).expanduser().is_dir()
    return Base(str(folder.resolve())) if local else Base(path, revision)


def find_folder(path: str, revision: str | None = None, *, key: str = "model.path") -> Path:
    """Returns a local folder, the one of a bundled model, or that of a Hub id, which is downloaded.

    Raises:
        ConfigError: It is none of these; the message names ``key``.
    """
    assets = resources.files("pods_jax") / "assets"
    folder = Path(str(assets / BUNDLED[path])) if path in BUNDLED else Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(path):
        raise ConfigError(f"{key}={path} is not a folder")
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=list(DOWNLOADED)))
    except (OSError, ValueError) as error:  # the Hub's own errors are OSErrors
        at = f" at revision {revision}" if revision else ""
        reason = " ".join(str(error).split())
        raise ConfigError(f"{key}={path} is neither a folder nor a model on the Hub{at}: {reason}") from error


def make_architecture(
    config: ModelConfig,
    spec: DecoderSpec,
    mesh: Mesh,
    *,
    layers: str = "auto",
    remat: bool = False,
    lora: LoraSpec | None = None,
) -> Architecture:
    """Builds the decoder abstractly: nothing is allocated, and what cannot be sharded is refused by name."""
    platform = mesh.devices.flat[0].platform
    unroll = layers == "unroll" or (layers == "auto" and platform == "cpu")

    def build(lora: LoraSpec | None) -> Decoder:
        return Decoder(
            spec,
            rngs=nnx.Rngs(0),
            param_dtype=jnp.dtype(config.param_dtype),
            compute_dtype=jnp.dtype(config.compute_dtype),
            unroll=unroll,
            remat=remat,
            form=decode_form(platform, unroll),
            lora=lora,
        )

    graph, state = nnx.split(nnx.eval_shape(partial(build, lora)))
    base_graph = graph if lora is None else nnx.split(nnx.eval_shape(partial(build, None)))[0]
    axes = nnx.to_pure_dict(jax.tree.map(lambda v: v.get_metadata()["axes"], state, is_leaf=_is_variable))
    values = nnx.to_pure_dict(state)

    def shape(path: Any, value: Any, names: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        check_divisible(".".join(str(k.key) for k in path), value.shape, names, mesh)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=named_sharding(mesh, names))

    shapes = jax.tree_util.tree_map_with_path(shape, values, axes)
    rollout = jax.tree.map(lambda _, names: named_sharding(mesh, names, ROLLOUT_TABLE), values, axes)
    return Architecture(spec, graph, shapes, rollout, lora, base_graph)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def make_lora(config: LoraConfig) -> LoraSpec | None:
    """The adapters that the configuration asks for; None for rank 0, which trains every parameter."""
    if config.rank == 0:
        return None
    return LoraSpec(config.rank, config.rank if config.alpha is None else config.alpha, tuple(config.targets))


def load_policy(
    config: ModelConfig,
    mesh: Mesh,
    *,
    layers: str = "auto",
    remat: bool = False,
    lora: LoraSpec | None = None,
    seed: int = 0,
    trained: bool = False,
) -> tuple[Architecture, Any]:
    """Reads a Hugging Face folder, each tensor straight to its shards, and draws new adapters where asked for.

    Args:
        config: Folder and dtypes.
        mesh: Device mesh.
        layers: Layer loop, as ``tuning.layers``.
        remat: Recompute activations in the backward pass.
        lora: New adapters, or None; a folder of adapters brings its own.
        seed: Seed of new adapters.
        trained: The policy will be trained: what is not a base next to adapters is float32.

    Returns:
        The architecture and the parameters.
    """
    folders = find_folders(config.path, config.revision)
    if folders.adapters is not None:
        if lora is not None:
            raise ConfigError(f"model.path={config.path} holds adapters: leave lora.rank at 0 to go on with them")
        lora, _ = read_lora(folders.adapters)
    if trained and lora is None:
        config = replace(config, param_dtype="float32")
    architecture = make_architecture(config, read_spec(folders.model), mesh, layers=layers, remat=remat, lora=lora)

    def sharding_of(path: tuple[str, ...]) -> Sharding:
        return reduce(getitem, path, architecture.shapes).sharding

    def place(path: tuple[str, ...], array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding_of(path), lambda index: array[index])

    params = load_params(folders.model, architecture.spec, dtype=jnp.dtype(config.param_dtype), sharding_of=sharding_of)
    if lora is None:
        return architecture, params
    if folders.adapters is None:
        return architecture, join(_new_adapters(architecture, lora, seed), params)
    adapters = load_adapters(folders.adapters, architecture.spec, lora)
    architecture = replace(architecture, continues_adapters=True)
    return architecture, join({"layers": {name: place(("layers", name), array) for name, array in adapters.items()}}, params)


def _new_adapters(architecture: Architecture, lora: LoraSpec, seed: int) -> dict[str, Any]:
    shardings = jax.tree.map(lambda shape: shape.sharding, split_adapters(architecture.shapes)[0])

    def draw(key: jax.Array) -> dict[str, Any]:
        return {"layers": {name: value for name, (_, value) in initial_adapters(architecture.spec, lora, key).items()}}

    return jax.jit(draw, out_shardings=shardings)(jax.random.key(replicate(np.uint32(seed))))


def make_prepare(architecture: Architecture, mesh: Mesh, compute_dtype: str) -> Any:
    """What the rollout engine does to the learner's parameters before decoding: cast, and gather over ``fsdp``; or nothing."""
    same_dtype = all(s.dtype == jnp.dtype(compute_dtype) for s in jax.tree.leaves(architecture.shapes))
    if same_dtype and mesh.shape["fsdp"] == 1:
        return lambda params: params

    def cast(params: Any) -> Any:
        return jax.tree.map(lambda p: p.astype(compute_dtype), params)

    return jax.jit(cast, out_shardings=architecture.rollout_shardings)
