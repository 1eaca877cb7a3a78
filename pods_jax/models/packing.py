"""Removes the padding of completions by laying the tokens of many rows end to end.

Matrix products and the output head, the most expensive parts of an update, look at one token at a time. They run over packed
tokens ``[S, T]``: each of S shards holds the tokens of its R rows, one row after the other, in T places. Attention needs rows
``[S, R, C]``, which ``unpack`` makes; ``pack`` brings its result back. Each is a gather and the transpose of the other, so
that the gradient needs no scatter.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from pods_jax.algorithm.masked import length_mask
from pods_jax.devices.sharding import take_by_shard


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packing:
    """Where each token lies in both forms.

    Attributes:
        place_SRC: Place of each token of a row; 0 where ``valid_SRC`` is false.
        valid_SRC: True up to each row's length.
        row_ST: Row of the token in each place; arbitrary where ``real_ST`` is false.
        step_ST: Its position in that row; 0 where ``real_ST`` is false.
        real_ST: False for the unused places at the end.
    """

    place_SRC: Int[Array, "S R C"]
    valid_SRC: Bool[Array, "S R C"]
    row_ST: Int[Array, "S T"]
    step_ST: Int[Array, "S T"]
    real_ST: Bool[Array, "S T"]


def packing(length_SR: Int[Array, "S R"], steps: int, places: int) -> Packing:
    """Returns the places of rows of these lengths.

    Args:
        length_SR: Lengths in tokens.
        steps: Padded length C of the rows.
        places: Places T of a shard, at least the sum of any shard's lengths.
    """
    end_SR = jnp.cumsum(length_SR, axis=1)
    start_SR = end_SR - length_SR
    valid_SRC = length_mask(length_SR, steps)
    place_SRC = jnp.where(valid_SRC, start_SR[..., None] + jnp.arange(steps)[None, None], 0)
    place_ST = jnp.arange(places)[None]
    # Rows that end at or before a place; empty ones among them are passed over.
    row_ST = jnp.minimum((end_SR[:, None] <= place_ST[..., None]).sum(axis=-1), length_SR.shape[1] - 1)
    real_ST = place_ST < end_SR[:, -1:]
    step_ST = jnp.where(real_ST, place_ST - jnp.take_along_axis(start_SR, row_ST, axis=1), 0)
    return Packing(place_SRC, valid_SRC, row_ST, step_ST, real_ST)


@jax.custom_vjp
def pack(x_SRC: Shaped[Array, "S R C *rest"], layout: Packing) -> Shaped[Array, "S T *rest"]:
    """Returns the rows' tokens, one row after the other, and 0 in the unused places."""
    shards, rows, steps = x_SRC.shape[:3]
    index_ST = layout.row_ST * steps + layout.step_ST
    taken = take_by_shard(x_SRC.reshape(shards, rows * steps, *x_SRC.shape[3:]), index_ST)
    return _only(taken, layout.real_ST)


@jax.custom_vjp
def unpack(x_ST: Shaped[Array, "S T *rest"], layout: Packing) -> Shaped[Array, "S R C *rest"]:
    """Returns the rows of packed tokens, with 0 beyond their lengths."""
    shards, rows, steps = layout.place_SRC.shape
    taken = take_by_shard(x_ST, layout.place_SRC.reshape(shards, rows * steps))
    return _only(taken.reshape(layout.place_SRC.shape + x_ST.shape[2:]), layout.valid_SRC)


def _only(x: Array, there: Array) -> Array:
    return jnp.where(there.reshape(there.shape + (1,) * (x.ndim - there.ndim)), x, jnp.zeros((), x.dtype))


pack.defvjp(lambda x, layout: (pack(x, layout), layout), lambda layout, g: (unpack(g, layout), None))
unpack.defvjp(lambda x, layout: (unpack(x, layout), layout), lambda layout, g: (pack(g, layout), None))
