"""Microseconds of one selection over P groups of n rewards, for each rule and each way of computing it.

"ours" is what a step calls. Beside it stand its two ways of sorting ("pairs": one sort of two operands, as on TPUs and GPUs;
"joined": one sort of 64-bit integers, as on CPUs), "argsort" and gathers, "top_k" where that suffices (it breaks no ties at
random, and does less), and NumPy, once over all groups together and once in a Python loop over groups. All are measured in
turns and must agree: every way of sorting keeps the same indices, the others rewards of the same variance. "random" has no
right answer: its indices must be distinct.

With --topology nothing runs: the TPU compiler (libtpu; no TPU is needed) compiles each and gives its own estimate of the time.
"""

import importlib.util
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from pods_jax.algorithm import selection
from pods_jax.algorithm.selection import RULES, Pairs, Sort, high_slots, select
from pods_jax.bench.measure import WHOLE, Spread, alternate, print_table, warm_up
from pods_jax.bench.tpu_check import LIBTPU_ENVIRONMENT
from pods_jax.config.fields import Checked, ConfigError, Count, Seed
from pods_jax.types import Group

# Each sample repeats the call for about so long, so that the clock's resolution does not matter.
SAMPLE_SECONDS = 0.02
OURS = "ours"


@dataclass(frozen=True)
class SelectorOptions(Checked):
    """Which sizes and rules are measured, and how often."""

    prompts: list[Count] = field(default_factory=lambda: [32, 256])
    """Numbers of groups (P)."""
    n: list[Count] = field(default_factory=lambda: [64, 256])
    """Rollouts of each group (N)."""
    ratio: Count = 4
    """n / m: of n rollouts n // ratio are kept, at least one."""
    rules: list[str] = field(default_factory=lambda: list(RULES))
    """Rules to measure."""
    repeats: Count = 5
    """Measured samples of each after the warm-up."""
    seed: Seed = 0
    """Seed of rewards and ties."""
    topology: str = ""
    """TPU slice such as v5e:1x1, for which the TPU compiler's estimates are printed; empty measures on this machine."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("prompts", "n", "rules"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty; at least one is needed")
        for rule in self.rules:
            if rule not in RULES:
                raise ConfigError(f"rules={rule} is unknown; the valid names are {', '.join(RULES)}")


# --- ways of computing it -----------------------------------------------------------------------------------------------------


def argsort_and_gather(high_N: Array, low_N: Array) -> Pairs:
    """Sorts pairs by the sorted order of their positions, which is how a sort of several columns is mostly written."""
    order_N = jnp.lexsort((low_N, high_N))
    return high_N[order_N], low_N[order_N]


SORTS: dict[str, Sort] = {
    OURS: selection.sort_by_backend,
    "pairs": selection.sort_pairs,
    "joined": selection.sort_joined,
    "argsort": argsort_and_gather,
}


def top_k_max_variance(rewards_N: Array, *, m: int) -> Array:
    """Indices by two top_k, one from each end; the high end takes the last of equal rewards, so that none is kept twice."""
    n = rewards_N.size
    lowest_M, low_M = jax.lax.top_k(-rewards_N, m)
    highest_M, high_M = jax.lax.top_k(rewards_N[::-1], m)
    offset = lowest_M[0]
    moved = high_slots(offset - lowest_M, highest_M[::-1] + offset)
    return jnp.where(jnp.arange(m) < m - moved, low_M, n - 1 - high_M[::-1])


TOP_K: dict[str, Callable[..., Array]] = {
    "max_variance": top_k_max_variance,
    "max_reward": lambda rewards_N, *, m: jax.lax.top_k(rewards_N, m)[1],
}


def implementations(rule: str, m: int) -> dict[str, Callable[[Array, Array, Array], Array]]:
    """``(rewards_PN, valid_PN, key) -> index_PM`` of every way that runs on a device."""

    def by_sort(sort: Sort, rewards_PN: Array, valid_PN: Array, key: Array) -> Array:
        return select(Group(rewards_PN, valid_PN), key, rule=RULES[rule], m=m, sort=sort)

    calls: dict[str, Callable[[Array, Array, Array], Array]] = {name: partial(by_sort, sort) for name, sort in SORTS.items()}
    if rule in TOP_K:
        calls["top_k"] = lambda rewards_PN, valid_PN, key: jax.vmap(partial(TOP_K[rule], m=m))(rewards_PN)
    return calls


# --- references ---------------------------------------------------------------------------------------------------------------


def numpy_order(rewards_PN: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Indices in ascending order of reward, ties at random, by one sort of 64-bit integers: twice as fast as ``lexsort``."""
    n = rewards_PN.shape[1]
    index_bits = (n - 1).bit_length()
    bits = (rewards_PN + np.float32(0)).view(np.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64) << 32
    ties = rng.integers(0, 1 << (32 - index_bits), rewards_PN.shape, np.int64) << index_bits
    return np.sort(ordered | ties | np.arange(n), axis=1) & ((1 << index_bits) - 1)


