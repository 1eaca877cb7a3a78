from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from pods_jax.algorithm.losses import (
    LOSSES,
    Loss,
    Numbers,
    count_sequences,
    count_tokens,
    evaluate_loss,
    find_loss,
    join_sums,
    token_means,
    zero_sums,
)

P, M, C = 3, 5, 7
CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}
checked_loss = jaxtyped(typechecker=beartype)(evaluate_loss)
COUNTS = {"grpo": jaxtyped(typechecker=beartype)(count_sequences), "dapo": jaxtyped(typechecker=beartype)(count_tokens)}


def batch(seed=0, spread=0.3) -> dict[str, Any]:
    """A step off policy: some tokens clipped on each side, an empty slot, a group without signal, lengths from 1 to C."""
    rng = np.random.default_rng(seed)
    logp_old = -rng.gamma(1.0, size=(P, M, C))
    weight = np.ones((P, M))
    weight[0, 4] = weight[2] = 0
    return {
        "logp_PMC": jnp.asarray(logp_old + spread * rng.normal(size=(P, M, C)), jnp.float32),
        "logp_old_PMC": jnp.asarray(logp_old, jnp.float32),
        "advantage_PM": jnp.asarray(rng.normal(size=(P, M)) * weight, jnp.float32),
        "length_PM": jnp.asarray(np.resize([1, C, 4, 2, 6], (P, M)), jnp.int32),
        "weight_PM": jnp.asarray(weight, jnp.float32),
        "logp_ref_PMC": jnp.asarray(logp_old + spread * rng.normal(size=(P, M, C)), jnp.float32),
        "entropy_PMC": jnp.asarray(rng.gamma(1.0, size=(P, M, C)), jnp.float32),
    }


def run(name, data, *, beta=0.0, normaliser=None):
    """((loss, sums), gradient with respect to logp) of the data; the normaliser is the data's own unless given."""
    if normaliser is None:
        normaliser = LOSSES[name].averaging.normaliser(data["length_PM"], data["weight_PM"])
    return value_and_gradient(data, normaliser, name=name, beta=beta)


def eager_value_and_gradient(data, normaliser, *, name, beta):
    rest = {"entropy_PMC": jnp.zeros_like(data["logp_PMC"]), **data}
    del rest["logp_PMC"]

    @partial(jax.value_and_grad, has_aux=True)
    def value(logp_PMC):
        return evaluate_loss(LOSSES[name], Numbers(beta=beta, **CLIP), logp_PMC=logp_PMC, **rest, normaliser=normaliser)

    return value(data["logp_PMC"])


value_and_gradient = jax.jit(eager_value_and_gradient, static_argnames=("name", "beta"))


def reference(name, data, beta):
    """The loss in float64, one token at a time, and its gradient by the chain rule."""
    data = {key: np.asarray(value, np.float64) for key, value in data.items()}
    total, gradient, sequences, tokens = 0.0, np.zeros((P, M, C)), 0.0, 0.0
    for p, m in np.ndindex(P, M):
        length, weight, advantage = int(data["length_PM"][p, m]), data["weight_PM"][p, m], data["advantage_PM"][p, m]
        sequences, tokens = sequences + weight, tokens + weight * length
        share = weight / length if name != "dapo" else weight
        for t in range(length):
            logp, old, ref = (data[key][p, m, t] for key in ("logp_PMC", "logp_old_PMC", "logp_ref_PMC"))
            ratio = np.exp(logp - old)
            inside = ratio < 1 + CLIP["clip_high"] if advantage > 0 else ratio > 1 - CLIP["clip_low"]
            bound = 1 + CLIP["clip_high"] if advantage > 0 else 1 - CLIP["clip_low"]
            k3 = np.exp(ref - logp) - (ref - logp) - 1
            bonus = 0.01 * data["entropy_PMC"][p, m, t] if name == "grpo_entropy" else 0.0
            total += share * ((ratio if inside else bound) * advantage - beta * k3 + bonus)
            gradient[p, m, t] = share * (ratio * advantage * inside - beta * (1 - np.exp(ref - logp)))
    normaliser = sequences if name != "dapo" else tokens
    return -total / normaliser, -gradient / normaliser


def test_shapes_and_dtypes_are_as_annotated():
    data = batch()
    for name, count in COUNTS.items():
        normaliser = count(data["length_PM"], data["weight_PM"])
        loss, sums = checked_loss(LOSSES[name], Numbers(beta=0.1, **CLIP), **data, normaliser=normaliser)
        assert loss.shape == ()
        assert {x.shape for x in sums.values()} == {()}


