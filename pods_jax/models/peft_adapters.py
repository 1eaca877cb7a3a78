"""Reads low-rank adapters from a PEFT folder, and writes them as one.

Such a folder holds ``adapter_config.json``, which names the base model, and ``adapter_model.safetensors``.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from safetensors.numpy import save_file

from pods_jax.json_file import read_object, shown
from pods_jax.models.lora import PROJECTIONS, A, B, LoraSpec, sizes
from pods_jax.models.spec import DecoderSpec
from pods_jax.models.weight_files import DTYPES, cast, first_not_finite, read_headers, read_tensor

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
_READ = {"peft_type", "r", "lora_alpha", "target_modules", "base_model_name_or_path", "revision", "init_lora_weights"}
# Settings that change nothing in a plain folder; what exclude_modules leaves out is found missing among the tensors.
_HARMLESS = {
    "auto_mapping",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "task_type",
}
# Ways to draw A and B that leave the base as it is and compute the plain sum; others are kinds of their own.
_DRAWN = (None, True, False, "gaussian", "eva", "orthogonal")


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
    """Returns whether a folder holds PEFT adapters rather than a model."""
    return (folder / CONFIG_FILE).is_file()


def export_adapters(
    params: Mapping[str, Any],
    spec: DecoderSpec,
    lora: LoraSpec,
    base: Base,
    target: Path,
    *,
    overwrite: bool = False,
) -> None:
    """Writes the adapters of a parameter tree as a PEFT folder, in float32. All processes must call this; the first writes.

    Args:
        params: Parameter tree; only its adapters are read.
        spec: The decoder's shape.
        lora: The adapters' rank, scale and targets.
        base: The model that they adapt, written into the config.
        target: Folder to write; everything is written next to it first, then renamed.
        overwrite: Replace earlier adapters.

    Raises:
        FileExistsError: The target exists, and ``overwrite`` is off or it holds no adapters.
        ValueError: An adapter is not finite.
    """
    if target.exists() and not (overwrite and is_adapter_folder(target)):
        raise FileExistsError(f"cannot export adapters to {target}: it exists")
    tensors = {}
    for name in lora.targets:
        for suffix, kind in ((A, "lora_A"), (B, "lora_B")):
            stacked = _to_host(params["layers"][name + suffix])
            for layer in range(spec.layers):
                # safetensors writes a view's memory as it lies: transposed weights must be copied first.
                key, matrix = _tensor_name(layer, name, kind), np.ascontiguousarray(_matrix(stacked[layer], kind, lora.rank))
                if value := first_not_finite(matrix):
                    raise ValueError(f"cannot export adapters to {target}: {key} holds {value}; all weights must be finite")
                tensors[key] = matrix
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
    """Returns rank, scale and targets of a PEFT folder, and the model that it adapts.

    Raises:
        ValueError: The config is unreadable, or asks for something that these adapters do not compute: a setting that is not
            known and not empty is refused too. The message is one line with the file's name.
    """
    file = folder / CONFIG_FILE
    config = read_object(file)
    try:
        _check_kind(config)
        return _lora(config), _base(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _check_kind(config: Mapping[str, Any]) -> None:
    """Refuses adapters of another kind than plain ones, by the first setting that says so."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type={shown(config.get('peft_type'))} is not supported; supported: LORA")
    for key, plain in _PLAIN.items():
        if (config.get(key, plain) or None) != (plain or None):
            raise ValueError(f"{key}={shown(config[key])} is not supported; supported: {plain}")
    if config.get("init_lora_weights") not in _DRAWN:
        drawn = ", ".join(map(str, _DRAWN[1:]))
        raise ValueError(f"init_lora_weights={shown(config['init_lora_weights'])} is not supported; supported: {drawn}")
    for key, value in config.items():
        if value and key not in _READ | set(_PLAIN) | _HARMLESS:
            raise ValueError(f"{key}={shown(value)} is not supported; supported: a config without it")


def _lora(config: Mapping[str, Any]) -> LoraSpec:
    rank, alpha, modules = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"r={shown(rank)} must be an integer of at least 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"lora_alpha={shown(alpha)} must be a number")
    if not isinstance(modules, list) or not modules or not all(name in list(_TARGETS) for name in modules):
        raise ValueError(f"target_modules={shown(modules)} is not supported; supported: a list of {', '.join(_TARGETS)}")
    return LoraSpec(rank, float(alpha), tuple(name for module, name in _TARGETS.items() if module in modules))


def _base(config: Mapping[str, Any]) -> Base:
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        raise ValueError(f"base_model_name_or_path={shown(name)} must name the model that the adapters adapt")
    if not isinstance(revision, str | None):
        raise ValueError(f"revision={shown(revision)} must be a branch, tag or commit, or null")
    return Base(name, revision)


def load_adapters(folder: Path, spec: DecoderSpec, lora: LoraSpec) -> dict[str, np.ndarray]:
    """Returns a PEFT folder's adapters as float32 arrays, layers stacked, by their names in the parameter tree.

    Raises:
        FileNotFoundError: The folder holds no ``adapter_model.safetensors``.
        ValueError: The file is unreadable, or a tensor is missing, unknown, misshapen, of another dtype than float32, bfloat16
            and float16, or not finite.
    """
    tensors = _read_tensors(folder / WEIGHTS_FILE)
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
                matrix = tensors.pop(key)
                needed = _matrix(np.empty(shape), kind, lora.rank).shape
                if matrix.shape != needed:
                    raise ValueError(f"{key} in {folder / WEIGHTS_FILE} is {matrix.shape}; the model needs {needed}")
                layers.append(matrix.T.reshape(shape))
            adapters[name + suffix] = np.stack(layers)
    if tensors:
        raise ValueError(f"{folder / WEIGHTS_FILE} holds unknown tensors: {', '.join(sorted(tensors))}")
    return adapters


def _read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Returns all tensors of a file in float32."""
    if not file.is_file():
        pickled = (file.parent / "adapter_model.bin").is_file()
        hint = "; convert adapter_model.bin to safetensors first, pickled weights are not read" if pickled else ""
        raise FileNotFoundError(f"{file} does not exist{hint}")
    tensors = {}
    for header in read_headers(file):
        if header.dtype not in DTYPES:
            raise ValueError(f"{header.name} in {file} is {header.dtype}, expected {', '.join(DTYPES)}")
        tensors[header.name] = cast(read_tensor(file, header.name), np.dtype("float32"))
        if value := first_not_finite(tensors[header.name]):
            raise ValueError(f"{header.name} in {file} holds {value}; all weights must be finite")
    return tensors


def _tensor_name(layer: int, name: str, kind: str) -> str:
    return f"base_model.model.model.layers.{layer}.{_MODULES[name]}.{kind}.weight"


def _matrix(array: np.ndarray, kind: str, rank: int) -> np.ndarray:
    """Returns the file's ``[out, in]`` matrix of one layer's adapter."""
    return array.reshape(-1, rank).T if kind == "lora_A" else array.reshape(rank, -1).T


def _to_host(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True), np.float32)
    return np.asarray(jax.device_get(array), np.float32)
