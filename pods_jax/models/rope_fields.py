"""Reads the rotary base and scaling from a ``config.json``, wherever a version of the format keeps them.

Transformers 4 wrote ``rope_theta`` and ``rope_scaling`` at the top, transformers 5 writes one ``rope_parameters`` block, or one
for each kind of layer. Each fact may stand in several places; where two of them disagree the file is refused, since programs
differ in which one they take.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pods_jax.json_file import shown
from pods_jax.models.config_fields import positive, positive_int
from pods_jax.models.spec import Llama3Rope

_BLOCKS = ("rope_parameters", "rope_scaling")
_KINDS = ("default", "llama3")
_ORIGINAL = "original_max_position_embeddings"
_PLAIN_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LLAMA3_KEYS = {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}


@dataclass(frozen=True)
class Rope:
    """Rotary positions of a decoder.

    Attributes:
        theta: Base of the frequencies.
        scaling: The ``llama3`` scaling, or None.
    """

    theta: float
    scaling: Llama3Rope | None


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Returns the rotary positions that a config asks for.

    Args:
        config: The parsed ``config.json``.

    Raises:
        ValueError: A block is malformed, of a kind that is not supported or incomplete, or two places disagree; the message
            names both.
    """
    _check_factor(config, "")
    blocks = _blocks(config)
    kinds = {name: _kind(block, name) for name, block in blocks.items()}
    if not blocks:
        return Rope(positive(config, "rope_theta"), None)
    read = {name: _read(block, kinds[name], name, config) for name, block in blocks.items()}
    (first, rope), *others = read.items()
    for name, other in others:
        if other != rope:
            raise ValueError(f"{first} and {name} disagree: {_words(rope)} and {_words(other)}; keep one of them")
    return rope


def _blocks(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the blocks of settings by their names in error messages; empty blocks are left out."""
    blocks: dict[str, Mapping[str, Any]] = {}
    for key in _BLOCKS:
        block = _object(config.get(key), key)
        by_layer = [kind for kind in block if kind.endswith("attention")]
        if not by_layer:
            blocks[key] = block
            continue
        if others := [name for name in block if name not in by_layer and block[name] is not None]:
            raise ValueError(f"{key} holds both {', '.join(by_layer)} and {', '.join(others)}; keep the one or the other")
        if not block.get("full_attention"):
            raise ValueError(f"{key} has no full_attention, the kind of all layers")
        blocks |= {f"{key}.{kind}": _object(block[kind], f"{key}.{kind}") for kind in by_layer}
    return {name: block for name, block in blocks.items() if block}


def _object(block: Any, name: str) -> Mapping[str, Any]:
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise ValueError(f"{name}={shown(block)} must be an object or null")
    return block


def _kind(block: Mapping[str, Any], name: str) -> str:
    """Returns the kind of a block, after all that this decoder does not compute has been refused."""
    kinds = {key: block[key] for key in ("rope_type", "type") if block.get(key) is not None}
    for kind in kinds.values():
        if kind not in _KINDS:
            raise ValueError(f"{name}.rope_type={shown(kind)} is not supported; supported: {', '.join(map(repr, _KINDS))}")
    if len(kinds) == 2 and kinds["rope_type"] != kinds["type"]:
        raise ValueError(f"{name}: rope_type={kinds['rope_type']!r} and type={kinds['type']!r} disagree; keep one of them")
    _check_factor(block, f"{name}.")
    kind = next(iter(kinds.values()), "default")
    known = _PLAIN_KEYS | (_LLAMA3_KEYS if kind == "llama3" else set())
    if unknown := [f"{key}={shown(value)}" for key, value in block.items() if key not in known and value is not None]:
        of = f"of rope_type={kind!r}" if kinds else "without a rope_type"
        raise ValueError(f"{name} {of} holds {', '.join(unknown)}, which is not supported; supported: a block without it")
    return kind


def _check_factor(holder: Mapping[str, Any], at: str) -> None:
    if holder.get("partial_rotary_factor") not in (None, 1, 1.0):
        value = shown(holder["partial_rotary_factor"])
        raise ValueError(f"{at}partial_rotary_factor={value} is not supported; supported: 1.0")


def _read(block: Mapping[str, Any], kind: str, name: str, config: Mapping[str, Any]) -> Rope:
    theta = _one_place("rope_theta", block, name, config)
    if kind == "default":
        return Rope(positive(theta, "rope_theta"), None)
    _one_place(_ORIGINAL, block, name, config)
    try:
        scaling = Llama3Rope(
            factor=positive(block, "factor"),
            low_freq_factor=positive(block, "low_freq_factor"),
            high_freq_factor=positive(block, "high_freq_factor"),
            original_max_position=positive_int(block, _ORIGINAL),
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if high <= low:
        raise ValueError(f"{name}: high_freq_factor={high} must be above low_freq_factor={low}")
    return Rope(positive(theta, "rope_theta"), scaling)


def _one_place(key: str, block: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the block or the config, whichever holds a field; where both do, they must agree."""
    inside, outside = block.get(key), config.get(key)
    if inside is not None and outside is not None and inside != outside:
        raise ValueError(f"{name}.{key}={shown(inside)} and {key}={shown(outside)} disagree; keep one of them")
    return config if inside is None else block


def _words(rope: Rope) -> str:
    scaling = "no scaling" if rope.scaling is None else f"llama3 {rope.scaling}"
    return f"theta {rope.theta:g} with {scaling}"
