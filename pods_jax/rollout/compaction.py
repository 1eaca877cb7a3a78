"""Which rows of the batch go on once rollouts have ended, and how they move together.

While decoding, the batch is an array of rows ``[tiles, width]``; the rows of one tile belong to one prompt and share a copy of
its cache. At first a tile is a group (``width`` = n). When enough rollouts have ended, those that go on move into fewer and
narrower tiles, each shard's for itself, so that no row leaves its devices. The numbers of rows are few and fixed
(``row_sizes``), because each is a set of compiled programs.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from pods_jax.devices.ladder import ladder
from pods_jax.devices.sharding import take_by_shard
from pods_jax.models.spec import DecoderSpec

NOWHERE = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Rows:
    """Where the rows of the batch come from; S shards, R rows of each.

    Attributes:
        home_SR: Rollout of each row, counted over its shard's prompts and their n; ``NOWHERE`` for a row of padding.
        width: Rows of one tile.
    """

    home_SR: Int[np.ndarray, "S R"]
    width: int

    @property
    def count(self) -> int:
        """Rows of one shard."""
        return self.home_SR.shape[1]

    @classmethod
    def whole(cls, prompts: int, rollouts: int, shards: int) -> "Rows":
        """Every rollout in its place, one tile for each prompt."""
        count = prompts // shards * rollouts
        return cls(np.tile(np.arange(count, dtype=np.int32), (shards, 1)), rollouts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Move:
    """Where the rows and tiles of the smaller batch stand in the larger one, by shard; T tiles of each.

    Attributes:
        row_SR: Row to take.
        real_SR: False for a row of padding.
        tile_ST: Tile whose prompt to take.
    """

    row_SR: Int[Array, "S R"]
    real_SR: Bool[Array, "S R"]
    tile_ST: Int[Array, "S T"]


def row_sizes(rows: int, width: int, rungs: int) -> list[int]:
    """Numbers of rows, largest first, to which a batch of ``rows`` may shrink: multiples of ``width``.

    Args:
        rows: Rows of one shard.
        width: Rows of one tile.
        rungs: 1 for halves alone, 2 with one size between them, 0 for none.
    """
    return [size for size in reversed(ladder(rows, width, rungs)) if size < rows]


def default_width(platform: str, spec: DecoderSpec, prompt_tokens: int) -> int:
    """Rows that share one copy of their prompt's cache once the batch has shrunk.

    One row a tile wastes none; on a CPU as many are joined as keep the reading of the prompt's cache below about a quarter of a
    row's matrix products (ten operations take as long as reading a byte). Matrix units want eight.
    """
    if platform != "cpu":
        return 8
    cached = prompt_tokens * 2 * spec.kv_heads * spec.head_size * 4
    products = 2 * spec.matrix_weights // spec.layers
    return next((width for width in (1, 2, 4) if 4 * 10 * cached <= products * width), 8)


def fit_rows(
    rows: Rows, running_SR: Bool[np.ndarray, "S R"], *, rollouts: int, width: int, size: int
) -> tuple[Rows, Move] | None:
    """How the running rows fit into ``size`` rows a shard, in tiles of ``width``; None when they do not."""
    shards = zip(running_SR, rows.home_SR // rollouts, strict=True)
    keep = [_tiled(np.flatnonzero(running_R), prompt_R, width) for running_R, prompt_R in shards]
    if max(map(len, keep)) > size:
        return None
    take_SR = np.full((len(keep), size), -1, np.int32)
    for take, kept in zip(take_SR, keep, strict=True):
        take[: len(kept)] = kept
    real_SR, row_SR = take_SR >= 0, np.maximum(take_SR, 0)
    home_SR = np.where(real_SR, np.take_along_axis(rows.home_SR, row_SR, axis=1), NOWHERE).astype(np.int32)
    move = Move(row_SR, real_SR, row_SR[:, ::width] // rows.width)  # type: ignore[arg-type]
    return Rows(home_SR, width), move


def _tiled(running: Int[np.ndarray, "A"], prompt_R: Int[np.ndarray, "R"], width: int) -> list[int]:
    """Running rows prompt by prompt, each prompt's filled up with -1 to whole tiles."""
    tiled: list[int] = []
    for prompt in np.unique(prompt_R[running]):
        tiled += running[prompt_R[running] == prompt].tolist()
        tiled += [-1] * (-len(tiled) % width)
    return tiled


def take_rows(x: Shaped[Array, "T W *rest"], index_SR: Int[Array, "S R"], width: int) -> Shaped[Array, "T2 W2 *rest"]:
    """The rows at ``index_SR`` of each shard's rows, in tiles of ``width``; no shard reads another's."""
    taken = take_each(x.reshape(-1, *x.shape[2:]), index_SR)
    return taken.reshape(-1, width, *x.shape[2:])


def take_each(x: Shaped[Array, "T *rest"], index_ST: Int[Array, "S T2"]) -> Shaped[Array, "T3 *rest"]:
    """The entries at ``index_ST`` of each shard's share of the leading axis."""
    taken = take_by_shard(x.reshape(index_ST.shape[0], -1, *x.shape[1:]), index_ST)
    return taken.reshape(-1, *x.shape[1:])


def bring_home(into: Any, rows: Any, home_SR: Int[Array, "S R"]) -> Any:
    """Trees of rollouts ``[P, N, ...]`` with what the rows ``[T, W, ...]`` hold put in its place; padding is dropped."""
    shards = home_SR.shape[0]

    def put(whole: Array, row: Array) -> Array:
        flat = whole.reshape(shards, -1, *whole.shape[2:])
        values = row.reshape(shards, -1, *row.shape[2:])
        placed = jax.vmap(lambda own, index, value: own.at[index].set(value, mode="drop"))(flat, home_SR, values)
        return placed.reshape(whole.shape)

    return jax.tree.map(put, into, rows)