def test_hand_worked_grpo_and_dapo():
    data = {
        "logp_PMC": jnp.log(jnp.array([[[0.5, 0.9], [0.2, 0.8]]])),
        "logp_old_PMC": jnp.log(jnp.array([[[0.4, 0.5], [0.4, 0.1]]])),
        "advantage_PM": jnp.array([[2.0, -1.0]]),
        "length_PM": jnp.array([[2, 1]]),
        "weight_PM": jnp.ones((1, 2)),
    }
    # Ratios 1.25, 1.8 (held at 1.3) and 0.5 (held at 0.8): objectives 2.5, 2.6 and -0.8.
    (grpo, stats), _ = run("grpo", data)
    np.testing.assert_allclose(grpo, -((2.5 + 2.6) / 2 - 0.8) / 2, rtol=1e-6)
    (dapo, _), _ = run("dapo", data)
    np.testing.assert_allclose(dapo, -(2.5 + 2.6 - 0.8) / 3, rtol=1e-6)
    assert [stats[f"policy/clip{side}_fraction"] for side in ("_low", "_high", "")] == [1, 1, 2]
    assert stats["tokens/trained"] == 3
    assert "policy/kl" not in stats
    np.testing.assert_allclose(stats["policy/ratio_deviation"], 0.25 + 0.8 + 0.5, rtol=1e-6)
    np.testing.assert_allclose(stats["policy/logp_gap"], np.log(1.25) + np.log(1.8) + np.log(2), rtol=1e-6)
    np.testing.assert_allclose(stats["policy/logp_gap_max"], np.log(2), rtol=1e-6)


def test_hand_worked_kl():
    data = {
        "logp_PMC": jnp.log(jnp.array([[[0.25, 0.5]]])),
        "logp_old_PMC": jnp.log(jnp.array([[[0.25, 0.5]]])),
        "advantage_PM": jnp.zeros((1, 1)),
        "length_PM": jnp.array([[2]]),
        "weight_PM": jnp.ones((1, 1)),
        "logp_ref_PMC": jnp.log(jnp.array([[[0.5, 0.5]]])),
    }
    (loss, stats), _ = run("grpo", data, beta=0.1)
    k3 = 2 - np.log(2) - 1
    np.testing.assert_allclose(loss, 0.1 * k3 / 2, rtol=1e-6)
    np.testing.assert_allclose(stats["policy/kl"], k3, rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_value_and_gradient_equal_a_float64_reference(name, beta):
    data = batch()
    (loss, stats), gradient = run(name, data, beta=beta)
    expected_loss, expected_gradient = reference(name, data, beta)
    assert stats["policy/clip_low_fraction"] > 0
    assert stats["policy/clip_high_fraction"] > 0
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_the_reference_gradient_is_the_slope_of_the_reference_loss(name):
    data, step = batch(), 1e-6
    data = {key: np.asarray(value, np.float64) for key, value in data.items()}
    _, gradient = reference(name, data, 0.04)
    for position in [(0, 1, 0), (0, 1, 6), (1, 3, 1), (1, 0, 0), (1, 2, 5)]:
        shift = np.zeros((P, M, C))
        shift[position] = step
        up, down = (reference(name, {**data, "logp_PMC": data["logp_PMC"] + s}, 0.04)[0] for s in (shift, -shift))
        np.testing.assert_allclose((up - down) / (2 * step), gradient[position], atol=1e-8)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cut", ["by group", "by rollout", "by both"])
def test_micro_batches_add_up_to_the_whole(name, cut):
    data = batch()
    (loss, stats), gradient = run(name, data, beta=0.04)
    normaliser = LOSSES[name].averaging.normaliser(data["length_PM"], data["weight_PM"])
    groups = [slice(p, p + 1) for p in range(P)] if cut != "by rollout" else [slice(None)]
    rollouts = [slice(0, 2), slice(2, 3), slice(3, 5)] if cut != "by group" else [slice(None)]
    parts, pieces = [], np.zeros((P, M, C))
    for group in groups:
        for rollout in rollouts:
            part = {key: value[group, rollout] for key, value in data.items()}
            value, pieces[group, rollout] = run(name, part, beta=0.04, normaliser=normaliser)
            parts.append(value)
    np.testing.assert_allclose(sum(value for value, _ in parts), loss, rtol=1e-6)
    np.testing.assert_allclose(pieces, gradient, atol=1e-6, rtol=1e-6)
    total = reduce(join_sums, (part for _, part in parts), zero_sums(LOSSES[name], Numbers(beta=0.04)))
    assert total.keys() == stats.keys()
    for key in stats:
        np.testing.assert_allclose(total[key], stats[key], rtol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rubbish", [jnp.nan, jnp.inf, -jnp.inf, 1e30])
def test_what_lies_beyond_the_length_or_in_untrained_slots_is_never_seen(name, rubbish):
    data = batch()
    unseen = (jnp.arange(C).reshape(1, 1, C) >= data["length_PM"][..., None]) | (data["weight_PM"] == 0)[..., None]
    spoiled = {key: jnp.where(unseen, rubbish, value) if key.endswith("PMC") else value for key, value in data.items()}
    spoiled["advantage_PM"] = jnp.where(data["weight_PM"] == 0, rubbish, data["advantage_PM"])
    (loss, stats), gradient = run(name, data, beta=0.04)
    (loss_spoiled, stats_spoiled), gradient_spoiled = run(name, spoiled, beta=0.04)
    assert loss == loss_spoiled
    np.testing.assert_array_equal(gradient, gradient_spoiled)
    np.testing.assert_array_equal(gradient_spoiled[unseen], 0)
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, stats, stats_spoiled))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("empty", ["weight_PM", "length_PM"])
def test_a_step_without_tokens_has_loss_and_gradient_zero(name, empty):
    data = batch()
    data[empty] = jnp.zeros_like(data[empty])
    (loss, stats), gradient = run(name, data, beta=0.04)
    assert loss == 0
    np.testing.assert_array_equal(gradient, jnp.zeros((P, M, C)))
    assert {float(x) for x in token_means(stats).values()} == {0.0}


