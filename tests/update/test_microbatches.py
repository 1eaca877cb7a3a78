import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pods_jax.devices.ladder import ladder
from pods_jax.types import KeptBatch
from pods_jax.update.microbatches import deal_rollouts, most_sizes, padding_fraction, take_micro_batch

STEPS, TILE = 20, 4
PADDED = {"completion_length": STEPS, "prompt_length": 100}


@st.composite
def batches(draw):
    """Lengths and weights of kept rollouts, shards, and a shape of micro-batches that cuts them."""
    shards, own, kept = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 3, 4]))
    prompts = shards * own
    shapes = [(groups, kept) for groups in (1, 2, 4) if own % groups == 0]
    shapes += [(1, part) for part in (1, 2) if kept % part == 0]
    numbers = st.lists(st.integers(0, STEPS), min_size=prompts * kept, max_size=prompts * kept)
    length_PM = np.array(draw(numbers)).reshape(prompts, kept)
    weight_PM = (np.array(draw(numbers)).reshape(prompts, kept) > draw(st.integers(-1, STEPS))).astype(np.float32)
    return length_PM, weight_PM, shards, draw(st.sampled_from(shapes))


@settings(deadline=None, max_examples=200)
@given(batches())
def test_every_rollout_that_is_trained_is_in_one_micro_batch_and_fits(batch):
    length_PM, weight_PM, shards, shape = batch
    prompts = len(length_PM)
    plan = deal_rollouts(length_PM, weight_PM, **PADDED, shape=shape, shards=shards, multiple=TILE, rungs=3)
    group_ISG, rollout_ISGW = np.asarray(plan.group_ISG), np.asarray(plan.rollout_ISGW)
    trained_PM = (weight_PM > 0) & (length_PM > 0)
    seen = []
    for i, s, g, w in np.argwhere(rollout_ISGW >= 0):
        assert i < plan.count
        assert group_ISG[i, s, g] >= 0
        seen.append((s * (prompts // shards) + group_ISG[i, s, g], rollout_ISGW[i, s, g, w]))
    assert len(set(seen)) == len(seen)
    assert {tuple(x) for x in np.argwhere(trained_PM)} <= set(seen)
    whole_groups = {p for p in range(prompts) if trained_PM[p].any()}
    assert {p for p, _ in seen} <= whole_groups
    tokens_IS = [[tokens_of(length_PM * (weight_PM > 0), plan, i, s) for s in range(shards)] for i in range(len(group_ISG))]
    assert np.max(tokens_IS) <= (plan.places or group_ISG.shape[2] * shape[1] * STEPS)
    blocks = math.prod(length_PM.shape) // shards // math.prod(shape)
    assert group_ISG.shape[:2] == rollout_ISGW.shape[:2] == (blocks, shards)
    assert rollout_ISGW.shape[3] == shape[1]
    padded = group_ISG.shape[2] * shape[1] * STEPS
    assert (plan.places or padded) in ladder(padded, TILE, 3)


def tokens_of(tokens_PM, plan, i, s):
    prompts = len(tokens_PM) // plan.group_ISG.shape[1]
    own = zip(plan.group_ISG[i, s], plan.rollout_ISGW[i, s], strict=True)
    return sum(int(tokens_PM[s * prompts + group, rollout]) for group, row in own for rollout in row if rollout >= 0)


def test_long_and_short_rollouts_are_dealt_alike():
    rng = np.random.default_rng(0)
    length_PM = np.minimum(np.rint(rng.lognormal(np.log(0.4 * 128) - 0.125, 0.5, (64, 16))), 128).astype(int)
    prompt_length_P = np.full(64, 32)
    wasted, padded = {}, {"completion_length": 128, "prompt_length": 32}
    for shape in [(64, 16), (8, 16), (4, 16), (1, 8)]:
        plan = deal_rollouts(length_PM, np.ones((64, 16)), **padded, shape=shape, shards=1, multiple=8, rungs=3)
        wasted[shape] = padding_fraction(plan, prompt_length_P, int(length_PM.sum()), **padded)
    assert max(wasted[shape] for shape in wasted if shape[0] > 1) < 0.15
    # Halves of one group are as long as the group happens to be; padded to the limit they would waste more than half.
    assert wasted[1, 8] < 0.4
    assert 1 - (length_PM.sum() + 64 * 32) / (64 * (32 + 16 * 128)) > 0.55


def test_groups_without_signal_leave_the_update_smaller():
    length_PM, weight_PM, padded = np.full((8, 4), 10), np.ones((8, 4)), {"completion_length": 10, "prompt_length": 50}
    weight_PM[[0, 2, 3, 5, 6, 7]] = 0
    whole = deal_rollouts(length_PM, np.ones((8, 4)), **padded, shape=(8, 4), shards=1, multiple=1, rungs=3)
    plan = deal_rollouts(length_PM, weight_PM, **padded, shape=(8, 4), shards=1, multiple=1, rungs=3)
    assert (whole.group_ISG.shape, whole.places) == ((1, 1, 8), 0)
    assert (plan.group_ISG.shape, plan.places) == ((1, 1, 2), 0)
    assert sorted(plan.group_ISG.ravel().tolist()) == [1, 4]
    micro = deal_rollouts(length_PM, weight_PM, **padded, shape=(2, 4), shards=1, multiple=1, rungs=3)
    assert (micro.group_ISG.shape, int(micro.count), micro.places) == ((4, 1, 2), 1, 0)


def test_short_prompts_are_no_reason_for_programs_of_their_own():
    length_PM, weight_PM = np.full((8, 4), 10), np.ones((8, 4))
    weight_PM[2:] = 0
    plan = deal_rollouts(
        length_PM, weight_PM, completion_length=10, prompt_length=4, shape=(8, 4), shards=1, multiple=1, rungs=1
    )
    assert (plan.group_ISG.shape, plan.places) == ((1, 1, 8), 80)


def test_one_size_packs_nothing_and_still_leaves_micro_batches_out():
    length_PM, weight_PM = np.full((8, 4), 3), np.ones((8, 4))
    weight_PM[[0, 2, 3, 5, 6]] = 0
    fixed = {"completion_length": 10, "prompt_length": 50, "shards": 1, "multiple": 1, "rungs": 0}
    whole = deal_rollouts(length_PM, weight_PM, shape=(8, 4), **fixed)
    assert (whole.group_ISG.shape, whole.places) == ((1, 1, 8), 0)
    micro = deal_rollouts(length_PM, weight_PM, shape=(2, 4), **fixed)
    assert (micro.group_ISG.shape, int(micro.count), micro.places) == ((4, 1, 2), 2, 0)
    share = padding_fraction(whole, np.full(8, 40), 36, completion_length=10, prompt_length=50)
    assert share == pytest.approx(1 - (36 + 3 * 40) / (8 * (50 + 40)))


def test_the_number_of_plans_is_bounded():
    rng, seen = np.random.default_rng(0), set()
    for _ in range(300):
        length_PM = rng.integers(1, 11, (8, 4))
        weight_PM = np.repeat(rng.random((8, 1)) < rng.random(), 4, axis=1).astype(float)
        plan = deal_rollouts(
            length_PM, weight_PM, completion_length=10, prompt_length=50, shape=(8, 4), shards=1, multiple=1, rungs=2
        )
        seen.add((plan.group_ISG.shape, plan.places))
    assert 10 < len(seen) <= most_sizes(8, True, 2) == 28


def test_padding_is_what_is_computed_in_vain():
    length_PM = np.array([[3, 5], [0, 2], [7, 1], [2, 2]])
    weight_PM = np.array([[1, 1], [0, 0], [1, 0], [1, 1]], np.float32)
    plan = deal_rollouts(
        length_PM, weight_PM, completion_length=8, prompt_length=6, shape=(2, 2), shards=2, multiple=4, rungs=3
    )
    # The first shard trains 8 tokens of one group, the second 11 of two.
    assert (plan.group_ISG.shape[2], plan.places) == (2, 12)
    prompts = 6 + 3 + 4
    share = 1 - (8 + 11 + prompts) / (2 * (2 * 6 + 12))
    assert padding_fraction(plan, np.array([6, 5, 3, 4]), 19, completion_length=8, prompt_length=6) == pytest.approx(share)


def test_a_micro_batch_holds_what_the_plan_names_and_nothing_else():
    rng, shape = np.random.default_rng(1), (4, 3)
    arrays = {name: jnp.asarray(rng.normal(size=(*shape, 5)), jnp.float32) for name in ("tokens_PMC", "logp_old_PMC")}
    numbers = {name: jnp.asarray(rng.integers(1, 6, shape)) for name in ("length_PM", "advantage_PM", "weight_PM", "index_PM")}
    kept = KeptBatch(jnp.arange(28).reshape(4, 7), jnp.asarray([3, 4, 5, 6]), **arrays, **numbers)
    group_SG, rollout_SGW = jnp.asarray([[1, -1], [1, 0]]), jnp.asarray([[[2, 0], [-1, -1]], [[1, -1], [0, 2]]])
    part = jax.jit(take_micro_batch)(kept, group_SG, rollout_SGW)
    np.testing.assert_array_equal(part.prompt_length_P[jnp.asarray([0, 2, 3])], [4, 6, 5])
    for (place, slot), (prompt, rollout) in {
        (0, 0): (1, 2),
        (0, 1): (1, 0),
        (2, 0): (3, 1),
        (3, 0): (2, 0),
        (3, 1): (2, 2),
    }.items():
        np.testing.assert_array_equal(part.prompt_PL[place], kept.prompt_PL[prompt])
        for name in (*arrays, *numbers):
            np.testing.assert_array_equal(getattr(part, name)[place, slot], getattr(kept, name)[prompt, rollout])
    np.testing.assert_array_equal(part.weight_PM == 0, [[False, False], [True, True], [False, True], [False, False]])
    np.testing.assert_array_equal(part.length_PM == 0, part.weight_PM == 0)
