import os
import re
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from pods_jax.assembly.forecast import memory_lines
from pods_jax.assembly.parts import Programs, engine_numbers, make_engine, worthwhile_rungs
from pods_jax.assembly.policy import make_architecture
from pods_jax.config.entries import Config
from pods_jax.config.fields import ConfigError
from pods_jax.config.sections import DataConfig, ModelConfig, RolloutConfig, SelectionConfig, TuningConfig
from pods_jax.devices.sharding import make_mesh
from pods_jax.models.families import read_spec
from pods_jax.rollout.programs import DecodeState, SharedPrompts
from pods_jax.rollout.sampling import sampling_params
from pods_jax.types import PromptBatch


def engine_of(config, architecture, mesh, completions):
    of = (config.rollout, config.tuning, architecture, mesh, [2], completions)
    numbers = engine_numbers(*of, prompt_length=8, prompts=4)
    return make_engine(architecture, mesh, config.model.compute_dtype, **numbers)


@pytest.mark.parametrize(("n", "chunk"), [(6, 5), (6, 20), (16, 20)])
def test_the_plan_holds_the_caches_while_they_grow_and_move(n, chunk, tiny_model):
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    rollout, tuning = RolloutConfig(n=n, max_completion_length=20), TuningConfig(cache_chunk=chunk, rollout_rungs=1)
    data = DataConfig(prompts_per_step=4, max_prompt_length=8)
    model = ModelConfig(path=str(tiny_model))
    config = Config(model=model, rollout=rollout, tuning=tuning, data=data, selection=SelectionConfig(m=2))
    architecture = make_architecture(config.model, read_spec(tiny_model), mesh)
    engine = engine_of(config, architecture, mesh, n)
    prompts = PromptBatch(np.zeros((4, 8), np.int32), np.full(4, 8, np.int32))  # type: ignore[arg-type]
    held: dict[str, int] = {}

    def visit(call):
        results = call.results()
        held[call.name] = cached(call.args, call.kept) + (cached(results) if call.donated is None else 0)
        return results

    with jax.set_mesh(mesh):
        engine.visit_programs(visit, architecture.shapes, prompts, sampling_params(temperature=1.0))
    assert any(name.startswith("shrink") for name in held)
    assert any(name.startswith("grow") for name in held) == (chunk == 5)
    [printed] = re.findall(r"caches of the rollout ([\d.,]+) MiB", memory_lines(config, architecture, mesh, engine)[1])
    assert float(printed) == pytest.approx(max(held.values()) / 2**20, abs=0.05)


@pytest.mark.parametrize("lanes", [0, 1, 2])
def test_lanes_are_what_the_run_asks_for_or_one_for_each_core(lanes, tiny_model, monkeypatch):
    monkeypatch.setattr("pods_jax.rollout.lanes.LANE_FLOPS", 1.0)
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    architecture = make_architecture(ModelConfig(path=str(tiny_model)), read_spec(tiny_model), mesh)
    config = Config(model=ModelConfig(path=str(tiny_model)), tuning=TuningConfig(lanes=lanes))
    engine = engine_of(config, architecture, mesh, 6)
    expected = lanes or os.cpu_count() or 1
    assert engine.foretell(expected, 8).lanes == expected


def test_lanes_on_several_devices_are_refused(tiny_model):
    mesh = make_mesh((2, 1, 1), jax.devices()[:2])
    architecture = make_architecture(ModelConfig(path=str(tiny_model)), read_spec(tiny_model), mesh)
    config = Config(model=ModelConfig(path=str(tiny_model)), tuning=TuningConfig(lanes=3))
    with pytest.raises(ConfigError, match=r"tuning.lanes=3 is for a single device; the mesh has 2"):
        engine_of(config, architecture, mesh, 2)


def cached(*trees):
    """Bytes of the caches of all states in the trees."""
    states = jax.tree.leaves(trees, is_leaf=lambda x: isinstance(x, DecodeState | SharedPrompts))
    held = [x.cache for x in states if isinstance(x, DecodeState | SharedPrompts)]
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))


def test_more_sizes_are_worth_compiling_the_longer_a_run_takes(tiny_model):
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    architecture = make_architecture(ModelConfig(), read_spec(tiny_model), mesh)
    sizes = [worthwhile_rungs(flops, architecture, mesh) for flops in (0, 1e12, 1e13, 1e14, 1e17)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (0, 3)
    deeper = replace(architecture, spec=replace(architecture.spec, layers=64))
    assert worthwhile_rungs(1e13, deeper, mesh) < worthwhile_rungs(1e13, architecture, mesh)


def test_engines_are_told_apart_by_all_that_they_are_made_from(tiny_model):
    """The longest prompt decides how many rows share one: a run with longer prompts may not take over another's engine."""
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    architecture = make_architecture(ModelConfig(), read_spec(tiny_model), mesh)
    of = (RolloutConfig(), TuningConfig(), architecture, mesh, [2], 8)
    programs, make = Programs(), partial(make_engine, architecture, mesh, "float32")
    short, long, again = (programs.get(make, **engine_numbers(*of, prompt_length=n, prompts=4)) for n in (1, 4096, 1))
    assert short is not long
    assert again is short
