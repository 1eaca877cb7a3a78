import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import jaxtyped

from pods_jax.algorithm import selection
from pods_jax.algorithm.keeping import reward_metrics
from pods_jax.algorithm.selection import RULES, Ranked, find_rule
from pods_jax.types import Group

checked_select = jax.jit(jaxtyped(typechecker=beartype)(selection.select), static_argnames=("rule", "m", "ties"))
take_kept = jaxtyped(typechecker=beartype)(selection.take_kept)
checked_choose = jaxtyped(typechecker=beartype)(selection.choose)


def select(rewards, valid, key, *, rule, **numbers):
    return checked_select(Group(rewards, valid), key, rule=RULES[rule], **numbers)


def chosen(rule, rewards, valid, key, **numbers):
    return checked_choose(Group(rewards, valid), key, rule=RULES[rule], **numbers)


KEY = jax.random.key(7)
ROWS = 48
GRID = 2.0**-10  # spacing of float32 around 1e4


def every_m(n):
    """Rows of n rewards -> the max-variance indices for each m in 1..n."""

    @jax.jit
    def run(rewards, valid, keys):
        return [jax.vmap(partial(chosen, "max_variance", m=m, ties="index"))(rewards, valid, keys) for m in range(1, n + 1)]

    return lambda rewards, valid: [
        np.asarray(index)
        for index in run(jnp.asarray(rewards, jnp.float32), jnp.asarray(valid), jax.random.split(KEY, rewards.shape[0]))
    ]


@pytest.fixture(scope="module")
def every_m_of_12():
    return every_m(12)


