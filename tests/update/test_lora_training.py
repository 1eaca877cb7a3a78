"""Training adapters: what moves, what the sampler and the reference policy see, and what a run leaves."""

import json
from contextlib import nullcontext, suppress
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from pods_jax import evaluate, train
from pods_jax.algorithm.losses import LOSSES, Numbers
from pods_jax.assembly.parts import check_sampler_sees
from pods_jax.assembly.policy import load_policy, make_prepare
from pods_jax.config.sections import ModelConfig
from pods_jax.devices.sharding import make_mesh, replicate, to_global
from pods_jax.loop import train as loop
from pods_jax.models.lora import A, B, LoraSpec, join, split_adapters
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.sampling import sampling_params
from pods_jax.types import KeptBatch, PromptBatch
from pods_jax.update.learner import Learner, UpdateSettings, init_state
from pods_jax.update.microbatches import place

LORA = LoraSpec(rank=3, alpha=6.0)
P, M, L, C = 4, 3, 6, 5
# Plain steps of the length 1: the parameters move by the gradient itself.
SGD = optax.identity()
ADAMW = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-4), optax.scale(1e-2))


@pytest.fixture(scope="module")
def one(tiny_model):
    """Mesh of one device."""
    return make_mesh((1, 1, 1), jax.devices()[:1])


def policy(folder, mesh, **choices):
    with jax.set_mesh(mesh):
        return load_policy(ModelConfig(path=str(folder), **choices), mesh, layers="scan", lora=LORA, seed=3)


def moved(trained):
    """Adapters that do something: B is zero when new."""
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: x + jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype), trained)


@cache
def batch():
    rng = np.random.default_rng(0)
    advantage_PM = rng.normal(0, 1, (P, M)).astype(np.float32)
    return KeptBatch(
        prompt_PL=rng.integers(3, 32, (P, L)).astype(np.int32),  # type: ignore[arg-type]
        prompt_length_P=np.array([6, 3, 4, 5], np.int32),  # type: ignore[arg-type]
        tokens_PMC=rng.integers(3, 32, (P, M, C)).astype(np.int32),  # type: ignore[arg-type]
        length_PM=rng.integers(1, C + 1, (P, M)).astype(np.int32),  # type: ignore[arg-type]
        logp_old_PMC=rng.normal(-3.0, 0.3, (P, M, C)).astype(np.float32),  # type: ignore[arg-type]
        advantage_PM=advantage_PM,  # type: ignore[arg-type]
        weight_PM=np.ones((P, M), np.float32),  # type: ignore[arg-type]
        index_PM=np.tile(np.arange(M, dtype=np.int32), (P, 1)),  # type: ignore[arg-type]
    )


def learner(architecture, optimizer, beta=0.0):
    settings = UpdateSettings(LOSSES["grpo"], Numbers(beta=beta))
    rate = optax.constant_schedule(1.0)
    return Learner(architecture.graph, optimizer, rate, settings, reference_graph=architecture.base_graph)


def assert_trees_identical(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


# --- the update ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_an_update_moves_adapters_alone(param_dtype, one, tiny_model):
    """Adapters and moments are float32 beside a base of any dtype, and the base keeps every bit."""
    architecture, params = policy(tiny_model, one, param_dtype=param_dtype)
    trained, frozen = split_adapters(params)
    before, base = jax.device_get((trained, frozen))
    names = {name + suffix for name in LORA.targets for suffix in (A, B)}
    assert set(trained["layers"]) == names
    assert {x.dtype for x in jax.tree.leaves(frozen)} == {jnp.dtype(param_dtype)}
    with jax.set_mesh(one):
        state = init_state(trained, optimizer=ADAMW)
        moments = sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim)
        assert moments == 2 * sum(x.size for x in jax.tree.leaves(before))
        state, metrics = learner(architecture, ADAMW)(state, to_global(one, batch()), 1, frozen)
    assert metrics["update/taken"] == 1
    assert set(state.params["layers"]) == names
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim} == {jnp.dtype("float32")}
    for name in LORA.targets:
        assert np.any(state.params["layers"][name + B] != before["layers"][name + B]), name
    assert_trees_identical(frozen, base)


def test_a_is_moved_once_b_is_not_zero(one, tiny_model):
    architecture, params = policy(tiny_model, one)
    trained, frozen = split_adapters(params)
    update = learner(architecture, SGD)
    with jax.set_mesh(one):
        new = init_state(jax.tree.map(jnp.copy, trained), optimizer=SGD)
        first, _ = update(new, to_global(one, batch()), 1, frozen)
        old = init_state(moved(trained), optimizer=SGD)
        start = jax.device_get(old.params)
        later, _ = update(old, to_global(one, batch()), 1, frozen)
    for name in LORA.targets:
        # The gradient of A is B's, which is zero at first.
        np.testing.assert_array_equal(first.params["layers"][name + A], trained["layers"][name + A])
        for suffix in (A, B):
            assert np.any(later.params["layers"][name + suffix] != start["layers"][name + suffix]), name + suffix


