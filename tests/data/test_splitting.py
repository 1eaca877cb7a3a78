from pods_jax.data.splitting import HELD_OUT_SHARE, is_held_out


def test_the_partition_does_not_change_between_versions():
    # Frozen: moving it would put questions that an older model was trained on among the held-out ones.
    assert [number for number in range(40) if is_held_out(f"{number} + 1?")] == [3, 25, 29]


def test_the_held_out_share_is_what_is_documented():
    share = sum(is_held_out(str(number)) for number in range(4000)) / 4000
    assert abs(share - HELD_OUT_SHARE) < 0.02