def best_scores(values, valid):
    """Over all subsets of the valid entries: {size: largest size * sum of squares - square of sum}. Exact for integers."""
    values = values[valid]
    subsets = (np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1
    size = subsets.sum(1)
    score = size * (subsets @ values**2) - (subsets @ values) ** 2
    return {m: score[size == m].max() for m in range(1, len(values) + 1)}


def score(values, index):
    kept = values[index[index >= 0]]
    return len(kept) * (kept**2).sum() - kept.sum() ** 2


def integer_rows(n):
    rng = np.random.default_rng(n)
    levels = np.array([1, 2, 3, 10, 1000])[np.arange(ROWS) % 5]
    return rng.integers(0, levels[:, None] + 1, size=(ROWS, n))


def assert_optimal(integers, valid, indices):
    for row, ok, *by_m in zip(integers, valid, *indices, strict=True):
        best = best_scores(row, ok)
        for index in by_m:
            kept = index[index >= 0]
            assert len(kept) == min(len(index), ok.sum())
            assert ok[kept].all()
            assert len(set(kept)) == len(kept)
            assert score(row, index) == best.get(len(kept), 0)


@pytest.mark.parametrize("n", range(1, 9))
def test_max_variance_equals_brute_force_for_every_m(n):
    integers, valid = integer_rows(n), np.ones((ROWS, n), bool)
    assert_optimal(integers, valid, every_m(n)(integers, valid))


@pytest.mark.parametrize("eligible", range(13))
def test_max_variance_equals_brute_force_with_any_number_of_invalid_rollouts(every_m_of_12, eligible):
    rng = np.random.default_rng(eligible)
    integers = integer_rows(12)
    valid = rng.permuted(np.tile(np.arange(12) < eligible, (ROWS, 1)), axis=1)
    rewards = np.where(valid, integers, rng.choice([np.nan, np.inf, -np.inf, 5e3], size=valid.shape))
    assert_optimal(integers, valid, every_m_of_12(rewards, valid))


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_max_variance_is_exact_for_a_small_spread_on_a_large_offset(every_m_of_12, offset):
    integers, valid = integer_rows(12) % 3 - 1, np.ones((ROWS, 12), bool)
    rewards = (offset + GRID * integers).astype(np.float32)
    assert len(np.unique(rewards)) == 3
    assert_optimal(integers, valid, every_m_of_12(rewards, valid))


def test_max_variance_ignores_shift_and_scale_of_integers(every_m_of_12):
    integers, valid = integer_rows(12), np.ones((ROWS, 12), bool)
    plain = every_m_of_12(integers, valid)
    for a, b in zip(plain, every_m_of_12(integers * 2.0**-60, valid), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(plain, every_m_of_12(integers * 2.0**90, valid), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(plain, every_m_of_12(integers - 4096, valid), strict=True):
        np.testing.assert_array_equal(a, b)


finite = st.floats(-1e6, 1e6, width=32)
tied = st.sampled_from([0.0, -0.0, 0.1, 0.125, 1.0, 1.1, -2.0])
offset = st.integers(-40, 40).map(lambda k: 1e4 + k * GRID)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.one_of(*(st.lists(kind, min_size=1, max_size=12) for kind in (finite, tied, offset, st.one_of(finite, offset)))))
def test_max_variance_attains_the_largest_variance_of_arbitrary_rewards(every_m_of_12, rewards):
    rewards = np.array(rewards + [np.nan] * (12 - len(rewards)), np.float32)
    valid = np.isfinite(rewards)
    values = rewards.astype(np.float64) - rewards[0].astype(np.float64)
    best = best_scores(values, valid)
    for index in every_m_of_12(np.tile(rewards, (ROWS, 1)), np.ones((ROWS, 12), bool)):
        kept = index[0][index[0] >= 0]
        assert len(kept) == min(len(index[0]), valid.sum())
        assert score(values, kept) >= best[len(kept)] * (1 - 1e-5)


@pytest.mark.parametrize("ties", ["random", "index"])
def test_max_variance_keeps_half_correct_of_128_for_every_count_of_correct_answers(ties):
    n, m, counts = 128, 32, np.arange(129)
    rewards = np.random.default_rng(0).permuted((np.arange(n) < counts[:, None]).astype(np.float32), axis=1)
    keys = jax.random.split(KEY, len(counts))
    index = jax.jit(jax.vmap(partial(chosen, "max_variance", m=m, ties=ties)))(rewards, np.ones(rewards.shape, bool), keys)
    correct = np.take_along_axis(rewards, np.asarray(index), axis=1).sum(1)
    np.testing.assert_array_equal(correct, np.clip(m // 2, m - (n - counts), counts))


@pytest.mark.parametrize("m", [1, 2, 5, 7, 12])
def test_binary_rewards_keep_half_correct_or_as_near_as_the_counts_allow(every_m_of_12, m):
    counts = np.resize(np.arange(13), ROWS)
    rewards = (np.arange(12) < counts[:, None]).astype(np.float32)
    index = every_m_of_12(rewards, np.ones(rewards.shape, bool))[m - 1]
    correct = np.take_along_axis(rewards, index, axis=1).sum(1)
    lower, upper = (np.clip(half, np.maximum(0, m - (12 - counts)), counts) for half in (m // 2, -(-m // 2)))
    assert ((correct == np.clip(lower, None, m)) | (correct == np.clip(upper, None, m))).all()


def test_percentile_holds_the_midpoint_quantiles():
    rewards = jnp.array([5, 0, 3, 1, 7, 2, 6, 4], jnp.float32)
    choose = jax.jit(partial(chosen, "percentile", rewards, jnp.ones(8, bool), KEY), static_argnames="m")
    np.testing.assert_array_equal(rewards[choose(m=4)], [1, 3, 5, 7])
    np.testing.assert_array_equal(rewards[choose(m=1)], [4])
    np.testing.assert_array_equal(rewards[choose(m=8)], np.arange(8))
    np.testing.assert_array_equal(rewards[choose(m=3)], [1, 4, 6])


def test_max_reward_keeps_the_highest_best_first():
    rewards, valid = jnp.array([2, jnp.nan, 9, 4, jnp.inf, 7.0]), jnp.array([1, 1, 0, 1, 1, 1], bool)
    np.testing.assert_array_equal(chosen("max_reward", rewards, valid, KEY, m=2), [5, 3])
    np.testing.assert_array_equal(chosen("max_reward", rewards, valid, KEY, m=5), [5, 3, 0, -1, -1])


def test_all_keeps_every_eligible_rollout_whatever_m():
    rewards, valid = jnp.array([2, jnp.nan, 9, 4.0]), jnp.array([1, 1, 0, 1], bool)
    for m in (1, 4):
        np.testing.assert_array_equal(chosen("all", rewards, valid, KEY, m=m), [0, 3, -1, -1])


def test_max_variance_keeps_an_extreme_of_each_side():
    rewards = jnp.array([0.3, 0.9, 0.2, 0.95, 0.5, 0.55])
    index = chosen("max_variance", rewards, jnp.ones(6, bool), KEY, m=4)
    np.testing.assert_array_equal(index, [2, 0, 1, 3])


# Every rule of the table.


def mixed_groups():
    """Groups of 11 with ties, invalid rollouts, NaN and infinities, and from 0 to 11 eligible ones."""
    rng = np.random.default_rng(3)
    rewards = rng.integers(0, 4, size=(13, 11)) / 4 + rng.normal(size=(13, 11)) * (np.arange(13) % 2)[:, None]
    valid = rng.random((13, 11)) < np.linspace(1, 0, 13)[:, None]
    rewards = np.where(rng.random((13, 11)) < 0.1, rng.choice([np.nan, np.inf, -np.inf], size=(13, 11)), rewards)
    return jnp.asarray(rewards, jnp.float32), jnp.asarray(valid)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ties", ["random", "index"])
def test_kept_rollouts_are_distinct_and_eligible_and_slots_are_empty_only_when_short(rule, ties):
    rewards, valid = mixed_groups()
    index_PM = select(rewards, valid, KEY, rule=rule, m=5, ties=ties)
    eligible = np.asarray(valid) & np.isfinite(np.asarray(rewards))
    assert eligible.sum(1).min() == 0
    assert eligible.sum(1).max() > 5
    assert index_PM.dtype == jnp.int32
    slots = 11 if rule == "all" else 5
    assert index_PM.shape == (13, slots)
    for index, ok in zip(np.asarray(index_PM), eligible, strict=True):
        kept = min(slots, ok.sum())
        assert (index[kept:] == -1).all()
        assert len(set(index[:kept])) == kept
        assert ok[index[:kept]].all()


@pytest.mark.parametrize("rule", RULES)
def test_jit_equals_eager_and_vmap_equals_loop(rule):
    rewards, valid = mixed_groups()
    whole = select(rewards, valid, KEY, rule=rule, m=3)
    np.testing.assert_array_equal(whole, selection.select(Group(rewards, valid), KEY, rule=RULES[rule], m=3))
    one = jax.jit(partial(chosen, rule, m=3))
    loop = [one(rewards[p], valid[p], jax.random.fold_in(KEY, p)) for p in range(13)]
    np.testing.assert_array_equal(whole, jnp.stack(loop))


@pytest.mark.parametrize("rule", RULES)
def test_choice_is_a_function_of_the_key(rule):
    rewards, valid = jnp.ones((40, 9)), jnp.ones((40, 9), bool)

    def choose(key):
        return select(rewards, valid, key, rule=rule, m=3)

    np.testing.assert_array_equal(choose(KEY), choose(KEY))
    if rule == "all":
        return
    assert (choose(KEY) != choose(jax.random.key(8))).any()
    assert len({tuple(sorted(row)) for row in np.asarray(choose(KEY)).tolist()}) > 10


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "random"])
def test_kept_rewards_do_not_depend_on_the_order_of_rollouts(rule):
    rewards, valid = mixed_groups()
    order = np.random.default_rng(5).permutation(11)
    kept = []
    for r, v in ((rewards, valid), (rewards[:, order], valid[:, order])):
        index = np.asarray(select(r, v, KEY, rule=rule, m=4, ties="index"))
        kept.append(np.sort(np.where(index >= 0, np.take_along_axis(np.asarray(r), index.clip(0), axis=1), 99), axis=1))
    np.testing.assert_array_equal(*kept)


@pytest.mark.parametrize("rule", ["max_variance", "percentile", "max_reward"])
def test_ties_by_index_do_not_look_at_the_key(rule):
    rewards, valid = mixed_groups()
    a, b = (select(rewards, valid, jax.random.key(seed), rule=rule, m=4, ties="index") for seed in (1, 2))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "all"])
def test_equal_rewards_give_every_subset_alike(rule):
    draws = 6000
    index = select(jnp.ones((draws, 6)), jnp.ones((draws, 6), bool), KEY, rule=rule, m=2)
    seen = np.bincount(np.sort(np.asarray(index), axis=1) @ [6, 1], minlength=36)
    expected = draws / 15
    assert np.count_nonzero(seen) == 15
    assert ((seen[seen > 0] - expected) ** 2 / expected).sum() < 36.1  # 99.9 % of chi-square, 14 degrees of freedom


def test_binary_rewards_give_every_correct_and_every_wrong_rollout_the_same_chance():
    draws, rewards = 6000, jnp.array([0, 1, 0, 1, 1, 0, 0.0])
    index = select(jnp.tile(rewards, (draws, 1)), jnp.ones((draws, 7), bool), KEY, rule="max_variance", m=4)
    seen = np.bincount(np.asarray(index).ravel(), minlength=7)
    for side, limit in ((rewards == 1, 13.8), (rewards == 0, 16.3)):  # 99.9 % of chi-square, 2 and 3 degrees of freedom
        expected = 2 * draws / side.sum()
        assert ((seen[side] - expected) ** 2 / expected).sum() < limit


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("m", [0, 4, -1])
def test_impossible_m_is_refused_with_both_numbers(rule, m):
    call = partial(chosen, rule, jnp.zeros(3), jnp.ones(3, bool), KEY, m=m)
    if rule == "all":
        assert call().shape == (3,)
    else:
        with pytest.raises(ValueError, match=rf"n=3 .*m={m}"):
            call()


@pytest.mark.parametrize("rule", RULES)
def test_unknown_ties_are_refused_with_the_valid_names(rule):
    with pytest.raises(ValueError, match=r"'completion'.*random, index"):
        chosen(rule, jnp.zeros(3), jnp.ones(3, bool), KEY, m=2, ties="completion")


def test_unknown_rule_is_refused_with_the_valid_names():
    with pytest.raises(
        ValueError, match=r"'max_varience'.*mean 'max_variance'.*max_variance, random, percentile, max_reward, all"
    ):
        find_rule("max_varience")


# The lifted form.


def variances(rewards, valid, index):
    """Variance of all and of the kept rewards, group by group."""
    groups = [Group(rewards[p : p + 1], valid[p : p + 1]) for p in range(len(rewards))]
    metrics = [reward_metrics(group, index[p : p + 1]) for p, group in enumerate(groups)]
    return [[float(m[f"selection/variance_{name}"]) for m in metrics] for name in ("all", "kept")]


def test_variances_are_those_of_numpy_even_far_from_zero():
    rng = np.random.default_rng(2)
    rewards = (1e4 + GRID * rng.integers(-3, 4, size=(5, 17))).astype(np.float32)
    valid = rng.random((5, 17)) < 0.8
    index = select(jnp.asarray(rewards), jnp.asarray(valid), KEY, rule="max_variance", m=6)
    of_all, of_kept = variances(jnp.asarray(rewards), jnp.asarray(valid), index)
    exact = rewards.astype(np.float64)
    np.testing.assert_allclose(of_all, [r[v].var() for r, v in zip(exact, valid, strict=True)], rtol=1e-5)
    np.testing.assert_allclose(of_kept, np.take_along_axis(exact, np.asarray(index), 1).var(1), rtol=1e-5)


def test_variances_of_groups_without_eligible_rollouts_are_zero():
    rewards, valid = jnp.full((2, 3), jnp.nan), jnp.ones((2, 3), bool)
    of_all, of_kept = variances(rewards, valid, select(rewards, valid, KEY, rule="max_variance", m=2))
    np.testing.assert_array_equal(of_all, 0)
    np.testing.assert_array_equal(of_kept, 0)


# Own rules.


def longest(group, key, *, m, tie_weight=0.0):
    del key
    return jnp.argsort(-(group.length_N + tie_weight * group.parts["correct"]))[:m]


def test_a_rule_of_ones_own_sees_the_whole_group():
    groups = Group(
        jnp.zeros((2, 4)), jnp.ones((2, 4), bool), {"correct": jnp.array([[0, 1, 0, 0.0], [0, 0, 0, 1]])},
        length_N=jnp.array([[3, 9, 5, 9], [1, 2, 3, 4]]),
    )  # fmt: skip
    np.testing.assert_array_equal(selection.select(groups, KEY, rule=longest, m=2), [[1, 3], [3, 2]])
    weighted = partial(longest, tie_weight=-9.0)
    np.testing.assert_array_equal(selection.select(groups, KEY, rule=weighted, m=2), [[3, 2], [2, 1]])


def test_what_a_rule_of_ones_own_may_not_keep_is_an_empty_slot():
    def careless(group, key, *, m):
        return jnp.array([2, 0, 2, 7, -1, 1])

    group = Group(jnp.array([1.0, jnp.nan, 3.0, 4.0]), jnp.array([1, 1, 1, 0], bool))
    with pytest.raises(ValueError, match=r"n=4 rollouts cannot supply m=6"):
        selection.choose(group, KEY, rule=careless, m=6)
    wide = Group(jnp.pad(group.rewards_N, (0, 2)), jnp.pad(group.valid_N, (0, 2)))
    np.testing.assert_array_equal(selection.choose(wide, KEY, rule=careless, m=6), [2, 0, -1, -1, -1, -1])


@pytest.mark.parametrize("wrong", [lambda group, key, *, m: jnp.zeros(m), lambda group, key, *, m: jnp.arange(m + 1)])
def test_a_rule_of_ones_own_that_returns_no_m_integers_is_refused(wrong):
    with pytest.raises(ValueError, match="expected 2 integers"):
        selection.choose(Group(jnp.zeros(4), jnp.ones(4, bool)), KEY, rule=wrong, m=2)


def test_a_ranked_rule_of_ones_own_is_sorted_by_what_it_asks_for():
    lowest = Ranked(lambda ranks, *, m: ranks.index_N[:m], value=lambda group: jnp.asarray(group.length_N, jnp.float32))
    group = Group(jnp.zeros(4), jnp.array([1, 1, 0, 1], bool), length_N=jnp.array([5, 2, 1, 3]))
    np.testing.assert_array_equal(selection.choose(group, KEY, rule=lowest, m=4), [1, 3, 0, -1])


def test_take_kept_follows_the_index_within_each_group():
    tokens = jnp.arange(2 * 5 * 3).reshape(2, 5, 3)
    kept = take_kept(tokens, jnp.array([[4, 0], [2, -1]]))
    np.testing.assert_array_equal(kept[0], tokens[0, jnp.array([4, 0])])
    np.testing.assert_array_equal(kept[1, 0], tokens[1, 2])
    assert kept.shape == (2, 2, 3)


def test_max_variance_compiles_without_gather_loop_or_quadratic_array():
    n, m, groups = 97, 31, 3
    rule = jax.vmap(partial(chosen, "max_variance", m=m))
    arguments = jnp.zeros((groups, n)), jnp.ones((groups, n), bool), jax.random.split(KEY, groups)
    text = jax.jit(rule).lower(*arguments).as_text()
    assert "stablehlo.sort" in text
    assert text.count("stablehlo.sort") == 1
    for operation in ("gather", "scatter", "dynamic_slice", "dot_general"):
        assert f"stablehlo.{operation}" not in text
    shapes = re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
    assert max(np.prod([int(size) for size in shape.split("x")[:-1]]) for shape in shapes) < 4 * groups * n


def test_selecting_needs_no_communication_when_groups_are_sharded():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    rewards, valid = jax.random.normal(KEY, (16, 23)), jnp.ones((16, 23), bool)
    run = jax.jit(lambda rewards, valid, key: selection.select(Group(rewards, valid), key, rule=RULES["max_variance"], m=7))
    sharded = jax.device_put((rewards, valid), sharding)
    text = str(run.lower(*sharded, KEY).compile().as_text())
    assert "sort" in text
    for operation in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert operation not in text
    index_PM = run(*sharded, KEY)
    assert index_PM.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(index_PM, run(rewards, valid, KEY))


# The forms for different backends.

SORTS = [selection.sort_pairs, selection.sort_joined, selection.sort_by_backend]
awkward = st.sampled_from([0.0, -0.0, 1e-40, 0.1, 0.125, 1.0, -1.0, 3e38, -3e38, np.inf, -np.inf, np.nan])
groups = st.lists(st.lists(st.one_of(awkward, finite, st.just(1.0)), min_size=11, max_size=11), min_size=3, max_size=3).map(
    lambda rows: np.array(rows, np.float32)
)
masks = st.lists(st.booleans(), min_size=33, max_size=33).map(lambda flags: np.array(flags).reshape(3, 11))


@pytest.fixture(scope="module")
def forms():
    """Rule -> one compiled selection for each way of sorting, ties at random."""

    def choose(rule, sort, rewards, valid, key):
        return selection.select(Group(rewards, valid), key, rule=RULES[rule], m=4, sort=sort)

    sorts = (selection.sort_pairs, selection.sort_joined)
    return {rule: [jax.jit(partial(choose, rule, sort)) for sort in sorts] for rule in RULES if rule != "all"}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(groups, masks, st.integers(0, 2**32 - 1))
def test_every_way_of_sorting_keeps_the_same_rollouts_in_the_same_slots(forms, rewards, valid, seed):
    for compiled in forms.values():
        by_pairs, joined = (np.asarray(choose(rewards, valid, jax.random.key(seed))) for choose in compiled)
        np.testing.assert_array_equal(by_pairs, joined)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**32 - 1)), min_size=9, max_size=9, unique=True))