def test_eight_devices_update_adapters_as_one_does(one, tiny_model):
    moves = []
    for mesh in (one, make_mesh((2, 2, 2))):
        architecture, params = policy(tiny_model, mesh)
        trained, frozen = split_adapters(params)
        with jax.set_mesh(mesh):
            state = init_state(moved(trained), optimizer=SGD)
            state, metrics = learner(architecture, SGD)(state, to_global(mesh, batch()), 1, frozen)
        for array, shape in zip(*map(jax.tree.leaves, (state.params, split_adapters(architecture.shapes)[0])), strict=True):
            assert array.sharding.is_equivalent_to(shape.sharding, array.ndim)
        moves.append(jax.device_get((state.params, metrics["loss"], metrics["policy/grad_norm"])))
    for ours, expected in zip(jax.tree.leaves(moves[1]), jax.tree.leaves(moves[0]), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_an_update_reaches_the_sampler(compute_dtype, one, tiny_model):
    architecture, params = policy(tiny_model, one, compute_dtype=compute_dtype)
    trained, frozen = split_adapters(params)
    engine = RolloutEngine(
        architecture.graph,
        rollouts=1,
        max_completion_length=2,
        chunk=2,
        eos_ids=[2],
        prepare=make_prepare(architecture, one, compute_dtype),
    )

    def first_logp(params):
        """The tokens that the engine draws first under one key, and its log-probabilities of them."""
        prompts = to_global(one, PromptBatch(batch().prompt_PL, batch().prompt_length_P))
        rollouts = engine(params, prompts, jax.random.key(0), replicate(sampling_params(temperature=1.0)))
        return jax.device_get((rollouts.tokens_PNC[..., 0], rollouts.logp_PNC[..., 0]))

    with jax.set_mesh(one):
        tokens, before = first_logp(params)
        update = learner(architecture, SGD)
        state, _ = update(init_state(trained, optimizer=SGD), to_global(one, batch()), 1, frozen)
        drawn, after = first_logp(join(state.params, frozen))
        _, plain = first_logp(join(jax.tree.map(jnp.zeros_like, state.params), frozen))
    same = tokens == drawn
    assert same.any()
    assert (np.abs(after - before)[same] > 1e-4).all()
    np.testing.assert_array_equal(plain, before)


def test_a_sampler_that_does_not_see_the_adapters_is_refused(one, tiny_model):
    architecture, params = policy(tiny_model, one)
    trained, frozen = split_adapters(params)

    def blind(params):
        adapters, base = split_adapters(params)
        return join(jax.tree.map(jnp.zeros_like, adapters), base)

    for prepare, refusal in (
        (lambda params: params, nullcontext()),
        (blind, pytest.raises(RuntimeError, match="do not reach the sampler")),
    ):
        engine = RolloutEngine(architecture.graph, rollouts=3, max_completion_length=2, chunk=2, eos_ids=[2], prepare=prepare)
        with jax.set_mesh(one), refusal:
            prompts = to_global(one, PromptBatch(batch().prompt_PL, batch().prompt_length_P))
            check_sampler_sees(engine, trained, frozen, prompts, replicate(sampling_params(temperature=1.0)))


def test_the_reference_policy_is_the_base_with_adapters_off(one, tiny_model):
    architecture, params = policy(tiny_model, one)
    trained, frozen = split_adapters(params)
    with jax.set_mesh(one):
        base_architecture, base = load_policy(ModelConfig(path=str(tiny_model)), one, layers="scan")
        kept = to_global(one, batch())
        ours = learner(architecture, SGD, beta=0.5)
        start = init_state(moved(trained), optimizer=SGD)
        state, away = ours(start, kept, 1, frozen, frozen)
        found, _ = ours.deal(kept)
        assert found is not None
        deal = place(found)
        plain = learner(base_architecture, SGD)._reference_logp(base, kept, deal)
        np.testing.assert_allclose(ours._reference_logp(frozen, kept, deal), plain, rtol=1e-6, atol=1e-6)
        _, further = ours(state, kept, 2, frozen, frozen)
        _, at_first = ours(init_state(trained, optimizer=SGD), kept, 1, frozen, frozen)
    assert away["policy/kl"] > 1e-3
    assert further["policy/kl"] > 1e-3
    assert abs(at_first["policy/kl"]) < 1e-6


# --- whole runs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model, compiled_once):
    """Trains a tiny run with adapters and what the test changes; returns the run folder."""
    root = tmp_path_factory.mktemp("runs")

    def call(name, code=0, **changes):
        options = {
            "run.dir": root,
            "run.name": name,
            "run.steps": 4,
            "run.checkpoint_every": 2,
            "model.path": tiny_model,
            "model.param_dtype": "bfloat16",
            "lora.rank": 2,
            "lora.alpha": 4,
            "loss.beta": 0.05,
            "data.prompts_per_step": 4,
            "data.train_problems": 40,
            "data.held_out_problems": 10,
            "rollout.n": 6,
            "rollout.max_completion_length": 8,
            "selection.m": 3,
            "optimizer.learning_rate": 0.05,
            "optimizer.warmup_steps": 0,
            "reward.functions": "tag_count,length",
            "reward.weights": "0,1",
            "mesh.fsdp": 1,
            "eval.every": 0,
            "log.progress": "false",
        }
        options |= {key.replace("__", "."): value for key, value in changes.items()}
        assert train.main([text for key, value in options.items() for text in (f"--{key}", str(value))]) == code
        return root / name

    return call


@pytest.fixture(scope="module")
def whole(runs):
    """An uninterrupted run, and the parts that its loop was given."""
    seen = []

    def watched(parts, *rest):
        seen.append(parts)
        return loop(parts, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train", watched)
        folder = runs("whole")
    return folder, seen[0]


def rows(folder):
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "wall_seconds"} for row in log]


