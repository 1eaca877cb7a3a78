import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pods_jax.models.spec import DecoderSpec
from pods_jax.rollout.compaction import (
    NOWHERE,
    Rows,
    bring_home,
    default_width,
    fit_rows,
    row_sizes,
    take_each,
    take_rows,
)

PROMPTS, ROLLOUTS = 3, 5


@pytest.mark.parametrize(
    ("rows", "width", "steps", "sizes"),
    [
        (64, 1, 2, [46, 32, 23, 16, 12, 8]),
        (64, 1, 1, [32, 16, 8]),
        (64, 8, 1, [32, 16, 8]),
        (64, 8, 2, [48, 32, 24, 16, 8]),
        (15, 2, 2, [12, 8, 6, 4, 2]),
        (3, 1, 2, [2, 1]),
        (1, 1, 2, []),
        (5, 5, 2, []),
        (64, 1, 0, []),
    ],
)
def test_sizes_are_few_multiples_of_the_width_and_end_at_an_eighth(rows, width, steps, sizes):
    assert row_sizes(rows, width, steps) == sizes
    assert all(size % width == 0 for size in sizes)
    assert all(size >= rows / 8 for size in sizes)


@st.composite
def batches(draw):
    """A width, and which rollouts of two shards run, at first and later."""
    rollouts = 2 * PROMPTS * ROLLOUTS
    first, later = (np.array(draw(st.lists(st.booleans(), min_size=rollouts, max_size=rollouts))) for _ in range(2))
    return draw(st.integers(1, 4)), first.reshape(2, -1), (first & later).reshape(2, -1)


@settings(deadline=None)
@given(batches())
def test_every_running_row_is_taken_once_beside_others_of_its_prompt(batch):
    width, *running = batch
    rows = Rows.whole(2 * PROMPTS, ROLLOUTS, 2)
    for running_SR in running:  # by rollout
        at_home_SR = np.minimum(rows.home_SR, PROMPTS * ROLLOUTS - 1)
        runs_SR = (rows.home_SR != NOWHERE) & np.take_along_axis(running_SR, at_home_SR, axis=1)
        needed = max(tiled_rows(home_R[runs_R], width) for home_R, runs_R in zip(rows.home_SR, runs_SR, strict=True))
        if needed:
            assert fit_rows(rows, runs_SR, rollouts=ROLLOUTS, width=width, size=needed - width) is None
        planned = fit_rows(rows, runs_SR, rollouts=ROLLOUTS, width=width, size=max(needed, width))
        assert planned is not None
        moved, move = planned
        for shard in range(2):
            home_R, real_R = moved.home_SR[shard], np.asarray(move.real_SR)[shard]
            assert sorted(home_R[real_R]) == np.flatnonzero(running_SR[shard]).tolist()
            assert (home_R[~real_R] == NOWHERE).all()
            assert (home_R == np.where(real_R, rows.home_SR[shard][np.asarray(move.row_SR)[shard]], NOWHERE)).all()
            prompt_T = rows.home_SR[shard].reshape(-1, rows.width)[:, 0] // ROLLOUTS  # of each tile before
            for tile_W, source in zip(home_R.reshape(-1, width), np.asarray(move.tile_ST)[shard], strict=True):
                assert {home // ROLLOUTS for home in tile_W if home != NOWHERE} <= {prompt_T[source]}
        rows = moved


def tiled_rows(home_A, width):
    """Rows that whole tiles for each prompt take."""
    counts = np.bincount(home_A // ROLLOUTS, minlength=PROMPTS)
    return int((-(-counts // width) * width).sum())


def test_rows_move_within_their_shard_and_come_home():
    values = jnp.arange(4 * ROLLOUTS * 7).reshape(4, ROLLOUTS, 7)  # two shards of two prompts
    running_SR = np.zeros((2, 2 * ROLLOUTS), bool)
    running_SR[0, [1, 6, 8]] = running_SR[1, [0, 9]] = True
    planned = fit_rows(Rows.whole(4, ROLLOUTS, 2), running_SR, rollouts=ROLLOUTS, width=2, size=4)
    assert planned is not None
    rows, move = planned
    np.testing.assert_array_equal(rows.home_SR, [[1, NOWHERE, 6, 8], [0, NOWHERE, 9, NOWHERE]])
    np.testing.assert_array_equal(move.tile_ST, [[0, 1], [0, 1]])
    taken = take_rows(values, move.row_SR, 2)
    flat = np.asarray(values).reshape(2, 10, 7)
    np.testing.assert_array_equal(taken[:, 0], [flat[0, 1], flat[0, 6], flat[1, 0], flat[1, 9]])
    np.testing.assert_array_equal(taken[1, 1], flat[0, 8])
    np.testing.assert_array_equal(take_each(jnp.asarray([10, 11, 12, 13]), jnp.asarray([[1, 1], [0, 1]])), [11, 11, 12, 13])
    home = bring_home(values, taken + 1000, jnp.asarray(rows.home_SR))
    expected = flat.copy()
    for shard, row in ((0, 1), (0, 6), (0, 8), (1, 0), (1, 9)):
        expected[shard, row] += 1000
    np.testing.assert_array_equal(home, expected.reshape(values.shape))


def test_rows_that_do_not_fit_are_left_where_they_are():
    running_SR = np.zeros((1, 2 * ROLLOUTS), bool)
    running_SR[0, [0, 9]] = True  # two prompts need a tile each
    rows = Rows.whole(2, ROLLOUTS, 1)
    assert fit_rows(rows, running_SR, rollouts=ROLLOUTS, width=2, size=2) is None
    assert fit_rows(rows, running_SR, rollouts=ROLLOUTS, width=1, size=2) is not None


def test_long_prompts_are_shared_by_more_rows():
    spec = DecoderSpec(vocab_size=512, width=256, layers=4, q_heads=4, kv_heads=2, head_size=64, feed_forward=1024)
    widths = [default_width("cpu", spec, tokens) for tokens in (8, 32, 64, 128, 256, 4096)]
    assert widths == sorted(widths)
    assert (widths[0], widths[-1]) == (1, 8)
    assert default_width("tpu", spec, 8) == 8
