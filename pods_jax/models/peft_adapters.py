"""Low-rank adapters in and out of a PEFT folder: ``adapter_config.json`` and ``adapter_model.safetensors``."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from safetensors.numpy import load_file, save_file

from pods_jax.models.lora import PROJECTIONS, A, B, LoraSpec, sizes
from pods_jax.models.spec import DecoderSpec

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_TARGETS = {module.rpartition(".")[2]: name for name, module in _MODULES.items()}
# Settings under which PEFT computes something else than (alpha / rank) x A B with one rank for all.
_PLAIN: dict[str, Any] = {
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
}
# Later inventions, absent or off in a plain folder. These ways to draw A and B also change the base's own weights.
_OFF = (
    "alora_invocation_tokens",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
)
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True)
class Base:
    """The model that adapters adapt.

    Attributes:
        name: Folder or Hub id.
        revision: Branch, tag or commit of a Hub model; None is its newest state.
    """

    name: str
    revision: str | None = None


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds PEFT adapters rather than a model."""
    return (folder / CONFIG_FILE).is_file()


def export_adapters(
    params: Mapping[str, Any], spec: DecoderSpec, lora: LoraSpec, base: Base, target: Path, *, overwrite: bool = False
) -> None:
    """Writes the adapters of a parameter tree as a PEFT folder, in float32. All processes must call this; the first writes.

    Args:
        params: Parameter tree; only its adapters are read.
        spec: The decoder's shape.
        lora: The adapters' rank, scale and targets.
        base: The model that they adapt, written into the config.
        target: Folder to write: beside it first, then renamed.
        overwrite: Replace earlier adapters.

    Raises:
        FileExistsError: the target exists, and ``overwrite`` is off or it holds no adapters.
    """
    if target.exists() and not (overwrite and is_adapter_folder(target)):
        raise FileExistsError(f"cannot export adapters to {target}: it exists")
    tensors = {}
    for name in lora.targets:
        for suffix, kind in ((A, "lora_A"), (B, "lora_B")):
            stacked = _to_host(params["layers"][name + suffix])
            for layer in range(spec.layers):
                # safetensors writes a view's memory as it lies: transposed weights must be copied first.
                tensors[_tensor_name(layer, name, kind)] = np.ascontiguousarray(_matrix(stacked[layer], kind, lora.rank))
    if jax.process_index() != 0:
        return
    unfinished = target.with_name(target.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "revision": base.revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [_MODULES[name].rpartition(".")[2] for name in lora.targets],
        "inference_mode": True,
        **_PLAIN,
    }
    (unfinished / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, unfinished / WEIGHTS_FILE, metadata={"format": "pt"})
    shutil.copymode(unfinished / CONFIG_FILE, unfinished / WEIGHTS_FILE)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def read_lora(folder: Path) -> tuple[LoraSpec, Base]:
    """Rank, scale and targets of a PEFT folder, and the model that it adapts.

    Raises:
        ValueError: the config is unreadable, or asks for something that these adapters do not compute.
    """
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha, base = config["r"], config["lora_alpha"], Base(config["base_model_name_or_path"], config.get("revision"))
        modules = config["target_modules"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no PEFT config: {error!r}") from error
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type={config.get('peft_type')} is not supported; supported: LORA")
    for key, plain in _PLAIN.items():
        if (config.get(key, plain) or None) != (plain or None):
            raise ValueError(f"{file}: {key}={config[key]} is not supported; supported: {plain}")
    for key in _OFF:
        if config.get(key):
            raise ValueError(f"{file}: {key}={config[key]} is not supported; supported: none")
    drawn = config.get("init_lora_weights")
    if isinstance(drawn, str) and drawn.startswith(_CHANGED_BASE):
        raise ValueError(f"{file}: init_lora_weights={drawn} is not supported: it changes the base's weights")
    if not isinstance(modules, list) or not set(modules) <= set(_TARGETS):
        raise ValueError(f"{file}: target_modules={modules} is not supported; supported: some of {', '.join(_TARGETS)}")
    targets = tuple(name for module, name in _TARGETS.items() if module in modules)
    return LoraSpec(rank, float(alpha), targets), base


def load_adapters(folder: Path, spec: DecoderSpec, lora: LoraSpec) -> dict[str, np.ndarray]:
    """Stacked float32 adapters by their names in the parameter tree.

    Raises:
        ValueError: a tensor is missing, unknown or misshapen.
    """
    tensors = load_file(folder / WEIGHTS_FILE)
    adapters = {}
    for name in lora.targets:
        here = PROJECTIONS[name]
        inputs, outputs = sizes(spec, here.input_axes), sizes(spec, here.output_axes)
        for suffix, kind, shape in ((A, "lora_A", (*inputs, lora.rank)), (B, "lora_B", (lora.rank, *outputs))):
            layers = []
            for layer in range(spec.layers):
                key = _tensor_name(layer, name, kind)
                if key not in tensors:
                    raise ValueError(f"{folder / WEIGHTS_FILE} has no {key}")
                matrix = tensors.pop(key).astype(np.float32)
                needed = _matrix(np.empty(shape), kind, lora.rank).shape
                if matrix.shape != needed:
                    raise ValueError(f"{key} in {folder / WEIGHTS_FILE} is {matrix.shape}; the model needs {needed}")
                layers.append(matrix.T.reshape(shape))
            adapters[name + suffix] = np.stack(layers)
    if tensors:
        raise ValueError(f"{folder / WEIGHTS_FILE} holds unknown tensors: {', '.join(sorted(tensors))}")
    return adapters


def _tensor_name(layer: int, name: str, kind: str) -> str:
    return f"base_model.model.model.layers.{layer}.{_MODULES[name]}.{kind}.weight"


def _matrix(array: np.ndarray, kind: str, rank: int) -> np.ndarray:
    """The file's ``[out, in]`` matrix of one layer's adapter."""
    return array.reshape(-1, rank).T if kind == "lora_A" else array.reshape(rank, -1).T


def _to_host(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True), np.float32)
    return np.asarray(jax.device_get(array), np.float32)
