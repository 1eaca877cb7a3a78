"""Entry point: ``python -m pods_jax.bench COMMAND [--option VALUE ...]``; the last line of its output is one JSON object."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pods_jax.bench import flops, load, rollout, selector, step, tradeoff, update
from pods_jax.bench.measure import print_json
from pods_jax.config.command_line import parse
from pods_jax.config.fields import ConfigError
from pods_jax.devices.compiling import use_32_bits


@dataclass(frozen=True)
class Command:
    """One benchmark: the class of its options, and what measures and prints."""

    options: type
    run: Callable[[Any], dict[str, Any]]


COMMANDS = {
    "rollout": Command(rollout.RolloutOptions, rollout.run),
    "step": Command(step.StepOptions, step.run),
    "update": Command(update.UpdateOptions, update.run),
    "tradeoff": Command(tradeoff.TradeoffOptions, tradeoff.run),
    "flops": Command(flops.FlopsOptions, flops.run),
    "selector": Command(selector.SelectorOptions, selector.run),
    "load": Command(load.LoadOptions, load.run),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark named by the first argument; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    name, rest = (given[0], given[1:]) if given else ("", [])
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name not in COMMANDS:
        print(f"pods_jax.bench: error: unknown benchmark {name!r}: the valid names are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    description = (sys.modules[command.run.__module__].__doc__ or "").strip()
    options = parse(command.options, rest, prog=f"python -m pods_jax.bench {name}", description=description)
    use_32_bits()
    try:
        result = command.run(options)
    except (ConfigError, FileNotFoundError) as error:
        print(f"pods_jax.bench {name}: error: {error}", file=sys.stderr)
        return 2
    print_json({"bench": name} | result)
    return 0


def _help() -> str:
    lines = ["usage: python -m pods_jax.bench COMMAND [--option VALUE ...]     (COMMAND --help lists its options)", ""]
    for name, command in COMMANDS.items():
        first = (sys.modules[command.run.__module__].__doc__ or "").strip().splitlines()[0]
        lines.append(f"  {name:10}{first}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
