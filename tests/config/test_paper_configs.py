"""The paper's settings: every configuration builds all programs of its step, as shapes alone, with the paper's arithmetic."""

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pods_jax.assembly.forecast import memory_lines
from pods_jax.assembly.inputs import Inputs, make_verifier
from pods_jax.assembly.parts import make_parts
from pods_jax.assembly.policy import make_architecture, make_lora
from pods_jax.assembly.texts import find_texts
from pods_jax.assets.tokenizer import write_tokenizer
from pods_jax.config.command_line import config_difference, from_yaml
from pods_jax.config.entries import Config, arithmetic, check_devices
from pods_jax.devices.sharding import group_shards, make_mesh, named_sharding
from pods_jax.models.families import read_spec
from pods_jax.models.lora import join, split_adapters
from pods_jax.rollout.programs import Call
from pods_jax.types import Problem, Prompt, PromptBatch
from pods_jax.update.learner import abstract_state
from pods_jax.update.microbatches import deal_rollouts, micro_batch_shape
from pods_jax.update.optim import make_optimizer, make_schedule

FOLDER = Path(__file__).parents[2] / "configs" / "paper"

QWEN2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
MODELS = {
    "Qwen/Qwen2.5-3B-Instruct": QWEN2_5
    | {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_window_layers": 70,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "Qwen/Qwen2.5-7B-Instruct": QWEN2_5
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    "meta-llama/Llama-3.2-3B-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
}
# As their model cards and PEFT's count of trainable parameters at rank 64 on all seven projections say.
PARAMETERS = {
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
}
ADAPTERS = {"Qwen/Qwen2.5-3B-Instruct": 119_734_272, "meta-llama/Llama-3.2-3B-Instruct": 97_255_424}


@dataclass(frozen=True)
class Setting:
    """What the paper states: GPUs, rollouts generated and trained for each prompt, accumulation steps, longest completion."""

    model: str
    gpus: int
    task: str
    n: int
    m: int
    accumulation: int
    completion: int
    beta: float = 0.0

    @property
    def prompts(self):
        """One on each GPU."""
        return self.gpus


QWEN_3B, QWEN_7B, LLAMA_3B = MODELS
SETTINGS = {
    "gsm8k_qwen2.5_3b_lora": Setting(QWEN_3B, 1, "gsm8k", 64, 16, 1, 512),
    "gsm8k_qwen2.5_3b_lora_grpo": Setting(QWEN_3B, 1, "gsm8k", 16, 16, 1, 512),
    "math_qwen2.5_3b_lora": Setting(QWEN_3B, 1, "math", 32, 8, 1, 512),
    "math_qwen2.5_3b_lora_grpo": Setting(QWEN_3B, 1, "math", 8, 8, 1, 512),
    "gsm8k_llama3.2_3b_lora": Setting(LLAMA_3B, 1, "gsm8k", 64, 16, 1, 512, beta=0.04),
    "gsm8k_llama3.2_3b_lora_grpo": Setting(LLAMA_3B, 1, "gsm8k", 16, 16, 1, 512, beta=0.04),
    "gsm8k_qwen2.5_3b_full": Setting(QWEN_3B, 8, "gsm8k", 4 * 128, 4 * 32, 4, 1024),
    "gsm8k_qwen2.5_3b_full_grpo_ga": Setting(QWEN_3B, 8, "gsm8k", 16 * 32, 16 * 32, 16, 1024),
    "sciknoweval_qwen2.5_7b_full": Setting(QWEN_7B, 8, "sciknoweval_chemistry", 4 * 128, 4 * 32, 4, 1024),
    "sciknoweval_qwen2.5_7b_full_grpo_ga": Setting(QWEN_7B, 8, "sciknoweval_chemistry", 16 * 32, 16 * 32, 16, 1024),
}
COMPARED = {name: name.removesuffix("_grpo").removesuffix("_grpo_ga") for name in SETTINGS}
KEY = jax.eval_shape(partial(jax.random.key, 0))
each_setting = pytest.mark.parametrize("name", SETTINGS)


def read(name):
    return from_yaml(Config, (FOLDER / f"{name}.yaml").read_text())


def count(shapes):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By model: a Hugging Face folder without weights; the tokenizer is another's, whose ids all models have."""
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        write_tokenizer(root / name)
        (root / name / "config.json").write_text(json.dumps(config))
    return root


def test_every_setting_of_the_paper_and_its_baseline_has_a_file():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == SETTINGS.keys()
    assert set(Counter(COMPARED.values()).values()) == {2}


@each_setting
def test_what_a_step_generates_and_trains_is_the_papers(name):
    config, setting = read(name), SETTINGS[name]
    shape = check_devices(config, setting.gpus)
    assert shape == (1, setting.gpus, 1)
    assert (config.model.path, config.data.task) == (setting.model, setting.task)
    assert config.data.prompts_per_step == setting.prompts
    assert (config.rollout.n, config.kept) == (setting.n, setting.m)
    assert (config.selection.rule == "all") == name.endswith(("_grpo", "_grpo_ga"))
    micro_batch = config.update.micro_batch or setting.prompts * setting.m
    assert setting.prompts * setting.m == setting.accumulation * micro_batch
    generated, trained, _ = arithmetic(config)
    assert f"= {setting.gpus * setting.n:,} completions" in generated
    assert f"= {setting.gpus * setting.m:,} completions" in trained
    assert f"{setting.accumulation} micro-batch" in trained


@each_setting
def test_optimiser_lengths_and_rewards_are_the_papers(name):
    config, setting = read(name), SETTINGS[name]
    single, of = setting.gpus == 1, config.optimizer
    assert (of.learning_rate, of.schedule) == ((5e-6, "constant") if single else (2e-5, "cosine"))
    assert (of.beta1, of.beta2, of.weight_decay, of.clip_norm) == (0.9, 0.99, 0.1, 0.1)
    assert config.loss.beta == setting.beta
    assert config.rollout.temperature == 0.9
    assert (config.data.max_prompt_length, config.rollout.max_completion_length) == (512, setting.completion)
    assert config.eval.samples == 5
    schedule = make_schedule(of, config.run.steps)

    def rate_at(step):
        return float(jnp.asarray(schedule(step)))

    assert max(rate_at(step) for step in range(0, config.run.steps, 10)) == pytest.approx(of.learning_rate, rel=1e-2)
    assert rate_at(config.run.steps) == pytest.approx(of.learning_rate if single else 0.0, abs=1e-9)
    assert of.warmup_steps == (0 if single else math.ceil(0.1 * config.run.steps))


@each_setting
def test_a_right_answer_in_the_right_form_earns_what_the_paper_gives(name):
    config = read(name)
    problem = Problem("p", ({"role": "user", "content": "?"},), "18", "gsm8k", "number")
    with make_verifier(config.verify, config.reward, max_completion_length=8) as scorer:
        texts = ["<think>so</think><answer>18</answer>", "<think>so</think><answer>17</answer>", "it is -18", "it is 18"]
        earned = scorer.score([problem], [texts]).rewards_PN[0]
    last_number = 1.0 if SETTINGS[name].gpus == 1 else 0.0
    full, form = (1.2, 0.2) if SETTINGS[name].gpus == 1 else (3.0, 2.0)
    np.testing.assert_allclose(earned, [full, form, 0.0, last_number], rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != COMPARED[name]])
