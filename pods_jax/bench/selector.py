"""Microseconds of one selection over P groups of n rewards, for each rule, against NumPy.

Each rule's jitted form is measured in turns with the same rule in float64 NumPy, once over all groups together and once in a
Python loop over groups, and its kept rewards must have the variance of theirs. NumPy's
rules keep rewards without indices and break no ties at random, so they do less. "random" has no right answer: its indices must
be distinct.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from pods_jax.algorithm.selection import RULES, lookup_rule, select
from pods_jax.bench.measure import WHOLE, alternate, print_table, warm_up
from pods_jax.config import ConfigError
from pods_jax.fields import Checked, Count, Seed

# Each sample repeats the call for about so long, so that the clock's resolution does not matter.
SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class SelectorOptions(Checked):
    """Which sizes and rules are measured, and how often."""

    prompts: list[Count] = field(default_factory=lambda: [1, 32, 256, 1024])
    """Numbers of groups (P)."""
    n: list[Count] = field(default_factory=lambda: [16, 64, 256, 1024])
    """Rollouts of each group (N)."""
    ratio: Count = 4
    """n / m: of n rollouts n // ratio are kept, at least one."""
    rules: list[str] = field(default_factory=lambda: list(RULES))
    """Rules to measure."""
    repeats: Count = 5
    """Measured samples of each after the warm-up."""
    seed: Seed = 0
    """Seed of rewards and ties."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("prompts", "n", "rules"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty; at least one is needed")
        for rule in self.rules:
            if rule not in RULES:
                raise ConfigError(f"rules={rule} is unknown; the valid names are {', '.join(RULES)}")


def numpy_max_variance(rewards_PN: np.ndarray, m: int) -> np.ndarray:
    """Kept rewards of the best of all m+1 splits, scored by sums of rewards and of squares."""
    n = rewards_PN.shape[1]
    sorted_PN = np.sort(rewards_PN - rewards_PN.mean(axis=1, keepdims=True), axis=1)
    sums, squares = (np.pad(np.cumsum(x, axis=1), ((0, 0), (1, 0))) for x in (sorted_PN, sorted_PN**2))
    low = m - np.arange(m + 1)
    high = n - np.arange(m + 1)
    total, square = (x[:, low] + x[:, -1:] - x[:, high] for x in (sums, squares))
    best = np.argmax(square / m - (total / m) ** 2, axis=1)[:, None]
    return np.where(np.arange(m) < m - best, sorted_PN[:, :m], sorted_PN[:, n - m :])


def numpy_percentile(rewards_PN: np.ndarray, m: int) -> np.ndarray:
    """Kept rewards at the ranks of the quantiles (j + 1/2) / m."""
    return np.sort(rewards_PN, axis=1)[:, (2 * np.arange(m) + 1) * rewards_PN.shape[1] // (2 * m)]


def numpy_max_reward(rewards_PN: np.ndarray, m: int) -> np.ndarray:
    """The m highest rewards."""
    return np.sort(rewards_PN, axis=1)[:, rewards_PN.shape[1] - m :]


REFERENCES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "max_variance": numpy_max_variance,
    "percentile": numpy_percentile,
    "max_reward": numpy_max_reward,
    "all": lambda rewards_PN, m: rewards_PN,
}


def run(options: SelectorOptions) -> dict[str, Any]:
    """Measures, prints the table, and returns the result.

    Raises:
        RuntimeError: a rule's kept rewards do not have the reference's variance, or an index is kept twice.
    """
    cases = [_case(options, rule, prompts, n) for rule in options.rules for prompts in options.prompts for n in options.n]
    print_table(
        f"selection of n // {options.ratio} of n, microseconds a call, median of {options.repeats}",
        ("rule", "P", "n", "m", "jitted", "NumPy", "NumPy loop", "compile s"),
        [
            [
                case["rule"],
                *(str(case[key]) for key in ("prompts", "n", "m")),
                *("-" if case[key] is None else f"{case[key]:,.1f}" for key in ("jitted_us", "numpy_us", "loop_us")),
                f"{case['compile_seconds']:.2f}",
            ]
            for case in cases
        ],
    )
    return {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "agree": True, "cases": cases}


def _case(options: SelectorOptions, rule: str, prompts: int, n: int) -> dict[str, Any]:
    m = n if lookup_rule(rule) is RULES["all"] else max(1, n // options.ratio)
    rng = np.random.default_rng(options.seed)
    # Rewards in steps of a tenth: ties, as real rewards have, and sums that float32 holds closely.
    rewards_PN = np.round(rng.random((prompts, n)), 1).astype(np.float32)
    arguments = jax.device_put((rewards_PN, np.ones((prompts, n), bool), jax.random.key(options.seed)))
    start = time.perf_counter()
    choose = jax.jit(partial(select, rule=rule, m=m)).lower(*arguments).compile()
    compile_seconds = time.perf_counter() - start
    _check(rule, rewards_PN, m, np.asarray(choose(*arguments).index_PM))
    calls: dict[str, Callable[[], Any]] = {"jitted": lambda: choose(*arguments).index_PM}
    if rule in REFERENCES:
        reference, exact_PN = REFERENCES[rule], rewards_PN.astype(np.float64)
        calls["numpy"] = lambda: reference(exact_PN, m)
        calls["loop"] = lambda: [reference(row[None], m) for row in exact_PN]
    counts = {name: _calls_in_a_sample(call) for name, call in calls.items()}
    runs = {name: partial(_repeat, call, counts[name]) for name, call in calls.items()}
    warm_up(runs)
    spreads = alternate(runs, options.repeats)
    microseconds = {name: spreads[name][WHOLE].seconds / counts[name] * 1e6 for name in calls}
    return {
        "rule": rule,
        "prompts": prompts,
        "n": n,
        "m": m,
        "jitted_us": microseconds["jitted"],
        "jitted_cpu_us": spreads["jitted"][WHOLE].cpu_seconds / counts["jitted"] * 1e6,
        "numpy_us": microseconds.get("numpy"),
        "loop_us": microseconds.get("loop"),
        "compile_seconds": compile_seconds,
    }


def _check(rule: str, rewards_PN: np.ndarray, m: int, index_PM: np.ndarray) -> None:
    where = f"{rule}, P={rewards_PN.shape[0]}, n={rewards_PN.shape[1]}, m={m}"
    ordered = np.sort(index_PM, axis=1)
    if (ordered[:, :1] < 0).any() or (np.diff(ordered, axis=1) <= 0).any():
        raise RuntimeError(f"{where}: a rollout is kept twice, or a slot is empty")
    if rule in REFERENCES:
        exact_PN = rewards_PN.astype(np.float64)
        kept, expected = np.take_along_axis(exact_PN, index_PM, axis=1), REFERENCES[rule](exact_PN, m)
        worst = np.abs(kept.var(axis=1) - expected.var(axis=1)).max()
        if worst > 1e-6:
            raise RuntimeError(f"{where}: the variance of the kept rewards is off by {worst:.2g}")


def _calls_in_a_sample(call: Callable[[], Any]) -> int:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return max(1, int(SAMPLE_SECONDS / max(1e-6, time.perf_counter() - start)))


def _repeat(call: Callable[[], Any], count: int, watch: Any) -> None:
    del watch
    for _ in range(count):
        jax.block_until_ready(call())
