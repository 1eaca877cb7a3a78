"""Imports point down the layers of the design, or stay inside one folder."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pods_jax"

LAYERS = {
    "fields": 0,
    "problem": 0,
    "types": 0,
    "sizes": 0,
    "config": 0,
    "command_line": 0,
    "algorithm": 1,
    "sharding": 1,
    "compiling": 1,
    "page": 1,
    "models": 2,
    "update_plan": 2,
    "data": 2,
    "rewards": 2,
    "policy": 3,
    "rollout": 3,
    "learner": 3,
    "optim": 3,
    "checkpoint": 3,
    "run_log": 3,
    "evaluation": 4,
    "build": 4,
    "loop": 5,
    "train": 6,
    "evaluate": 6,
    "report": 6,
    "bench": 6,
    "assets": 6,
    "compare": 7,
}
# Within a layer: the two halves of configuration read the field kinds, the host-only record stands apart, and a run ends with
# its report.
SAME_LAYER = {("types", "problem"), ("config", "fields"), ("command_line", "fields"), ("train", "report")}
HOST_ONLY = {"data", "rewards"}
DEVICE = {"models", "algorithm", "sharding"}


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


def refusals(module, imported):
    """Why one import breaks the design; empty when it does not."""
    source, target = module.split(".")[0], imported.split(".")[0]
    if target == "":
        return [f"{module} imports the package's front door"]
    broken = []
    if source != target and LAYERS[target] >= LAYERS[source] and (source, target) not in SAME_LAYER:
        broken.append(f"{module} (layer {LAYERS[source]}) imports {imported} (layer {LAYERS[target]})")
    if source == "algorithm" and target not in ("algorithm", "types"):
        broken.append(f"{module} imports {imported}: algorithm imports types alone")
    if source in HOST_ONLY and target in DEVICE:
        broken.append(f"{module} imports {imported}: {source} runs on the host only")
    return broken


@functools.cache
def graph():
    return {
        module: set(imports_of(ast.parse(path.read_text()), module, path.name == "__init__.py")) - {module}
        for module, path in MODULES.items()
    }


def test_every_module_has_a_layer():
    assert {module.split(".")[0] for module in MODULES} - {""} <= set(LAYERS)


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
        ("learner", "optim"),
        ("data.loader", "models.spec"),
        ("rewards.scoring", "algorithm"),
        ("algorithm.losses", "config"),
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
    [("algorithm.losses", "algorithm.masked"), ("algorithm.losses", "types"), ("loop", "learner"), ("train", "report")],
)
def test_an_import_along_the_design_is_allowed(module, imported):
    assert refusals(module, imported) == []