def test_a_sequence_without_tokens_is_in_neither_numerator_nor_denominator():
    data = batch()
    (loss, _), _ = run("grpo", data)
    longer = {key: jnp.concatenate([value, value[:, :1]], axis=1) for key, value in data.items()}
    longer["length_PM"] = longer["length_PM"].at[:, -1].set(0)
    np.testing.assert_allclose(run("grpo", longer)[0][0], loss, rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_group_of_weight_zero_gets_no_gradient_even_from_the_kl_term(name):
    data = batch()
    _, gradient = run(name, data, beta=0.5)
    np.testing.assert_array_equal(gradient[2], 0)
    assert (gradient[0, :4, 0] != 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_loss_is_minus_the_mean_advantage_and_the_gradient_is_reinforce(name):
    data = batch(spread=0.0)
    (loss, stats), gradient = run(name, data)
    trained = np.arange(C) < np.asarray(data["length_PM"])[..., None]
    share = data["weight_PM"] / data["length_PM"] if name != "dapo" else data["weight_PM"]
    share_PMC = np.asarray(share)[..., None] * trained
    share_PMC /= share_PMC.sum()
    expected = -share_PMC * np.asarray(data["advantage_PM"])[..., None]
    bonus = 0.01 * (share_PMC * np.asarray(data["entropy_PMC"])).sum() if name == "grpo_entropy" else 0.0
    np.testing.assert_allclose(loss, expected.sum() - bonus, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-9)
    assert (
        stats["policy/ratio_deviation"],
        stats["policy/logp_gap"],
        stats["policy/clip_low_fraction"],
        stats["policy/clip_high_fraction"],
    ) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "stopped"),
    [(1.5, 1.0, True), (1.5, -1.0, False), (0.5, 1.0, False), (0.5, -1.0, True), (1.25, 1.0, False), (0.85, -1.0, False)],
)
def test_clipping_stops_the_gradient_only_where_the_ratio_has_gone_far_enough(ratio, advantage, stopped):
    data = {
        "logp_PMC": jnp.full((1, 1, 1), np.log(0.3 * ratio), jnp.float32),
        "logp_old_PMC": jnp.full((1, 1, 1), np.log(0.3), jnp.float32),
        "advantage_PM": jnp.full((1, 1), advantage),
        "length_PM": jnp.ones((1, 1), jnp.int32),
        "weight_PM": jnp.ones((1, 1)),
    }
    (_, stats), gradient = run("grpo", data)
    np.testing.assert_allclose(gradient.item(), 0 if stopped else -ratio * advantage, rtol=1e-5)
    assert stats["policy/clip_low_fraction"] + stats["policy/clip_high_fraction"] == stopped


