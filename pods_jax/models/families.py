"""From a Hugging Face ``config.json`` to a ``DecoderSpec``: the first thing read when a model is loaded.

The file is read as plain JSON, so that what the checkpoint says is what is checked, and no library default slips in between.
Whatever would change the arithmetic and is not implemented is refused by name; a new family is one entry in ``FAMILIES``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pods_jax.models.spec import DecoderSpec, Llama3Rope


@dataclass(frozen=True)
class Family:
    """What an architecture fixes without saying so in its config.

    Attributes:
        model_type: The ``model_type`` of its configs.
        qkv_bias: Biases on the q, k and v projections.
        qk_norm: RMSNorm over each head of q and k.
        head_dim_required: ``head_dim`` must be given; elsewhere an absent one means width / query heads.
    """

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim_required: bool = False


FAMILIES: dict[str, Family] = {
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim_required=True),
    "LlamaForCausalLM": Family("llama"),
}

# Keys that change the arithmetic, with the one value that this decoder computes; an absent key or null means that value.
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "quantization_config": None,
    "num_experts": None,
    "num_local_experts": None,
}


def read_config(folder: Path | str) -> dict[str, Any]:
    """Reads ``config.json`` of a Hugging Face folder.

    Args:
        folder: Folder that holds ``config.json``.

    Returns:
        The parsed JSON object.

    Raises:
        FileNotFoundError: There is no such folder or no ``config.json`` in it.
        ValueError: The file isn't a JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a Hugging Face model folder holds config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a JSON {type(config).__name__}, expected an object")
    return config


def read_spec(folder: Path | str) -> DecoderSpec:
    """Reads the decoder's shape from a Hugging Face folder.

    Args:
        folder: Folder that holds ``config.json``.

    Returns:
        The spec.

    Raises:
        FileNotFoundError: There is no ``config.json``.
        ValueError: As ``spec_from_config``, naming the file.
    """
    config = read_config(folder)
    try:
        return spec_from_config(config)
    except ValueError as error:
        raise ValueError(f"{Path(folder) / 'config.json'}: {error}") from error


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Translates a Hugging Face config, of transformers 4 (``rope_theta``, ``rope_scaling``) or 5 (``rope_parameters``).

    ``tie_word_embeddings`` absent means untied, as in every family of the table; a wrong guess cannot pass unseen, because the
    weights then lack or hold an unexpected output head.

    Args:
        config: The parsed ``config.json``.

    Returns:
        The spec.

    Raises:
        ValueError: A key is missing, impossible or not supported; the message names key, value and what is supported.
    """
    family = _family(config)
    _refuse_unsupported(config)
    width, q_heads = _positive_int(config, "hidden_size"), _positive_int(config, "num_attention_heads")
    kv_heads = q_heads if _required(config, "num_key_value_heads") is None else _positive_int(config, "num_key_value_heads")
    if q_heads % kv_heads:
        raise ValueError(f"num_attention_heads={q_heads} must be a multiple of num_key_value_heads={kv_heads}")
    return DecoderSpec(
        vocab_size=_positive_int(config, "vocab_size"),
        width=width,
        layers=_positive_int(config, "num_hidden_layers"),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_size=_head_size(config, family, width, q_heads),
        feed_forward=_positive_int(config, "intermediate_size"),
        norm_eps=_positive(config, "rms_norm_eps"),
        tied=_flag(config, "tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        max_positions=_positive_int(config, "max_position_embeddings"),
        **_rope(config),
    )


def _family(config: Mapping[str, Any]) -> Family:
    """Looks the architecture up; ``model_type`` decides only where a config names no architecture."""
    architectures = config.get("architectures")
    if architectures:
        if architectures[0] not in FAMILIES:
            raise ValueError(f"architectures[0]={architectures[0]!r} is not supported; supported: {', '.join(FAMILIES)}")
        return FAMILIES[architectures[0]]
    by_type = {family.model_type: family for family in FAMILIES.values()}
    model_type = _required(config, "model_type")
    if model_type not in by_type:
        raise ValueError(f"model_type={model_type!r} is not supported; supported: {', '.join(by_type)}")
    return by_type[model_type]


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for key, only in _ONLY.items():
        value = config.get(key)
        if value is not None and value != only:
            supported = "a config without it" if only is None else repr(only)
            raise ValueError(f"{key}={value!r} is not supported; supported: {supported}")
    for kind in config.get("layer_types") or ():
        if kind != "full_attention":
            raise ValueError(f"layer_types holds {kind!r}, which is not supported; supported: 'full_attention'")


def _head_size(config: Mapping[str, Any], family: Family, width: int, q_heads: int) -> int:
    if family.head_dim_required or config.get("head_dim") is not None:
        head_size = _positive_int(config, "head_dim")
    elif width % q_heads:
        raise ValueError(f"hidden_size={width} must be a multiple of num_attention_heads={q_heads} where head_dim is not given")
    else:
        head_size = width // q_heads
    if head_size % 2:
        raise ValueError(f"head size {head_size} is odd; rotary positions need an even one")
    return head_size


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the rotary base and scaling, wherever this version of the format keeps them."""
    if config.get("rope_parameters") is not None:
        key, parameters = "rope_parameters", config["rope_parameters"]
        theta = _positive(parameters if "rope_theta" in parameters else config, "rope_theta")
    else:
        key, parameters = "rope_scaling", config.get("rope_scaling") or {}
        theta = _positive(config, "rope_theta")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"{key}.rope_type={rope_type!r} is not supported; supported: 'default', 'llama3'")
    for holder in (parameters, config):
        if holder.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ValueError(f"partial_rotary_factor={holder['partial_rotary_factor']!r} is not supported; supported: 1.0")
    return {"rope_theta": theta, "rope_scaling": _llama3(parameters, key) if rope_type == "llama3" else None}


def _llama3(parameters: Mapping[str, Any], key: str) -> Llama3Rope:
    try:
        scaling = Llama3Rope(
            factor=_positive(parameters, "factor"),
            low_freq_factor=_positive(parameters, "low_freq_factor"),
            high_freq_factor=_positive(parameters, "high_freq_factor"),
            original_max_position=_positive_int(parameters, "original_max_position_embeddings"),
        )
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ValueError(
            f"{key}: high_freq_factor={scaling.high_freq_factor} must be above low_freq_factor={scaling.low_freq_factor}"
        )
    return scaling


def _required(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise ValueError(f"{key} is missing; the decoder cannot be built without it")
    return config[key]


def _positive_int(config: Mapping[str, Any], key: str) -> int:
    value = _required(config, key)
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={value!r} must be an integer of at least 1")
    return value


def _positive(config: Mapping[str, Any], key: str) -> float:
    value = _required(config, key)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{key}={value!r} must be a positive number")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if type(value) is not bool:
        raise ValueError(f"{key}={value!r} must be true or false")
    return value
