"""The table of weights: which tensor of a Hugging Face folder becomes which array of the parameter tree.

The parameters are a plain nested dict, with the l layers stacked on a leading axis::

    embed [V, D]   final_norm [D]   head [D, V] (untied)
    layers: input_norm, post_norm [l, D]   q [l, D, Q, H]   k, v [l, D, K, H]   o [l, Q, H, D]
            gate, up [l, D, F]   down [l, F, D]
            q_bias [l, Q, H]   k_bias, v_bias [l, K, H] (qkv_bias)   q_norm, k_norm [l, H] (qk_norm)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pods_jax.models.spec import DecoderSpec

Keys = tuple[str, ...]
"""The keys that lead to an array of the nested dict."""
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Tensor:
    """One row of the table: a tensor of the file, and the array that it becomes.

    Attributes:
        path: Keys of the array in the parameter tree; those under ``layers`` have a leading layer axis.
        name: Name in the file, with ``{layer}`` where it is kept layer by layer.
        file_axes: Axis letters in the file's order; letters written together are flattened to one axis ("QH D").
        axes: The same letters in the array's order.
    """

    path: Keys
    name: str
    file_axes: str
    axes: str

    def stack(self, spec: DecoderSpec) -> tuple[int, ...]:
        """Returns the shape in front of one layer's: the number of layers, or nothing for arrays without layers."""
        return (spec.layers,) if self.path[0] == "layers" else ()

    def file_names(self, spec: DecoderSpec) -> list[str]:
        """Returns the names of the tensors that make up the array, in the order of the layers."""
        return [self.name.format(layer=layer) for layer in range(spec.layers)] if self.stack(spec) else [self.name]

    def file_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of the tensor in the file."""
        return tuple(int(np.prod([sizes[letter] for letter in group])) for group in self.file_axes.split())

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of one layer of the array."""
        return tuple(sizes[letter] for letter in self.axes)

    def from_file(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Returns a view of the file's tensor in the array's order."""
        letters = self.file_axes.replace(" ", "")
        order = [letters.index(letter) for letter in self.axes]
        return array.reshape([sizes[letter] for letter in letters]).transpose(order)

    def to_file(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Returns a view of one layer of the array in the file's order."""
        order = [self.axes.index(letter) for letter in self.file_axes.replace(" ", "")]
        return array.transpose(order).reshape(self.file_shape(sizes))


def _layer(key: str, name: str, file_axes: str, axes: str) -> Tensor:
    return Tensor(("layers", key), "model.layers.{layer}." + name, file_axes, axes)


_BASE = (
    Tensor(("embed",), EMBED, "V D", "VD"),
    _layer("input_norm", "input_layernorm.weight", "D", "D"),
    _layer("q", "self_attn.q_proj.weight", "QH D", "DQH"),
    _layer("k", "self_attn.k_proj.weight", "KH D", "DKH"),
    _layer("v", "self_attn.v_proj.weight", "KH D", "DKH"),
    _layer("o", "self_attn.o_proj.weight", "D QH", "QHD"),
    _layer("post_norm", "post_attention_layernorm.weight", "D", "D"),
    _layer("gate", "mlp.gate_proj.weight", "F D", "DF"),
    _layer("up", "mlp.up_proj.weight", "F D", "DF"),
    _layer("down", "mlp.down_proj.weight", "D F", "FD"),
    Tensor(("final_norm",), "model.norm.weight", "D", "D"),
)


_QKV_BIAS = (
    _layer("q_bias", "self_attn.q_proj.bias", "QH", "QH"),
    _layer("k_bias", "self_attn.k_proj.bias", "KH", "KH"),
    _layer("v_bias", "self_attn.v_proj.bias", "KH", "KH"),
)


_QK_NORM = (_layer("q_norm", "self_attn.q_norm.weight", "H", "H"), _layer("k_norm", "self_attn.k_norm.weight", "H", "H"))


_UNTIED = (Tensor(("head",), HEAD, "V D", "DV"),)


def tensors_of(spec: DecoderSpec) -> tuple[Tensor, ...]:
    """Returns the rows of the table that a model of this spec has."""
    return _BASE + _QKV_BIAS * spec.qkv_bias + _QK_NORM * spec.qk_norm + _UNTIED * (not spec.tied)


def array_shapes(spec: DecoderSpec) -> dict[Keys, tuple[int, ...]]:
    """Returns the shape of every array of the parameter tree, by its path."""
    sizes = axis_sizes(spec)
    return {row.path: row.stack(spec) + row.shape(sizes) for row in tensors_of(spec)}


def axis_sizes(spec: DecoderSpec) -> dict[str, int]:
    """Returns the size of each axis letter of the table."""
    return {
        "V": spec.vocab_size,
        "D": spec.width,
        "Q": spec.q_heads,
        "K": spec.kv_heads,
        "H": spec.head_size,
        "F": spec.feed_forward,
    }