def test_the_kl_term_needs_a_reference_only_when_beta_is_positive():
    data = batch()
    del data["logp_ref_PMC"]
    run("grpo", data)
    with pytest.raises(ValueError, match=r"beta=0.1 .*logp_ref_PMC"):
        run("grpo", data, beta=0.1)


def test_without_beta_the_reference_is_not_read():
    data = batch()
    (loss, stats), _ = run("grpo", data)
    data["logp_ref_PMC"] = jnp.full((P, M, C), jnp.nan)
    assert run("grpo", data)[0][0] == loss
    assert "policy/kl" not in stats


@pytest.mark.parametrize("name", LOSSES)
def test_jit_equals_eager(name):
    data = batch()
    normaliser = LOSSES[name].averaging.normaliser(data["length_PM"], data["weight_PM"])
    (loss, stats), gradient = eager_value_and_gradient(data, normaliser, name=name, beta=0.04)
    (loss_jit, stats_jit), gradient_jit = value_and_gradient(data, normaliser, name=name, beta=0.04)
    np.testing.assert_allclose(loss, loss_jit, rtol=1e-6)
    np.testing.assert_allclose(gradient, gradient_jit, rtol=1e-5, atol=1e-8)
    for key in stats:
        np.testing.assert_allclose(stats[key], stats_jit[key], rtol=1e-6, err_msg=key)


def test_the_entropy_bonus_has_the_gradient_of_the_entropy_and_other_losses_none():
    data = batch()
    normaliser = count_sequences(data["length_PM"], data["weight_PM"])

    def slope(loss):
        def value(entropy_PMC):
            rest = {key: x for key, x in data.items() if key != "entropy_PMC"}
            return evaluate_loss(loss, Numbers(**CLIP), entropy_PMC=entropy_PMC, **rest, normaliser=normaliser)[0]

        return np.asarray(jax.grad(value)(data["entropy_PMC"]))

    trained = (np.arange(C) < np.asarray(data["length_PM"])[..., None]) & (np.asarray(data["weight_PM"]) > 0)[..., None]
    expected = -0.5 * trained / np.asarray(data["length_PM"])[..., None] / normaliser
    np.testing.assert_allclose(slope(find_loss("grpo_entropy", ["entropy_bonus=0.5"])), expected, rtol=1e-6)
    for name in ("grpo", "dapo"):
        np.testing.assert_array_equal(slope(LOSSES[name]), 0)


def own(tokens, numbers, *, power=2.0):
    return -((tokens.logp_PMC - tokens.advantage_PM1) ** power), {
        "policy/own": tokens.logp_PMC,
        "policy/own_max": tokens.logp_PMC,
    }


def test_a_loss_of_ones_own_logs_numbers_of_its_own_and_is_averaged_over_sequences():
    data = batch()
    normaliser = count_sequences(data["length_PM"], data["weight_PM"])
    loss, sums = evaluate_loss(Loss(own), Numbers(), **data, normaliser=normaliser)
    trained = (np.arange(C) < np.asarray(data["length_PM"])[..., None]) & (np.asarray(data["weight_PM"]) > 0)[..., None]
    logp = np.asarray(data["logp_PMC"], np.float64)
    squares = np.where(trained, (logp - np.asarray(data["advantage_PM"])[..., None]) ** 2, 0).sum(-1)
    np.testing.assert_allclose(loss, (squares / np.asarray(data["length_PM"])).sum() / normaliser, rtol=1e-5)
    means = token_means(sums)
    np.testing.assert_allclose(means["policy/own"], logp[trained].mean(), rtol=1e-5)
    np.testing.assert_allclose(means["policy/own_max"], logp[trained].max(), rtol=1e-6)


def test_a_loss_may_not_take_the_name_of_a_metric_that_all_have():
    data, taken = batch(), Loss(lambda tokens, numbers: (tokens.logp_PMC, {"policy/entropy": tokens.logp_PMC}))
    with pytest.raises(ValueError, match="policy/entropy"):
        evaluate_loss(taken, Numbers(), **data, normaliser=jnp.float32(1))


def test_an_unknown_loss_or_number_is_refused_with_the_valid_names():
    with pytest.raises(ValueError, match=r"loss.name='grpp'.*mean 'grpo'.*grpo, dapo, grpo_entropy, module:function"):
        find_loss("grpp")
    with pytest.raises(ValueError, match=r"loss.options='bonus=1'.*has: entropy_bonus"):
        find_loss("grpo_entropy", ["bonus=1"])
