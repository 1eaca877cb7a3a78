"""Compares PODS with its baselines: ``python -m pods_jax.compare --help``.

All arms train from the same checkpoint over the same prompts with the same seeds, step by step in turns, so that noise of the
machine falls on all alike. Compiling and evaluating are not timed. For each baseline the time to 99 % of its best accuracy is
compared with the time that the first arm, PODS, takes to the same level. The same command continues a comparison that was
killed, and of a finished one only writes the page again.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from pods_jax.assembly.inputs import run_folder
from pods_jax.assembly.opening import join_hosts
from pods_jax.compare.arms import CompareConfig, arm_configs, arms_of, of_seed, out_folder
from pods_jax.compare.curves import Runs, read_curve, read_imports
from pods_jax.compare.pages import write_comparison
from pods_jax.compare.running import find_unfinished, run_all
from pods_jax.compare.tables import Table, accuracy_table, cost_table, level_table, print_table, ratio_table, way_table
from pods_jax.config.command_line import parse
from pods_jax.config.entries import Config
from pods_jax.config.fields import ConfigError, shown
from pods_jax.devices.compiling import use_32_bits

LOG_WIDTH = 120
"""Columns of the tables where no terminal says."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    config = parse(CompareConfig, argv, prog="python -m pods_jax.compare", description=(__doc__ or "").strip())
    use_32_bits()
    try:
        compare(config)
    except ConfigError as error:
        print(f"pods_jax.compare: error: {error}", file=sys.stderr)
        return 2
    return 0


def compare(config: CompareConfig) -> Path:
    """Runs what is left of a comparison, prints its tables and writes its page; returns the page's path.

    Raises:
        ConfigError: the configuration names something that does not exist or cannot be; nothing has been run then.
    """
    join_hosts(config)
    first, console = jax.process_index() == 0, Console()
    if not console.is_terminal:
        console.width = LOG_WIDTH
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True) if first else _silent
    configs, imported = arm_configs(config, jax.device_count()), _imported(config)
    unfinished = find_unfinished(configs, config.compare.seeds)
    complete = set(config.compare.seeds) - {runs.seed for runs in unfinished}
    for fact in _facts(config, configs):
        say(fact)

    def write_page() -> tuple[Path, list[Table]]:
        arms = _own(configs, [seed for seed in config.compare.seeds if seed in complete]) | imported
        return _write(config, configs, arms)

    def after_seed(seed: int) -> None:
        complete.add(seed)
        if first:
            write_page()

    run_all(unfinished, interleave=config.compare.interleave, say=say, after_seed=after_seed)
    page, tables = out_folder(config) / "compare.html", []
    if first:
        page, tables = write_page()
    for table in tables:
        print_table(table, console)
    say(f"page: {page}")
    return page


def _imported(config: CompareConfig) -> dict[str, Runs]:
    try:
        imported = read_imports(config.compare.imports)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    if twice := arms_of(config).keys() & imported.keys():
        raise ConfigError(f"compare.imports brings an arm {min(twice)}, which is an own arm too; rename its folder")
    return imported


def _own(configs: Mapping[str, Config], seeds: Sequence[int]) -> dict[str, Runs]:
    if not seeds:
        return {}
    runs = {name: [of_seed(one, name, seed) for seed in seeds] for name, one in configs.items()}
    return {name: {run.run.seed: read_curve(run_folder(run)) for run in of} for name, of in runs.items()}


def _write(config: CompareConfig, configs: Mapping[str, Config], arms: Mapping[str, Runs]) -> tuple[Path, list[Table]]:
    share = config.compare.level
    tables = [accuracy_table(arms), cost_table(arms)]
    if config.sweep.chosen:
        tables.insert(0, level_table(arms, share))
    elif len(arms) > 1:
        tables[:0] = [ratio_table(arms, share), way_table(arms)]
    out = out_folder(config) / "compare.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    page = write_comparison(
        out,
        arms,
        tables,
        words={name: arm.description for name, arm in arms_of(config).items()},
        facts=_facts(config, configs),
        share=None if config.sweep.chosen else share,
    )
    return page, tables


def _facts(config: CompareConfig, configs: Mapping[str, Config]) -> list[str]:
    """Lines on how the comparison is made."""
    if not configs:
        return [f"Runs of {shown(config.compare.imports)}."]
    one = list(configs.values())[-1]
    extra = f", and {config.compare.extra_steps:,} more of the first arm" if config.compare.extra_steps else ""
    turns = "in turns, step by step" if config.compare.interleave == "step" else "one after another"
    prompts, n, m = config.data.prompts_per_step, config.rollout.n, config.selection.m
    passes = f", {one.update.epochs} passes over what is kept" if one.update.epochs > 1 else ""
    return [
        f"{one.model.path} on {one.data.task}; {one.run.steps:,} steps{extra}, of {prompts} prompts, n={n}, m={m}{passes}; "
        f"learning rate {one.optimizer.learning_rate:g}; {jax.device_count()} x {jax.devices()[0].device_kind}.",
        f"{len(configs)} arms from the same checkpoint over the same prompts, {turns}; seeds {shown(config.compare.seeds)}; "
        f"evaluated every {one.eval.every} steps on {config.data.held_out_problems:,} held-out problems, which is not timed.",
        f"Every arm's update takes micro-batches of {one.update.micro_batch} rollouts.",
    ]


def _silent(text: str) -> None:
    del text


if __name__ == "__main__":
    sys.exit(main())