def numpy_max_variance(sorted_PN: np.ndarray, m: int) -> np.ndarray:
    """Ranks of the best of all m+1 splits, scored by sums of rewards and of squares."""
    n = sorted_PN.shape[1]
    centred_PN = sorted_PN - sorted_PN.mean(axis=1, keepdims=True)
    sums, squares = (np.pad(np.cumsum(x, axis=1), ((0, 0), (1, 0))) for x in (centred_PN, centred_PN**2))
    low = m - np.arange(m + 1)
    high = n - np.arange(m + 1)
    total, square = (x[:, low] + x[:, -1:] - x[:, high] for x in (sums, squares))
    best = np.argmax(square / m - (total / m) ** 2, axis=1)[:, None]
    return np.where(np.arange(m) < m - best, np.arange(m), np.arange(n - m, n))


REFERENCES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "max_variance": numpy_max_variance,
    "percentile": lambda sorted_PN, m: (2 * np.arange(m) + 1)[None] * sorted_PN.shape[1] // (2 * m),
    "max_reward": lambda sorted_PN, m: np.arange(sorted_PN.shape[1] - m, sorted_PN.shape[1])[None],
    "all": lambda sorted_PN, m: np.arange(m)[None],
}
"""Rule -> ranks to keep of float64 rewards in ascending order."""


def numpy_select(rule: str, rewards_PN: np.ndarray, m: int, rng: np.random.Generator) -> np.ndarray:
    """Indices of the kept rollouts of all groups at once."""
    order_PN = numpy_order(rewards_PN, rng)
    sorted_PN = np.take_along_axis(rewards_PN, order_PN, axis=1).astype(np.float64)
    return np.take_along_axis(order_PN, np.broadcast_to(REFERENCES[rule](sorted_PN, m), (len(rewards_PN), m)), axis=1)


# --- the command --------------------------------------------------------------------------------------------------------------


def run(options: SelectorOptions) -> dict[str, Any]:
    """Measures, or estimates for a TPU, prints the table, and returns the result.

    Raises:
        ConfigError: a topology is asked for that libtpu does not know, that cannot share the groups, or without libtpu.
        RuntimeError: two ways disagree, or an index is kept twice.
    """
    if options.topology:
        return _estimate(options)
    cases = [_case(options, *sizes) for sizes in _sizes(options)]
    names = (*SORTS, "top_k", "NumPy", "loop")
    print_table(
        f"selection of n // {options.ratio} of n, microseconds a call, median of {options.repeats}",
        ("rule", "P", "n", "m", *names, "loop / ours"),
        [[*_head(case), *_cells(case["microseconds"], names), _cell(case["loop_over_ours"])] for case in cases],
    )
    return {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "agree": True, "cases": cases}


def _sizes(options: SelectorOptions) -> list[tuple[str, int, int, int]]:
    def kept(rule: str, n: int) -> int:
        return n if rule == "all" else max(1, n // options.ratio)

    return [(rule, prompts, n, kept(rule, n)) for rule in options.rules for prompts in options.prompts for n in options.n]


def _head(case: dict[str, Any]) -> list[str]:
    return [str(case[key]) for key in ("rule", "prompts", "n", "m")]


def _cells(values: dict[str, float], names: tuple[str, ...]) -> list[str]:
    return [_cell(values.get(name)) for name in names]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _case(options: SelectorOptions, rule: str, prompts: int, n: int, m: int) -> dict[str, Any]:
    rng = np.random.default_rng(options.seed)
    # Rewards in steps of a tenth: ties, as real rewards have, and sums that float32 holds closely.
    rewards_PN = np.round(rng.random((prompts, n)), 1).astype(np.float32)
    arguments = jax.device_put((rewards_PN, np.ones((prompts, n), bool), jax.random.key(options.seed)))
    calls: dict[str, Callable[[], Any]] = {}
    compile_seconds = {}
    for name, function in implementations(rule, m).items():
        start = time.perf_counter()
        calls[name] = partial(jax.jit(function).lower(*arguments).compile(), *arguments)
        compile_seconds[name] = time.perf_counter() - start
    _check(rule, rewards_PN, m, {name: np.asarray(call()) for name, call in calls.items()})
    if rule in REFERENCES:
        calls["NumPy"] = lambda: numpy_select(rule, rewards_PN, m, rng)
        calls["loop"] = lambda: [numpy_select(rule, row[None], m, rng) for row in rewards_PN]
    spreads, counts = _spreads(calls, options.repeats)
    microseconds = {name: spread.seconds / counts[name] * 1e6 for name, spread in spreads.items()}
    return {
        "rule": rule,
        "prompts": prompts,
        "n": n,
        "m": m,
        "microseconds": microseconds,
        "cpu_microseconds": {name: spread.cpu_seconds / counts[name] * 1e6 for name, spread in spreads.items()},
        "loop_over_ours": microseconds["loop"] / microseconds[OURS] if rule in REFERENCES else None,
        "compile_seconds": compile_seconds,
    }


def _spreads(calls: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, Spread], dict[str, int]]:
    """Samples of every call in turns, and how many calls a sample has."""
    for call in calls.values():
        jax.block_until_ready(call())
    counts = {name: _calls_in_a_sample(call) for name, call in calls.items()}
    runs = {name: partial(_repeat, call, counts[name]) for name, call in calls.items()}
    warm_up(runs)
    return {name: parts[WHOLE] for name, parts in alternate(runs, repeats).items()}, counts


