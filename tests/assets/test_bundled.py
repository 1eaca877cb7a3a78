import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open

from pods_jax.assembly.policy import find_base, load_policy, model_folder
from pods_jax.assets.warm_start import BUNDLED_FOLDER, question, write_description
from pods_jax.config.sections import ModelConfig
from pods_jax.data.arithmetic import TIMES_SHARE, load_problems
from pods_jax.data.prompts import build_prompts, eos_ids, load_tokenizer
from pods_jax.devices.sharding import make_mesh
from pods_jax.evaluator import Evaluator, accuracy_metrics
from pods_jax.models.families import read_config
from pods_jax.rewards.scoring import make_scorer
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.sampling import sampling_params

PROBLEMS, SAMPLES = 64, 4
FORM = re.compile(r"<think>([+*-][0-9]=[0-9]){6}</think><answer>[0-9]{3}</answer>")


@dataclass(frozen=True)
class Bundled:
    """What is promised of one bundled model: the share of multiplications it is for, and greedy and sampled accuracies."""

    folder: Path
    times_share: float
    sha256: str
    greedy: tuple[float, float]
    with_times: tuple[float, float]


MODELS = {
    "bundled": Bundled(
        BUNDLED_FOLDER,
        TIMES_SHARE,
        "250e2e934f80ab7bf0a2bcf99835de523bf6ecb4444e72feec2d90efd1371381",
        greedy=(0.2, 0.45),
        with_times=(0.02, 0.3),
    ),
    "bundled-scarce": Bundled(
        BUNDLED_FOLDER.with_name("tally_scarce"),
        0.4,
        "fec90a8c4823da08f703c97a70d80d0611e495cc79b23bafe9a357213a089958",
        greedy=(0.03, 0.2),
        with_times=(0.02, 0.3),
    ),
}
each_model = pytest.mark.parametrize("name", MODELS)


@cache
def mesh():
    return make_mesh((1, 1, 1), jax.devices()[:1])


@cache
def policy(name):
    return load_policy(ModelConfig(path=name), mesh())


@cache
def tokenizer(name):
    return load_tokenizer(MODELS[name].folder)


@cache
def engine(name):
    ids = eos_ids(tokenizer(name), MODELS[name].folder)
    return RolloutEngine(policy(name)[0].graph, rollouts=SAMPLES, max_completion_length=40, chunk=40, eos_ids=ids)


@cache
def verdicts(name, temperature):
    """Completions of held-out problems, each with its verdict; the greedy ones of a problem are all the same."""
    problems = load_problems("held_out", count=PROBLEMS, seed=0, times_share=MODELS[name].times_share)
    prompts, _ = build_prompts(problems, tokenizer(name), max_length=64, over_long="error", system_prompt=None)
    evaluator = Evaluator(
        name="accuracy",
        engine=engine(name),
        sampling=sampling_params(temperature=temperature),
        prompts=prompts,
        batch=PROBLEMS,
        mesh=mesh(),
        tokenizer=tokenizer(name),
        judge=make_scorer(["correct"]).correct,
        key=jax.random.key(0),
    )
    [batch] = evaluator.verdicts(policy(name)[1])
    return batch


def test_the_default_model_path_is_the_bundled_folder():
    assert ModelConfig().path == "bundled"


@each_model
def test_a_name_stands_for_its_folder_whose_weights_never_change(name):
    folder = model_folder(name)
    assert folder.resolve() == MODELS[name].folder.resolve()
    assert find_base(name).name == str(folder.resolve())
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == MODELS[name].sha256


@each_model
def test_everything_but_the_weights_is_what_the_script_writes(name, tmp_path):
    write_description(tmp_path)
    written = {f.name: f.read_text() for f in tmp_path.iterdir()}
    assert written == {f.name: f.read_text() for f in MODELS[name].folder.iterdir() if f.name != "model.safetensors"}


@each_model
def test_the_model_is_a_tiny_float32_qwen2(name):
    _, params = policy(name)
    weights = MODELS[name].folder / "model.safetensors"
    assert read_config(MODELS[name].folder)["architectures"] == ["Qwen2ForCausalLM"]
    assert 100_000 <= sum(leaf.size for leaf in jax.tree.leaves(params)) <= 1_500_000
    assert 400_000 <= weights.stat().st_size <= 4_000_000
    with safe_open(weights, framework="numpy") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118 (no mapping)


@each_model
def test_the_tokenizer_fills_the_vocabulary_and_ends_with_its_own_eos(name):
    architecture, _ = policy(name)
    assert len(tokenizer(name)) == architecture.spec.vocab_size == 32
    assert eos_ids(tokenizer(name), MODELS[name].folder) == (tokenizer(name).eos_token_id,)


@each_model
def test_greedy_held_out_accuracy_leaves_room_for_reinforcement_learning(name):
    low, high = MODELS[name].greedy
    assert low <= accuracy_metrics("accuracy", [verdicts(name, 0.0)])["accuracy"] <= high


@each_model
def test_sampling_is_about_as_accurate_as_greedy_decoding(name):
    assert accuracy_metrics("accuracy", [verdicts(name, 1.0)])["accuracy"] == pytest.approx(
        accuracy_metrics("accuracy", [verdicts(name, 0.0)])["accuracy"], abs=0.12
    )


@each_model
def test_every_greedy_completion_ends_by_itself_in_the_right_form(name):
    batch = verdicts(name, 0.0)
    assert batch.finished_EN.all()
    assert [text for texts in batch.texts for text in texts if not FORM.fullmatch(text)] == []


@each_model
def test_the_habit_to_unlearn_is_reading_times_as_plus(name):
    batch = verdicts(name, 0.0)
    has_times = np.array(["*" in question(problem) for problem in batch.problems])
    assert batch.correct_EN[~has_times].mean() > 0.9
    assert batch.correct_EN[has_times].mean() < 0.2


@each_model
def test_the_right_rule_has_support_in_samples(name):
    batch = verdicts(name, 1.0)
    has_times = np.array(["*" in question(problem) for problem in batch.problems])
    low, high = MODELS[name].with_times
    assert low < batch.correct_EN[has_times].mean() < high
