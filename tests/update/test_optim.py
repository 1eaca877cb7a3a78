import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pods_jax.config.sections import OptimizerConfig
from pods_jax.update.optim import SCHEDULES, decayed, make_optimizer, make_schedule

PEAK, STEPS, WARMUP, FINAL = 2e-3, 30, 4, 0.1
CONFIG = OptimizerConfig(
    learning_rate=PEAK, schedule="constant", warmup_steps=WARMUP, final_fraction=FINAL, weight_decay=0.0, clip_norm=0.0
)
PARAMS: dict[str, Any] = {
    "embed": jnp.ones((3, 2)),
    "final_norm": jnp.ones(2),
    "layers": {
        "q": jnp.ones((2, 2)),
        "q_bias": jnp.ones(2),
        "q_norm": jnp.ones(2),
        "input_norm": jnp.ones(2),
        "down": jnp.ones(3),
    },
}


def rates(**changes):
    schedule: Any = make_schedule(dataclasses.replace(CONFIG, **changes), STEPS)
    return np.array([float(schedule(step)) for step in range(STEPS + 1)])


def one_step(config, gradient, params: Any = PARAMS) -> Any:
    """What the first step adds to the parameters, as the learner scales it."""
    optimizer, schedule = make_optimizer(config), make_schedule(config, STEPS)
    rate: Any = schedule(0)
    direction, _ = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    return jax.tree.map(lambda x: -rate * x, direction)


# --- schedules


@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_rises_linearly_to_the_peak_and_its_first_step_already_moves(name):
    np.testing.assert_allclose(rates(schedule=name)[: WARMUP + 1], PEAK * np.array([0.25, 0.5, 0.75, 1.0, 1.0]), rtol=1e-5)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1])
def test_without_warmup_or_with_one_step_of_it_the_first_step_has_the_peak(name, warmup):
    assert rates(schedule=name, warmup_steps=warmup)[0] == pytest.approx(PEAK)


@pytest.mark.parametrize(
    ("name", "middle", "end"),
    [("constant", 1.0, 1.0), ("linear", (1 + FINAL) / 2, FINAL), ("cosine", (1 + FINAL) / 2, FINAL)],
)
def test_schedules_pass_their_middle_and_reach_their_final_fraction_when_the_steps_are_done(name, middle, end):
    values = rates(schedule=name)
    assert values[(WARMUP + STEPS) // 2] == pytest.approx(PEAK * middle, rel=1e-5)
    assert values[STEPS] == pytest.approx(PEAK * end, rel=1e-5)
    assert (np.diff(values[WARMUP:]) <= 0).all()


def test_cosine_and_linear_follow_their_formulas():
    share = (np.arange(STEPS + 1) - WARMUP)[WARMUP:] / (STEPS - WARMUP)
    np.testing.assert_allclose(rates(schedule="linear")[WARMUP:], PEAK * (1 + (FINAL - 1) * share), rtol=1e-5)
    cosine = PEAK * (FINAL + (1 - FINAL) * (1 + np.cos(math.pi * share)) / 2)
    np.testing.assert_allclose(rates(schedule="cosine")[WARMUP:], cosine, rtol=1e-5)


def test_the_last_step_still_learns_when_the_schedule_ends_at_zero():
    for name in SCHEDULES:
        assert rates(schedule=name, final_fraction=0.0)[STEPS - 1] > 0


def test_every_schedule_of_the_configuration_is_in_the_table():
    for name in ("constant", "linear", "cosine"):
        assert name in SCHEDULES
        OptimizerConfig(schedule=name)


def test_the_direction_of_a_constant_gradient_has_length_one():
    optimizer, params = make_optimizer(CONFIG), {"w": jnp.float32(0.0)}
    state = optimizer.init(params)
    for _ in range(STEPS):
        direction: Any
        direction, state = optimizer.update({"w": jnp.float32(1.0)}, state, params)
        np.testing.assert_allclose(direction["w"], 1.0, rtol=1e-4)


def test_an_unknown_schedule_is_refused_with_the_valid_names():
    with pytest.raises(ValueError, match=r"optimizer.schedule='cosin'.*mean 'cosine'.*constant, linear, cosine"):
        make_schedule(dataclasses.replace(CONFIG, schedule="cosin"), STEPS)


# --- decay and clipping


def test_norms_and_biases_are_not_decayed():
    assert decayed(PARAMS) == {
        "embed": True,
        "final_norm": False,
        "layers": {"q": True, "q_bias": False, "q_norm": False, "input_norm": False, "down": True},
    }


def test_decay_is_decoupled_from_the_gradient():
    updates = one_step(dataclasses.replace(CONFIG, weight_decay=0.5), jax.tree.map(jnp.zeros_like, PARAMS))
    rate = PEAK / WARMUP
    expected = jax.tree.map(lambda p, decays: -rate * 0.5 * p * decays, PARAMS, decayed(PARAMS))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, expected)


def test_the_optimizer_is_adamw_by_its_formula():
    config = dataclasses.replace(CONFIG, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.1)
    optimizer = make_optimizer(config)
    params: Any = {"w": jnp.asarray([1.0, -2.0, 0.5])}
    rng = np.random.default_rng(0)
    expected, mean, square = np.asarray(params["w"], np.float64), np.zeros(3), np.zeros(3)
    state = optimizer.init(params)
    for step in range(6):
        gradient = rng.normal(size=3).astype(np.float32)
        direction: Any
        direction, state = optimizer.update({"w": jnp.asarray(gradient)}, state, params)
        params = {"w": params["w"] - rates()[step] * direction["w"]}
        mean, square = 0.8 * mean + 0.2 * gradient, 0.95 * square + 0.05 * gradient.astype(np.float64) ** 2
        exact = mean / (1 - 0.8 ** (step + 1)) / (np.sqrt(square / (1 - 0.95 ** (step + 1))) + 1e-3)
        expected = expected - rates()[step] * (exact + 0.1 * expected)
    np.testing.assert_allclose(params["w"], expected, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_gradients_are_clipped_to_the_global_norm_of_all_parameters(scale):
    # An epsilon far above the gradient makes Adam's first step proportional to it.
    config = dataclasses.replace(CONFIG, eps=1e6)
    gradient = jax.tree.map(lambda p: scale * p, PARAMS)
    norm = math.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradient)))
    free = one_step(config, gradient)
    clipped = one_step(dataclasses.replace(config, clip_norm=0.5), gradient)
    factor = min(1.0, 0.5 / norm)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, factor * b, rtol=2e-3), clipped, free)
