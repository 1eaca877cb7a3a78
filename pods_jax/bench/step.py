"""A whole step, PODS against plain GRPO in turns, split in rollout, reward, selection, update and host.

Without options: 4 prompts of 16 rollouts of 32 + 128 tokens with the model of ``bench rollout``; PODS trains 4 of the 16, GRPO
all. Both run the same engine and the same learner. The reward is trivial (different words of the completion), so that the step
measures the trainer; ``host`` is what moves between device and text.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from pods_jax.algorithm.advantages import ADVANTAGES
from pods_jax.algorithm.keeping import make_keep
from pods_jax.algorithm.selection import RULES
from pods_jax.bench.floors import forward_flops, rollout_work, update_work
from pods_jax.bench.measure import SPREAD_COLUMNS, WHOLE, Spread, Stopwatch, alternate, print_table, spread_cells, warm_up
from pods_jax.bench.training import UpdateCut, make_learner
from pods_jax.bench.update import check_cut
from pods_jax.bench.workload import ModelOptions, ShapeOptions, policy
from pods_jax.config.fields import Checked, ConfigError, Count, CountOrZero, Seed
from pods_jax.devices.sharding import to_global, to_local
from pods_jax.rewards.scoring import Scorer
from pods_jax.rewards.table import Reward
from pods_jax.rollout.sampling import sampling_params
from pods_jax.types import Problem

PARTS = ("rollout", "reward", "selection", "update", "host")
PODS, GRPO = "pods", "grpo"


@dataclass(frozen=True)
class StepOptions(Checked):
    """What a step generates and trains, and how often."""

    model: ModelOptions = field(default_factory=ModelOptions)
    shape: ShapeOptions = field(default_factory=ShapeOptions)
    update: UpdateCut = field(default_factory=UpdateCut)
    prompts: Count = 4
    """Prompts (P)."""
    n: Count = 16
    """Rollouts of each prompt (N)."""
    m: Count = 4
    """Rollouts of each prompt that PODS keeps (M)."""
    rule: str = "max_variance"
    """Rule by which they are kept."""
    prompt_length: Count = 32
    """Tokens of each prompt (L)."""
    completion_length: Count = 128
    """Tokens of each completion (C)."""
    chunk: CountOrZero = 0
    """Tokens by which the rollout's cache grows; 0 takes what suits the backend."""
    repeats: Count = 5
    """Measured steps of each after the warm-up."""
    seed: Seed = 0
    """Seed of prompts, sampling and ties."""

    def __post_init__(self):
        super().__post_init__()
        if not 2 <= self.m <= self.n:
            raise ConfigError(f"m={self.m} must be at least 2 and at most n={self.n}")
        if self.rule not in RULES:
            raise ConfigError(f"rule={self.rule} is unknown; the valid names are {', '.join(RULES)}")
        for kept in (self.m, self.n):
            check_cut(self.update, self.prompts, kept)


def different_words(problem: Problem, completion: str) -> float:
    """The trivial reward: how many different words the completion has."""
    del problem
    return float(len(set(completion.split())))


def run(options: StepOptions) -> dict[str, Any]:
    """Measures, prints the table, and returns the result."""
    kept_by = {PODS: (options.rule, options.m), GRPO: ("all", options.n)}
    with policy(options.model, options.shape, remat=options.update.remat) as model:
        runs = _steps(options, model, kept_by)
        first = warm_up(runs)
        spreads = alternate(runs, options.repeats)
    work = (options.prompt_length, options.completion_length)
    generated = forward_flops(model.spec, rollout_work(options.prompts, options.n, *work))
    result = model.describe() | {
        "prompts": options.prompts,
        "n": options.n,
        "m": options.m,
        "prompt_length": options.prompt_length,
        "completion_length": options.completion_length,
    }
    rows = []
    for name, (_, kept) in kept_by.items():
        parts = spreads[name]
        trained = 3 * forward_flops(model.spec, update_work(options.prompts, kept, *work))
        result[name] = {"compile_seconds": first[name] - parts[WHOLE].seconds, "flops": generated + trained} | _flat(parts)
        rows += [[f"{name} {options.n}→{kept} {part}", *spread_cells(parts[part])] for part in (*PARTS, WHOLE)]
    pods, grpo = (spreads[name][WHOLE] for name in (PODS, GRPO))
    result["cpu_seconds"] = pods.cpu_seconds
    result["grpo_over_pods_cpu"] = grpo.cpu_seconds / pods.cpu_seconds
    print_table(
        f"step of {options.prompts} x {options.n} x ({options.prompt_length} + {options.completion_length}) tokens, "
        f"{options.repeats} runs",
        ("", *SPREAD_COLUMNS),
        rows,
    )
    print(
        f"compile {first[PODS] - pods.seconds:.1f} s, and {first[GRPO] - grpo.seconds:.1f} s more for training all. "
        f"A step that trains all costs {result['grpo_over_pods_cpu']:.2f} times the CPU seconds."
    )
    return result


def _steps(options: StepOptions, model: Any, kept_by: dict[str, tuple[str, int]]) -> dict[str, Callable[[Stopwatch], Any]]:
    """One step of each trainer as a run of the stopwatch; each holds its own state."""
    lengths = {"prompt_length": options.prompt_length, "completion_length": options.completion_length}
    engine = model.engine(n=options.n, **lengths, chunk=options.chunk)
    batch = model.prompts(options.prompts, options.prompt_length, options.seed)
    sampling = sampling_params(temperature=1.0)
    learner, new_state = make_learner(model, options.update)
    scorer = Scorer({"different_words": Reward(different_words, weight=1.0)})
    problems = [Problem(f"bench/{i}", (), "", "bench") for i in range(options.prompts)]

    def make(rule: str, kept: int) -> Callable[[Stopwatch], Any]:
        keep = make_keep(rule=RULES[rule], m=kept, ties="random", advantage=ADVANTAGES["kept"], eps=1e-4)
        state, seeds = new_state(), itertools.count(options.seed)

        def one_step(watch: Stopwatch) -> None:
            nonlocal state
            rollout_key, tie_key = jax.random.split(jax.random.key(next(seeds)))
            with watch("rollout"):
                rollouts = jax.block_until_ready(engine(state.params, batch, rollout_key, sampling))
            with watch("host"):
                tokens, length_PN = to_local((rollouts.tokens_PNC, rollouts.length_PN))
                texts = [[" ".join(map(str, row)) for row in group] for group in tokens.tolist()]
            with watch("reward"):
                scores = scorer.score(problems, texts)
            with watch("selection"):
                rewards, valid = to_global(model.mesh, (scores.rewards_PN, scores.valid_PN))
                padded_length = engine.padded_length(int(length_PN.max()))
                chosen, groups = keep(batch, rollouts, rewards, {}, valid, tie_key, completion_length=padded_length)
                jax.block_until_ready(chosen)
            with watch("update"):
                state, _ = jax.block_until_ready(learner(state, chosen, step=1))
            with watch("host"):
                jax.device_get(groups)

        return one_step

    return {name: make(*how) for name, how in kept_by.items()}


def _flat(parts: dict[str, Spread]) -> dict[str, Any]:
    each = {part: {"seconds": parts[part].seconds, "cpu_seconds": parts[part].cpu_seconds} for part in PARTS}
    whole = parts[WHOLE]
    times = {"seconds": whole.seconds, "seconds_min": whole.seconds_min, "seconds_max": whole.seconds_max}
    return times | {"cpu_seconds": whole.cpu_seconds, "parts": each}