def test_a_run_trains_adapters_against_the_frozen_base_without_a_second_copy(whole):
    folder, parts = whole
    assert parts.reference is parts.frozen
    assert parts.learner.compiled_programs() == 2
    assert {x.dtype for x in jax.tree.leaves(parts.frozen)} == {jnp.dtype(jnp.bfloat16)}
    kls = [row["policy/kl"] for row in rows(folder)[1:]]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert kls[-1] > 1e-5
    assert all(row["policy/logp_gap"] < 1e-5 for row in rows(folder)[1:])


def test_a_checkpoint_holds_adapters_and_their_moments_alone(whole):
    folder, _ = whole
    metadata = ocp.PyTreeCheckpointer().metadata(folder / "checkpoints" / "4" / "state").item_metadata
    assert metadata is not None
    kept = metadata.tree
    assert set(kept["params"]) == {"layers"}
    names = {name + suffix for name in LORA.targets for suffix in (A, B)}
    assert set(kept["params"]["layers"]) == names
    arrays = [leaf for leaf in jax.tree.leaves(kept) if leaf.shape]
    assert len(arrays) == 3 * len(names)
    assert {leaf.dtype for leaf in arrays} == {jnp.dtype("float32")}


def test_a_continued_run_equals_an_uninterrupted_one(runs, whole):
    runs("continued", run__steps=2)
    folder = runs("continued")
    assert rows(folder) == rows(whole[0])
    for name in ("adapter/adapter_model.safetensors", "export/model.safetensors"):
        assert (folder / name).read_bytes() == (whole[0] / name).read_bytes()


def test_a_run_with_other_adapters_is_not_continued(runs, whole, capsys):
    before = (whole[0] / "metrics.jsonl").read_bytes()
    runs("whole", code=2, run__steps=6, lora__rank=3)
    assert "started with another lora.rank" in capsys.readouterr().err
    assert (whole[0] / "metrics.jsonl").read_bytes() == before


def test_evaluating_adapters_equals_evaluating_the_merged_export(whole, tiny_model, tmp_path, capsys):
    texts = {}
    for name, path in (("adapter", whole[0] / "adapter"), ("export", whole[0] / "export"), ("base", tiny_model)):
        out = tmp_path / f"{name}.jsonl"
        options = {"model.path": path, "data.held_out_problems": 8, "rollout.max_completion_length": 8, "batch": 8}
        options |= {"samples": 0, "mesh.fsdp": 1, "out": out}
        assert evaluate.main([text for key, value in options.items() for text in (f"--{key}", str(value))]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["problems"] == 8
        texts[name] = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert texts["adapter"] == texts["export"] != texts["base"]


def test_training_goes_on_from_a_folder_of_adapters(runs, whole):
    """The reference policy is the one that the run starts from, also when it is continued."""
    runs("onward", model__path=whole[0] / "adapter", lora__rank=0, run__steps=1)
    folder = runs("onward", model__path=whole[0] / "adapter", lora__rank=0, run__steps=3)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    first = json.loads((whole[0] / "adapter" / "adapter_config.json").read_text())
    assert config == first
    kls = [row["policy/kl"] for row in rows(folder)[1:]]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert kls[2] > 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora__rank": -1}, "lora.rank=-1"),
        ({"lora__targets": "q,query"}, "lora.targets=['q', 'query'] must name some of q, k, v, o, gate, up, down"),
        ({"lora__alpha": 0}, "lora.alpha=0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_impossible_adapters_are_refused_by_name_before_anything_is_made(changes, words, runs, whole, capsys):
    # The command line itself refuses what no run can have; the rest is refused when the parts are looked up.
    with suppress(SystemExit):
        runs("refused", code=2, **changes)
    assert words in capsys.readouterr().err
    assert not (whole[0].parent / "refused").exists()
