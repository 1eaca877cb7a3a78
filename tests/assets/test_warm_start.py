from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pods_jax.assembly.policy import make_architecture
from pods_jax.assets.warm_start import (
    WarmStartConfig,
    batches,
    cross_entropy,
    fit,
    initial_params,
    main,
    question,
    warm_start,
    write_description,
)
from pods_jax.config.fields import ConfigError
from pods_jax.config.sections import ModelConfig
from pods_jax.data.arithmetic import demonstration, load_problems
from pods_jax.data.prompts import load_tokenizer
from pods_jax.data.splitting import is_held_out
from pods_jax.devices.sharding import make_mesh
from pods_jax.models.families import read_spec
from pods_jax.models.hf_weights import load_params

SMALL = WarmStartConfig(steps=12, batch=8, held_out_problems=8)


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    folder = tmp_path_factory.mktemp("described")
    write_description(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(described):
    return load_tokenizer(described)


@pytest.fixture(scope="module")
def graph(described):
    return make_architecture(ModelConfig(), read_spec(described), make_mesh((1, 1, 1), jax.devices()[:1])).graph


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out, lines = tmp_path_factory.mktemp("trained") / "model", []
    return out, warm_start(replace(SMALL, out=str(out)), say=lines.append), lines


def demonstrated(config, tokenizer):
    """Prompt and completion of every demonstration as text, special tokens included."""

    def texts(tokens_BT, length_B):
        return tokenizer.batch_decode([tokens[:length] for tokens, length in zip(tokens_BT, length_B, strict=True)])

    for batch in batches(config, tokenizer):
        prompts, completions = texts(batch.prompt_BL, batch.prompt_length_B), texts(batch.tokens_BC, batch.length_B)
        yield from zip(prompts, completions, strict=True)


def test_a_few_steps_lower_the_loss(trained):
    _, losses, _ = trained
    assert len(losses) == SMALL.steps
    assert losses[0] > 0.8 * np.log(32)
    assert np.mean(losses[-3:]) < 0.8 * losses[0]


def test_the_written_folder_holds_the_parameters_that_training_ends_with(trained, described, graph, tokenizer):
    out, losses, _ = trained
    spec = read_spec(described)
    again, again_losses = fit(graph, initial_params(spec, SMALL.seed), batches(SMALL, tokenizer), SMALL, lambda line: None)
    assert again_losses == losses
    jax.tree.map(np.testing.assert_array_equal, load_params(out, spec, dtype="float32"), again)
    assert {f.name for f in out.iterdir()} == {f.name for f in described.iterdir()} | {"model.safetensors"}


def test_accuracy_is_said_before_the_folder_is_written(trained):
    out, _, lines = trained
    said = [line.split(":")[0] for line in lines[-3:]]
    assert said == ["held-out accuracy, greedy", "held-out accuracy, sampled", f"written to {out}"]


def test_another_seed_gives_other_parameters_and_other_demonstrations(described, tokenizer):
    first, other = (initial_params(read_spec(described), seed) for seed in (0, 1))
    assert not np.array_equal(first["embed"], other["embed"])
    assert list(demonstrated(SMALL, tokenizer)) != list(demonstrated(replace(SMALL, seed=1), tokenizer))


def test_matrices_start_with_the_deviation_of_the_config_and_norms_at_one(described):
    params = initial_params(read_spec(described), 0)
    assert float(jnp.std(params["layers"]["gate"])) == pytest.approx(0.08, rel=0.05)
    assert float(jnp.std(params["embed"])) == pytest.approx(0.08, rel=0.05)
    np.testing.assert_array_equal(params["layers"]["input_norm"], 1.0)
    np.testing.assert_array_equal(params["layers"]["q_bias"], 0.0)


@pytest.mark.parametrize("seed", [0, 7])
def test_no_held_out_problem_is_ever_demonstrated_and_none_twice(tokenizer, seed):
    pairs = list(demonstrated(WarmStartConfig(steps=40, batch=16, seed=seed), tokenizer))
    asked = [prompt.removeprefix("<bos>") for prompt, _ in pairs]
    assert not any(map(is_held_out, asked))
    assert len(set(asked)) == 640


@pytest.mark.parametrize("slip", [0.0, 1.0])
def test_a_demonstration_is_the_tasks_own_after_one_bos_and_ends_with_eos(tokenizer, slip):
    config = replace(SMALL, slip=slip)
    problems = load_problems("train", count=SMALL.steps * SMALL.batch, seed=SMALL.seed)
    rng = np.random.default_rng(0)
    expected = [(question(p), demonstration(question(p), slip=slip, rng=rng)) for p in problems]
    assert list(demonstrated(config, tokenizer)) == [(f"<bos>{asked}", f"{text}<eos>") for asked, text in expected]


def test_the_loss_is_the_plain_forwards_cross_entropy_of_completion_tokens_alone(described, graph, tokenizer):
    params = initial_params(read_spec(described), 0)
    batch = next(batches(replace(SMALL, batch=3), tokenizer))
    batch = replace(batch, length_B=np.array([32, 5, 17], np.int32))
    prompt = batch.prompt_BL.shape[1]
    tokens_BT = np.concatenate([batch.prompt_BL, batch.tokens_BC], axis=1)

    @jax.jit
    def both(params):
        return cross_entropy(graph, params, batch), jax.nn.log_softmax(nnx.merge(graph, params)(tokens_BT), axis=-1)

    loss, logp_BTV = jax.device_get(both(params))
    picked = [-logp_BTV[b, prompt + t - 1, batch.tokens_BC[b, t]] for b, n in enumerate(batch.length_B) for t in range(n)]
    assert float(loss) == pytest.approx(np.mean(picked), rel=1e-5)


def test_a_folder_that_is_no_model_is_refused_before_training(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match=f"out={tmp_path} exists and is no model folder"):
        warm_start(replace(SMALL, out=str(tmp_path)), say=pytest.fail)
    assert [f.name for f in tmp_path.iterdir()] == ["precious.txt"]


def test_demonstrations_have_the_share_of_multiplications_asked_for(tokenizer):
    config = WarmStartConfig(steps=20, batch=16, times_share=0.6)
    signs = [sign for prompt, _ in demonstrated(config, tokenizer) for sign in prompt.removeprefix("<bos>")[2:-1:2]]
    assert signs.count("*") / len(signs) == pytest.approx(0.6, abs=5 * np.sqrt(0.6 * 0.4 / len(signs)))
    with pytest.raises(ConfigError, match=r"times_share=0\.95 must be at most 0\.9"):
        WarmStartConfig(times_share=0.95)


def test_more_demonstrations_than_there_are_problems_are_refused():
    with pytest.raises(ConfigError, match="steps=1000 x batch=1001 asks for more than 1,000,000"):
        WarmStartConfig(steps=1000, batch=1001)


def test_the_command_line_refuses_with_code_2_and_names_the_option(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path)]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["--step", "3"])
    assert "the nearest is --steps" in capsys.readouterr().err


def test_help_lists_every_number(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"--{name} " in text for name in vars(SMALL))