def _check(rule: str, rewards_PN: np.ndarray, m: int, index: dict[str, np.ndarray]) -> None:
    where = f"{rule}, P={rewards_PN.shape[0]}, n={rewards_PN.shape[1]}, m={m}"
    for name, index_PM in index.items():
        ordered = np.sort(index_PM, axis=1)
        if (ordered[:, :1] < 0).any() or (np.diff(ordered, axis=1) <= 0).any():
            raise RuntimeError(f"{where}, {name}: a rollout is kept twice, or a slot is empty")
        if name in SORTS and (index_PM != index[OURS]).any():
            raise RuntimeError(f"{where}: {name} and {OURS} keep different rollouts")
        if rule in REFERENCES:
            choices = (index_PM, numpy_select(rule, rewards_PN, m, np.random.default_rng(0)))
            kept, expected = (np.take_along_axis(rewards_PN.astype(np.float64), choice, axis=1) for choice in choices)
            worst = np.abs(kept.var(axis=1) - expected.var(axis=1)).max()
            if worst > 1e-6:
                raise RuntimeError(f"{where}, {name}: the variance of the kept rewards is off by {worst:.2g}")


def _calls_in_a_sample(call: Callable[[], Any]) -> int:
    """By the fastest of a few calls: one that had to wait would leave a sample of a single, cold call."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return max(1, int(SAMPLE_SECONDS / max(1e-6, min(times))))


def _repeat(call: Callable[[], Any], count: int, watch: Any) -> None:
    del watch
    for _ in range(count):
        jax.block_until_ready(call())


# --- estimates for a TPU ------------------------------------------------------------------------------------------------------


def _estimate(options: SelectorOptions) -> dict[str, Any]:
    """The TPU compiler's time of every way, and how many gathers are left in its program."""
    mesh = _topology_mesh(options.topology)
    for prompts in options.prompts:
        if prompts % mesh.size:
            raise ConfigError(f"prompts={prompts} groups cannot be shared by the {mesh.size} devices of {options.topology}")
    cases = [_estimated_case(mesh, *sizes) for sizes in _sizes(options)]
    names = (*SORTS, "top_k")
    print_table(
        f"selection of n // {options.ratio} of n on {options.topology}, compiler's microseconds (g: gathers)",
        ("rule", "P", "n", "m", *names),
        [[*_head(case), *_estimated_cells(case, names)] for case in cases],
    )
    return {"jax": jax.__version__, "topology": options.topology, "cases": cases}


def _estimated_cells(case: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    times, gathers = case["optimal_microseconds"], case["gathers"]
    return [_cell(times.get(name)) + (" g" if gathers.get(name) else "") for name in names]


def _topology_mesh(topology: str) -> Mesh:
    """Groups over all devices of the slice."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(f'topology={topology} needs libtpu, which is not installed; pip install "pods_jax[tpu]"')
    os.environ.update(LIBTPU_ENVIRONMENT)
    # A host has four chips by default, and a slice of one chip is then refused.
    one_chip = {"chips_per_host_bounds": (1, 1, 1)} if set(topology.partition(":")[2].split("x")) == {"1"} else {}
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **one_chip)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"topology={topology} is not known to libtpu (v5e:1x1 and v6e:2x2 are): {error}") from error
    return Mesh(np.array(described.devices), ("groups",))


def _estimated_case(mesh: Mesh, rule: str, prompts: int, n: int, m: int) -> dict[str, Any]:
    groups, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("groups",), ()))
    rewards, valid = (jax.ShapeDtypeStruct((prompts, n), dtype, sharding=groups) for dtype in (jnp.float32, jnp.bool_))
    key = jax.ShapeDtypeStruct((), jax.eval_shape(partial(jax.random.key, 0)).dtype, sharding=everywhere)
    case: dict[str, Any] = {"rule": rule, "prompts": prompts, "n": n, "m": m, "optimal_microseconds": {}, "gathers": {}}
    for name, function in implementations(rule, m).items():
        compiled = jax.jit(function).lower(rewards, valid, key).compile()
        costs = compiled.cost_analysis() or {}
        case["optimal_microseconds"][name] = costs["optimal_seconds"] * 1e6
        case["gathers"][name] = len(re.findall(r" gather\(", compiled.as_text() or ""))
    return case
