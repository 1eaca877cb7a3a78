"""Reads a Hugging Face ``config.json`` as a ``DecoderSpec``, the first step of loading a model.

The file is read as plain JSON, so that no default of a library slips in. Whatever would change the logits and is not
implemented is refused by name. A new family is one entry in ``FAMILIES``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pods_jax.json_file import read_object, shown
from pods_jax.models.config_fields import check_fields, flag, positive, positive_int, required
from pods_jax.models.rope_fields import read_rope
from pods_jax.models.spec import DecoderSpec


@dataclass(frozen=True)
class Family:
    """What an architecture computes without saying so in its config.

    Attributes:
        model_type: The ``model_type`` of its configs.
        qkv_bias: The q, k and v projections have biases.
        qk_norm: RMSNorm runs over each head of q and k.
        head_dim_required: ``head_dim`` must be given; elsewhere an absent one means width / query heads.
        windows: ``sliding_window`` may be given, and counts only where ``use_sliding_window`` is true.
    """

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim_required: bool = False
    windows: bool = False


FAMILIES: dict[str, Family] = {
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, windows=True),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim_required=True, windows=True),
    "LlamaForCausalLM": Family("llama"),
}


def read_config(folder: Path | str) -> dict[str, Any]:
    """Returns the JSON object in ``config.json`` of a Hugging Face folder.

    Raises:
        FileNotFoundError: There is no such folder, or no ``config.json`` in it.
        ValueError: The file is no JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a Hugging Face model folder holds config.json")
    return read_object(path)


def read_spec(folder: Path | str) -> DecoderSpec:
    """Returns the shape of the decoder in a Hugging Face folder.

    Raises:
        FileNotFoundError: There is no ``config.json``.
        ValueError: The file is refused, as by ``spec_from_config``; the message begins with its name.
    """
    config = read_config(folder)
    try:
        return spec_from_config(config)
    except ValueError as error:
        raise ValueError(f"{Path(folder) / 'config.json'}: {error}") from error


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Returns the shape of the decoder that a config of transformers 4 or 5 describes.

    An absent ``tie_word_embeddings`` means untied, as in every family of the table. A wrong guess would be noticed, since the
    weights would then lack the output head.

    Args:
        config: The parsed ``config.json``.

    Raises:
        ValueError: A field is missing, impossible, not supported or not known, or two of them disagree; the message is one line
            with their names and values.
    """
    family = _family(config)
    check_fields(config, windows=family.windows)
    rope = read_rope(config)
    width, q_heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    kv_heads = q_heads if required(config, "num_key_value_heads") is None else positive_int(config, "num_key_value_heads")
    if q_heads % kv_heads:
        raise ValueError(f"num_attention_heads={q_heads} must be a multiple of num_key_value_heads={kv_heads}")
    layers, kinds = positive_int(config, "num_hidden_layers"), config.get("layer_types")
    if kinds is not None and len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries, but num_hidden_layers={layers}")
    return DecoderSpec(
        vocab_size=positive_int(config, "vocab_size"),
        width=width,
        layers=layers,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_size=_head_size(config, family, width, q_heads),
        feed_forward=positive_int(config, "intermediate_size"),
        norm_eps=positive(config, "rms_norm_eps"),
        tied=flag(config, "tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        max_positions=positive_int(config, "max_position_embeddings"),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
    )


def _family(config: Mapping[str, Any]) -> Family:
    """Returns the family of the architecture, whose ``model_type`` must fit; without an architecture that alone decides."""
    architectures, by_type = config.get("architectures"), {family.model_type: family for family in FAMILIES.values()}
    if not architectures and architectures in (None, []):
        if (model_type := required(config, "model_type")) not in list(by_type):
            raise ValueError(f"model_type={shown(model_type)} is not supported; supported: {', '.join(by_type)}")
        return by_type[model_type]
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"architectures={shown(architectures)} must be a list of names")
    for number, name in enumerate(architectures):
        if name not in FAMILIES:
            raise ValueError(f"architectures[{number}]={name!r} is not supported; supported: {', '.join(FAMILIES)}")
    if len(set(architectures)) > 1:
        raise ValueError(f"architectures={shown(architectures)} names more than one; keep that of the weights")
    family, model_type = FAMILIES[architectures[0]], config.get("model_type")
    if model_type not in (None, family.model_type):
        raise ValueError(
            f"model_type={shown(model_type)} and architectures[0]={architectures[0]!r} disagree: "
            f"that architecture is of model_type={family.model_type!r}"
        )
    return family


def _head_size(config: Mapping[str, Any], family: Family, width: int, q_heads: int) -> int:
    if family.head_dim_required or config.get("head_dim") is not None:
        head_size = positive_int(config, "head_dim")
    elif width % q_heads:
        raise ValueError(f"hidden_size={width} must be a multiple of num_attention_heads={q_heads} where head_dim is not given")
    else:
        head_size = width // q_heads
    if head_size % 2:
        raise ValueError(f"head size {head_size} is odd; rotary positions need an even one")
    return head_size