def test_a_baseline_differs_in_rollouts_and_selection_alone(name):
    differing = set(config_difference(read(name), read(COMPARED[name])))
    timing = {"run.name", "run.steps", "run.checkpoint_every", "eval.every"}
    assert differing - timing <= {"rollout.n", "selection.rule", "selection.m"}


@each_setting
def test_all_programs_of_a_step_fit_together_as_shapes(name, folders):
    config, setting = read(name), SETTINGS[name]
    # As on an accelerator, where the layer loop is a scan.
    config = replace(config, model=replace(config.model, path=str(folders / setting.model)))
    mesh = make_mesh(check_devices(config, setting.gpus), jax.devices()[: setting.gpus])
    spec, texts = read_spec(folders / setting.model), find_texts(config.model, config.data)
    architecture = make_architecture(config.model, spec, mesh, layers="scan", remat=True, lora=make_lora(config.lora))
    prompt = Prompt(Problem("p", ({"role": "user", "content": "?"},), "18", "gsm8k", "number"), (1, 2))
    inputs = Inputs(Path(), mesh, Judge(), texts, [prompt] * setting.prompts, [prompt], None)  # type: ignore[arg-type]
    before = sum(x.nbytes for x in jax.live_arrays())
    with jax.set_mesh(mesh):
        parts, _ = make_parts(config, inputs, architecture, None, None)  # type: ignore[arg-type]
        trained, frozen = (architecture.shapes, None) if architecture.lora is None else split_adapters(architecture.shapes)
        state = abstract_state(trained, optimizer=make_optimizer(config.optimizer))
        prompts, rollouts = rolled_out(parts, join(trained, frozen), setting)
        kept = kept_of(parts, prompts, rollouts, setting)
        deal, rate = deal_of(parts, setting), jax.ShapeDtypeStruct((), jnp.float32)
        logp_ref = None
        if config.loss.beta > 0:
            logp_ref = jax.eval_shape(parts.learner._reference_logp, frozen, kept, deal)
        after, metrics = jax.eval_shape(parts.learner.update, state, kept, frozen, logp_ref, rate, deal)
    assert {x.shape for x in jax.tree.leaves(metrics)} == {()}
    assert described(after) == described(state)
    assert kept.tokens_PMC.shape == (setting.prompts, setting.m, setting.completion)
    assert sum(x.nbytes for x in jax.live_arrays()) - before < 2**20

    assert count(frozen or trained) == PARAMETERS[setting.model]
    assert {x.dtype for x in jax.tree.leaves(trained)} == {jnp.dtype(jnp.float32)}
    if frozen:
        assert config.lora.rank == 64
        assert count(trained) == ADAPTERS[setting.model]
        assert architecture.lora is not None
        assert architecture.lora.scale == 1
        assert {x.dtype for x in jax.tree.leaves(frozen)} == {jnp.dtype(jnp.bfloat16)}
    shards = [math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(architecture.shapes)]
    assert sum(shards) < 1.01 * count(architecture.shapes) / setting.gpus
    assert f"{count(architecture.shapes):,} parameters" in memory_lines(config, architecture, mesh, parts.engine)[0]


