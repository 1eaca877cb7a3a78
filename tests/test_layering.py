"""Imports point down the layers of the design, or stay inside one folder."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pods_jax"

# A room is a folder, or loose files of one purpose; it may use its own files and the rooms of lower numbers.
ROOMS = {
    "types": "records",
    "problem": "records",
    "lookup": "records",
    "json_file": "records",
    "loop": "step",
    "evaluator": "step",
}
LEVELS = {
    "records": 0,
    "config": 0,
    "devices": 1,
    "run": 1,
    "algorithm": 1,
    "rewards": 1,
    "data": 2,
    "report": 2,
    "models": 3,
    "rollout": 4,
    "update": 4,
    "step": 5,
    "assembly": 6,
}
# Imported by nobody, one another included.
ENTRIES = {"train", "evaluate", "bench", "compare", "assets"}
HOST_ONLY = {"data", "rewards"}
DEVICE = {"models", "algorithm", "devices"}


def name_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(tree, module, is_package):
    """Modules of the package that a module's source imports, anywhere in it, as dotted names without the package's."""
    parents = ["pods_jax", *filter(None, module.split("."))]
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) + is_package - node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
        for name in names:
            root, _, rest = name.partition(".")
            if root == "pods_jax":
                # "from pods_jax.types import Rollouts" names a record: cut back to the module that holds it.
                while rest and rest not in MODULES:
                    rest = rest.rpartition(".")[0]
                yield rest


def room_of(module: str) -> str:
    top = module.split(".")[0]
    return ROOMS.get(top, top)


def refusals(module, imported):
    """Why one import breaks the design; empty when it does not."""
    source, target = room_of(module), room_of(imported)
    if target == "":
        return [f"{module} imports the package's front door"]
    if source == target:
        return []
    if target in ENTRIES or imported.endswith("__main__"):
        return [f"{module} imports {imported}: an entry is imported by nobody"]
    broken = []
    if source not in ENTRIES and LEVELS[target] >= LEVELS[source]:
        broken.append(f"{module} (level {LEVELS[source]}) imports {imported} (level {LEVELS[target]})")
    if source == "algorithm" and target != "records":
        broken.append(f"{module} imports {imported}: algorithm imports records alone")
    if source in HOST_ONLY and target in DEVICE:
        broken.append(f"{module} imports {imported}: {source} runs on the host only")
    return broken


@functools.cache
def graph():
    return {
        module: set(imports_of(ast.parse(path.read_text()), module, path.name == "__init__.py")) - {module}
        for module, path in MODULES.items()
    }


def test_every_module_has_a_room():
    assert {room_of(module) for module in MODULES} - {""} == set(LEVELS) | ENTRIES


def test_the_top_of_the_package_stays_small():
    assert len([module for module, path in MODULES.items() if path.parent == PACKAGE]) <= 9


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_over_400_lines(module):
    assert len(MODULES[module].read_text().splitlines()) <= 400


@pytest.mark.parametrize("module", [module for module in MODULES if module])
def test_imports_point_down(module):
    assert [reason for imported in sorted(graph()[module]) for reason in refusals(module, imported)] == []


def test_no_cycle_of_imports():
    graphlib.TopologicalSorter(graph()).prepare()


@pytest.mark.parametrize(
    ("module", "code", "imported"),
    [
        ("loop", "from pods_jax.types import Rollouts, Selection", {"types"}),
        ("loop", "def f():\n    import pods_jax.models.spec", {"models.spec"}),
        ("loop", "from pods_jax import types, config", {"types", "config"}),
        ("loop", "from pods_jax import nothing", {""}),
        ("models.decoder", "from .spec import DecoderSpec", {"models.spec"}),
        ("models.decoder", "from ..types import Rollouts", {"types"}),
        ("models.decoder", "from jax import numpy\nimport numpy.linalg", set()),
    ],
)
def test_imports_are_found_in_every_spelling(module, code, imported):
    assert set(imports_of(ast.parse(code), module, False)) == imported


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("types", "algorithm"),
        ("update.learner", "rollout.engine"),
        ("data.loader", "models.spec"),
        ("rewards.scoring", "algorithm"),
        ("algorithm.losses", "config.fields"),
        ("run.log", "devices.sharding"),
        ("compare.running", "train"),
        ("train", "report.__main__"),
        ("models.decoder", "rollout"),
        ("rollout.engine", "loop"),
        ("loop", "train"),
        ("loop", ""),
    ],
)
def test_an_import_against_the_design_is_refused(module, imported):
    assert refusals(module, imported)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("algorithm.losses", "algorithm.masked"),
        ("algorithm.losses", "types"),
        ("loop", "update.learner"),
        ("train", "report.page"),
    ],
)
def test_an_import_along_the_design_is_allowed(module, imported):
    assert refusals(module, imported) == []
