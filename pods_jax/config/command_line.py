"""Configuration from YAML files and dotted command-line options, and back to YAML.

Both sources become one flat dictionary of dotted keys (``rollout.n``); files come first, in their order, then options. Every
error is a ``ConfigError``, which ``parse`` prints as one line before it exits with code 2.
"""

import argparse
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from docstring_parser import parse_from_object

from pods_jax.config.fields import Checked, ConfigError, Kind, kinds, shown, why_unread

C = TypeVar("C", bound=Checked)

# PyYAML follows YAML 1.1, where 1e-5 is text because it has no dot; people write it as a number.
SCIENTIFIC = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$")

METAVARS = {int: "INTEGER", float: "NUMBER", bool: "BOOLEAN", str: "TEXT", list: "LIST"}


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses a key written twice, where PyYAML lets the last one win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value} stands twice", problem_mark=key.start_mark)
            seen.append(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    pass


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", SCIENTIFIC, list("-+0123456789"))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 2 after one line; the usage of a hundred options would bury it."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def leaf_kinds(cls: type[Checked]) -> dict[str, Kind]:
    """Kind of every dotted key that a configuration class reads: ``{"run.name": text, ...}``."""
    leaves = {}
    for name, kind in kinds(cls).items():
        if is_dataclass(kind.type):
            leaves |= {f"{name}.{leaf}": of for leaf, of in kinds(kind.type).items()}
        else:
            leaves[name] = kind
    return {key: kind for key, kind in leaves.items() if why_unread(cls, key) is None}


def parse(cls: type[C], argv: Sequence[str] | None = None, *, prog: str, description: str) -> C:
    """Build a configuration from the command line.

    ``--config FILE.yaml`` may be given several times, later files win; ``--section.field VALUE`` wins over all files.
    ``--help`` lists every field; ``--print_config`` prints the resolved YAML. Both exit with code 0; an error exits with code 2
    after one line on stderr.

    Args:
        cls: Configuration class, ``Config`` or ``EvaluateConfig``.
        argv: Arguments without the program's name; ``None`` takes the process's own.
        prog: How the program is started, for example ``python -m pods_jax.train``.
        description: What the program does.
    """
    parser = _parser(cls, prog, description)
    known, unknown = parser.parse_known_args(argv)
    given = vars(known)
    files, print_config = given.pop("config"), given.pop("print_config")
    try:
        if unknown:
            raise ConfigError(_unknown_argument(cls, unknown[0]))
        values = {}
        for file in files:
            values |= _read_file(cls, file)
        values |= {key: leaf_kinds(cls)[key].read(text) for key, text in given.items()}
        config = _build(cls, values)
    except ConfigError as error:
        parser.error(str(error))
    if print_config:
        print(to_yaml(config), end="")
        parser.exit()
    return config


def to_yaml(config: Checked) -> str:
    """Return every key that is read as YAML; ``from_yaml`` gives back an equal configuration."""
    tree: dict[str, Any] = {}
    for key in leaf_kinds(type(config)):
        section, _, leaf = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[leaf] = attrgetter(key)(config)
    # Not allow_unicode: PyYAML would write a next-line character (U+0085) as it is and read it back as a blank.
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=120)


def from_yaml(cls: type[C], text: str, *, source: str = "YAML") -> C:
    """Build a configuration from YAML text; what it leaves out keeps its default.

    Raises:
        ConfigError: Not a mapping, a key unknown, not read or written twice, or a value that the configuration refuses;
            ``source`` names the text in the message.
    """
    return _build(cls, _flat_values(cls, text, source))


def config_difference(a: Checked, b: Checked) -> list[str]:
    """Dotted keys whose values differ between two configurations of one class."""
    first, second = dict(_flatten(asdict(a))), dict(_flatten(asdict(b)))
    return [key for key in first if first[key] != second[key]]


def _read_file(cls: type, path: str) -> dict[str, Any]:
    try:
        return _flat_values(cls, Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--config {path}: {reason}") from None


def _flat_values(cls: type, text: str, source: str) -> dict[str, Any]:
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source}{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from None
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{source}: holds a {type(tree).__name__}, not a mapping of sections to fields")
    values, leaves, sections = {}, leaf_kinds(cls), kinds(cls)
    for key, value in _flatten(tree or {}):
        if key in values:
            raise ConfigError(f"{source}: key {key} stands twice")
        if key in leaves:
            values[key] = value
        elif why := why_unread(cls, key):
            raise ConfigError(f"{source}: {key} is not read here: {why}")
        elif key not in sections:
            raise ConfigError(f"{source}: unknown key {key}; the nearest is {_nearest(key, list(leaves))}")
        elif value:
            raise ConfigError(f"{source}: {key}={shown(value)} must be a mapping of its fields")
    return values


def _flatten(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if value and isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _build(cls: type[C], values: dict[str, Any]) -> C:
    parts = {}
    for name, kind in kinds(cls).items():
        if is_dataclass(kind.type):
            inner = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
            parts[name] = kind.type(**inner)
        elif name in values:
            parts[name] = values[name]
    return cls(**parts)


def _nearest(key: str, names: list[str]) -> str:
    """The name whose last part is the key's, or else the most alike."""
    leaf = key.split(".")[-1]
    same_leaf = [name for name in names if name.split(".")[-1] == leaf]
    return difflib.get_close_matches(key, same_leaf or names, n=1, cutoff=0)[0]


def _unknown_argument(cls: type[Checked], argument: str) -> str:
    if not argument.startswith("--"):
        return f"unexpected argument {argument}: options are --section.field VALUE"
    key = argument[2:].split("=")[0]
    if why := why_unread(cls, key):
        return f"--{key} is not read here: {why}"
    return f"unknown option --{key}; the nearest is --{_nearest(key, [*leaf_kinds(cls), 'config', 'print_config'])}"


def _parser(cls: type[Checked], prog: str, description: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        description=description,
        usage="%(prog)s [--config FILE.yaml ...] [--section.field VALUE ...]",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=120),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="append", default=[], metavar="FILE.yaml", help="Read a file; later files win.")
    parser.add_argument("--print_config", action="store_true", default=False, help="Print the resolved configuration and exit.")
    plain, leaves = parser.add_argument_group("without a section"), leaf_kinds(cls)
    for name, kind in kinds(cls).items():
        if is_dataclass(kind.type) and why_unread(cls, name) is None:
            _add_fields(parser.add_argument_group(name, kind.type.__doc__), kind.type, f"{name}.", leaves)
    _add_fields(plain, cls, "", leaves)
    return parser


def _add_fields(group: Any, cls: type, prefix: str, leaves: Mapping[str, Kind]) -> None:
    meanings = _meanings(cls)
    for item in fields(cls):
        if (kind := leaves.get(f"{prefix}{item.name}")) is None:
            continue
        default = item.default if item.default_factory is MISSING else item.default_factory()
        meaning = f"{meanings[item.name]} ({kind}; default {shown(default)})"
        group.add_argument(f"--{prefix}{item.name}", metavar=METAVARS[kind.type], help=meaning.replace("%", "%%"))


@cache
def _meanings(cls: type) -> dict[str, str]:
    """The docstring under each field of a class, on one line."""
    return {param.arg_name: " ".join((param.description or "").split()) for param in parse_from_object(cls).params}
