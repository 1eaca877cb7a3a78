"""The decoder's logits against transformers' torch models: frozen ones always, living ones where torch is installed."""

import dataclasses
import json
import os
import runpy
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pods_jax.models.decoder import Decoder
from pods_jax.models.families import read_spec
from pods_jax.models.hf_weights import export_folder, load_params
from pods_jax.models.weight_table import array_shapes

REFERENCE = Path(__file__).parent / "reference"
RECIPE = runpy.run_path(str(REFERENCE / "make_reference.py"))
CASES = RECIPE["CASES"]


def our_logits(folder, tokens, spec=None):
    spec = spec or read_spec(folder)
    structure, state = nnx.split(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, load_params(folder, spec, dtype=jnp.float32))
    return np.asarray(jax.jit(lambda state, tokens: nnx.merge(structure, state)(tokens))(state, jnp.asarray(tokens, jnp.int32)))


def largest_difference(a, b):
    assert a.shape == b.shape
    return np.abs(a.astype(np.float64) - b.astype(np.float64)).max()


@pytest.mark.parametrize("case", CASES)
def test_the_loaders_arrays_are_the_decoders_parameters(case, tmp_path):
    RECIPE["write_checkpoint"](tmp_path, CASES[case])
    spec = read_spec(tmp_path)
    state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0)))))
    paths = {tuple(key.key for key in path): leaf.shape for path, leaf in jax.tree.leaves_with_path(state)}
    assert paths == array_shapes(spec)


# --- frozen


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_frozen_ones(case, tmp_path):
    frozen = np.load(REFERENCE / f"{case}.npz")
    RECIPE["write_checkpoint"](tmp_path, json.loads(str(frozen["config"])))
    assert largest_difference(our_logits(tmp_path, frozen["tokens"]), frozen["logits"]) < 1e-4


def test_frozen_llama3_logits_depend_on_the_scaling(tmp_path):
    frozen = np.load(REFERENCE / "llama3_scaled.npz")
    RECIPE["write_checkpoint"](tmp_path, json.loads(str(frozen["config"])))
    unscaled = dataclasses.replace(read_spec(tmp_path), rope_scaling=None)
    assert largest_difference(our_logits(tmp_path, frozen["tokens"], unscaled), frozen["logits"]) > 1e-2


# --- against torch


@pytest.fixture(scope="module")
def hf():
    """Transformers with torch, its warnings about its own dependencies silenced."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch", reason="torch is not installed: logits are compared with the frozen ones alone")
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401 (lazy imports happen here, under the filter)
    transformers.utils.logging.disable_progress_bar()
    return transformers


def random_model(hf, config, dtype="float32"):
    """A torch model whose every parameter is random, norms and biases too, which a fresh model has at 1 and 0."""
    import torch  # pyright: ignore[reportMissingImports]

    settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(config["model_type"], **settings))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(float("norm" in name) + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.to(getattr(torch, dtype)).eval()


def loaded(hf, folder):
    model, info = hf.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", output_loading_info=True)
    assert not any(info.values()), info
    return model


def torch_logits(model, tokens):
    import torch  # pyright: ignore[reportMissingImports]

    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def random_tokens(config):
    return np.random.default_rng(3).integers(0, config["vocab_size"], size=(2, 29))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_torchs(hf, case, tmp_path):
    model, tokens = random_model(hf, CASES[case]), random_tokens(CASES[case])
    model.save_pretrained(tmp_path)
    assert largest_difference(our_logits(tmp_path, tokens), torch_logits(model, tokens)) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_precision_checkpoint_in_shards_gives_torchs_logits(hf, dtype, tmp_path):
    model, tokens = random_model(hf, CASES["qwen2_untied"], dtype), random_tokens(CASES["qwen2_untied"])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    # Reloaded as float32, since casting the half-precision model up would keep its rotary frequencies rounded.
    assert largest_difference(our_logits(tmp_path, tokens), torch_logits(loaded(hf, tmp_path), tokens)) < 1e-4


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 20_000], ids=["single", "sharded"])
@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_an_export_with_equal_logits(hf, case, shard_bytes, tmp_path):
    model, tokens = random_model(hf, CASES[case]), random_tokens(CASES[case])
    model.save_pretrained(tmp_path / "source")
    spec = read_spec(tmp_path / "source")
    params = load_params(tmp_path / "source", spec, dtype=jnp.float32)
    export_folder(params, spec, tmp_path / "source", tmp_path / "export", dtype=jnp.float32, shard_bytes=shard_bytes)
    files = len(list((tmp_path / "export").glob("*.safetensors")))
    assert files == 1 if shard_bytes == 5_000_000_000 else files > 1
    np.testing.assert_array_equal(torch_logits(loaded(hf, tmp_path / "export"), tokens), torch_logits(model, tokens))


def test_transformers_loads_a_bfloat16_export_as_bfloat16(hf, tmp_path):
    import torch  # pyright: ignore[reportMissingImports]

    model, tokens = random_model(hf, CASES["qwen3"]), random_tokens(CASES["qwen3"])
    model.save_pretrained(tmp_path / "source")
    spec = read_spec(tmp_path / "source")
    params = load_params(tmp_path / "source", spec, dtype=jnp.float32)
    export_folder(params, spec, tmp_path / "source", tmp_path / "export", dtype=jnp.bfloat16)
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto").dtype == torch.bfloat16
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    np.testing.assert_array_equal(torch_logits(loaded(hf, tmp_path / "export"), tokens), torch_logits(model, tokens))
