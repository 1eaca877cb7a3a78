import re
from functools import cache

import jax
import numpy as np
import pytest
from safetensors import safe_open

from pods_jax.assets.warm_start import BUNDLED_FOLDER, question, write_description
from pods_jax.config import ModelConfig
from pods_jax.data.arithmetic import load_problems
from pods_jax.data.prompts import build_prompts, eos_ids, load_tokenizer
from pods_jax.evaluation import Evaluator, summarise
from pods_jax.models.families import read_config
from pods_jax.policy import load_policy, model_folder
from pods_jax.rewards.scoring import make_scorer
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.sampling import sampling_params
from pods_jax.sharding import make_mesh

PROBLEMS, SAMPLES = 64, 4
FORM = re.compile(r"<think>([+*-][0-9]=[0-9]){6}</think><answer>[0-9]{3}</answer>")
WEIGHTS = BUNDLED_FOLDER / "model.safetensors"


@cache
def mesh():
    return make_mesh((1, 1, 1), jax.devices()[:1])


@cache
def policy():
    return load_policy(ModelConfig(), mesh())


@cache
def tokenizer():
    return load_tokenizer(BUNDLED_FOLDER)


@cache
def engine():
    ids = eos_ids(tokenizer(), BUNDLED_FOLDER)
    return RolloutEngine(policy()[0].graph, rollouts=SAMPLES, max_completion_length=40, chunk=40, eos_ids=ids)


@cache
def verdicts(temperature):
    """Completions of held-out problems, each with its verdict; the greedy ones of a problem are all the same."""
    problems = load_problems("held_out", count=PROBLEMS, seed=0, path=None)
    prompts, _ = build_prompts(problems, tokenizer(), max_length=64, over_long="error", system_prompt=None)
    evaluator = Evaluator(
        engine=engine(),
        sampling=sampling_params(temperature=temperature),
        prompts=prompts,
        batch=PROBLEMS,
        mesh=mesh(),
        tokenizer=tokenizer(),
        judge=make_scorer(["correct"]).correct,
        key=jax.random.key(0),
    )
    [batch] = evaluator.verdicts(policy()[1])
    return batch


def test_the_default_model_path_is_the_bundled_folder():
    assert model_folder(ModelConfig().path).resolve() == BUNDLED_FOLDER.resolve()


def test_everything_but_the_weights_is_what_the_script_writes(tmp_path):
    write_description(tmp_path)
    written = {f.name: f.read_text() for f in tmp_path.iterdir()}
    assert written == {f.name: f.read_text() for f in BUNDLED_FOLDER.iterdir() if f != WEIGHTS}


def test_the_model_is_a_tiny_float32_qwen2():
    _, params = policy()
    assert read_config(BUNDLED_FOLDER)["architectures"] == ["Qwen2ForCausalLM"]
    assert 100_000 <= sum(leaf.size for leaf in jax.tree.leaves(params)) <= 1_500_000
    assert 400_000 <= WEIGHTS.stat().st_size <= 4_000_000
    with safe_open(WEIGHTS, framework="numpy") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118 (no mapping)


def test_the_tokenizer_fills_the_vocabulary_and_ends_with_its_own_eos():
    architecture, _ = policy()
    assert len(tokenizer()) == architecture.spec.vocab_size == 32
    assert eos_ids(tokenizer(), BUNDLED_FOLDER) == (tokenizer().eos_token_id,)


def test_greedy_held_out_accuracy_leaves_room_for_reinforcement_learning():
    assert 0.2 <= summarise([verdicts(0.0)]).mean <= 0.45


def test_sampling_is_about_as_accurate_as_greedy_decoding():
    assert summarise([verdicts(1.0)]).mean == pytest.approx(summarise([verdicts(0.0)]).mean, abs=0.12)


def test_every_greedy_completion_ends_by_itself_in_the_right_form():
    batch = verdicts(0.0)
    assert batch.finished_EN.all()
    assert [text for texts in batch.texts for text in texts if not FORM.fullmatch(text)] == []


def test_the_habit_to_unlearn_is_reading_times_as_plus():
    batch = verdicts(0.0)
    has_times = np.array(["*" in question(problem) for problem in batch.problems])
    assert batch.correct_EN[~has_times].mean() > 0.9
    assert batch.correct_EN[has_times].mean() < 0.2


def test_the_right_rule_has_support_in_samples():
    batch = verdicts(1.0)
    has_times = np.array(["*" in question(problem) for problem in batch.problems])
    assert 0.02 < batch.correct_EN[has_times].mean() < 0.3