def deal_of(parts, setting):
    """Shapes of the micro-batches that train everything."""
    numbers = {"completion_length": setting.completion, "prompt_length": 512, "multiple": 8, "rungs": 0}
    shape = micro_batch_shape(setting.prompts, setting.m, parts.learner.settings.micro_batch, group_shards())
    lengths = np.full((setting.prompts, setting.m), setting.completion)
    deal = deal_rollouts(lengths, np.ones(lengths.shape), **numbers, shape=shape, shards=group_shards())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), deal)


class Judge:
    """Stands where the scorer does; nothing is judged."""

    def correct(self, problems, texts):
        raise AssertionError("nothing is generated here")


def described(tree):
    return [(jax.tree_util.keystr(path), x.shape, x.dtype) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def rolled_out(parts, params, setting):
    """Shapes of prompts and rollouts, through every program of the engine."""
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=named_sharding(parts.mesh, ("prompts",)))
    prompts = PromptBatch(shape((setting.prompts, 512)), shape((setting.prompts,)))  # type: ignore[arg-type]
    weights = jax.eval_shape(parts.engine.prepare, params)
    assert {x.dtype for x in jax.tree.leaves(weights)} == {jnp.dtype(jnp.bfloat16)}
    return prompts, parts.engine.visit_programs(Call.results, weights, prompts, parts.sampling)


def kept_of(parts, prompts, rollouts, setting):
    """Shapes of the kept batch, for rewards of three parts."""
    scored = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    groups = (setting.prompts, setting.n)
    valid = jax.ShapeDtypeStruct(groups, jnp.bool_)
    keep = partial(parts.keep, completion_length=setting.completion)
    each = {name: scored(groups) for name in ("correct", "format", "tag_count")}
    kept, _ = jax.eval_shape(keep, prompts, rollouts, scored(groups), each, valid, KEY)
    assert kept.index_PM.shape == (setting.prompts, setting.m)
    return kept