def test_pairs_are_sorted_as_python_sorts_them(pairs):
    high, low = jnp.asarray([a for a, _ in pairs], jnp.int32), jnp.asarray([b for _, b in pairs], jnp.uint32)
    for sort in SORTS:
        result = jax.jit(sort)(high, low)
        assert [x.dtype for x in result] == [jnp.int32, jnp.uint32]
        assert list(zip(*(np.asarray(x).tolist() for x in result), strict=True)) == sorted(pairs)


@pytest.mark.parametrize("sort", SORTS)
def test_zeros_of_both_signs_tie_and_infinities_come_last(sort):
    rewards, valid = jnp.array([0.0, jnp.inf, -0.0, 0.0, -1.0, -jnp.inf, -0.0, 2.0]), jnp.ones(8, bool)
    kept = partial(chosen, "max_reward", rewards, valid, sort=sort)
    np.testing.assert_array_equal(kept(KEY, m=8, ties="index"), [7, 0, 2, 3, 6, 4, -1, -1])
    orders = {tuple(np.asarray(kept(jax.random.key(seed), m=8))[1:5].tolist()) for seed in range(40)}
    assert len(orders) > 15


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.bfloat16, jnp.bool_])
def test_both_ways_of_taking_agree_whatever_the_others_hold(dtype):
    values = jnp.array([jnp.nan, 3.0, jnp.inf, -2.0, 0.0], jnp.float32).astype(dtype)
    index = jnp.array([3, 1, 1, 4])
    expected = np.asarray(values)[np.asarray(index)]
    for take in (selection.take_by_gather, selection.take_by_comparison, selection.take_by_backend):
        taken = jax.jit(take)(values, index)
        assert taken.dtype == dtype
        np.testing.assert_array_equal(taken, expected)


@pytest.mark.parametrize("rule", RULES)
def test_a_tpu_sorts_two_operands_and_gathers_nothing_and_a_cpu_sorts_one(rule):
    shapes = jax.ShapeDtypeStruct((16, 24), jnp.float32), jax.ShapeDtypeStruct((16, 24), jnp.bool_), KEY
    run = jax.jit(lambda rewards, valid, key: selection.select(Group(rewards, valid), key, rule=RULES[rule], m=7))
    traced = run.trace(*shapes)
    tpu, cpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("tpu", "cpu"))
    for operation in ("gather", "scatter", "dynamic_slice", "dot_general"):
        assert f"stablehlo.{operation}" not in tpu
    operands = [re.findall(r'"stablehlo.sort"\((.*?)\)', text) for text in (tpu, cpu)]
    assert [[len(each.split(",")) for each in sorts] for sorts in operands] == [[2], [1]]
