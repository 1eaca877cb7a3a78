import json
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from pods_jax.assembly.policy import find_base, load_policy, make_lora, model_folder
from pods_jax.config.entries import Config
from pods_jax.config.fields import ConfigError
from pods_jax.config.sections import LoraConfig, ModelConfig
from pods_jax.devices.sharding import make_mesh
from pods_jax.models.decoder import Decoder
from pods_jax.models.families import read_spec
from pods_jax.models.hf_weights import export_folder, load_params
from pods_jax.models.lora import A, B, LoraSpec, join, merge
from pods_jax.models.peft_adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Base,
    export_adapters,
    is_adapter_folder,
    load_adapters,
    read_lora,
)
from pods_jax.train import _export

LORA = LoraSpec(rank=3, alpha=5.0)
FEW = LoraSpec(rank=2, alpha=1.0, targets=("q", "o", "down"))
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 17))


@pytest.fixture(scope="module")
def spec(tiny_model):
    return read_spec(tiny_model)


@pytest.fixture(scope="module")
def base(tiny_model, spec):
    return load_params(tiny_model, spec, dtype=jnp.float32)


def adapted(base, spec, lora):
    """The base with random adapters, B too."""
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0), lora=lora))))["layers"]
    rng = np.random.default_rng(4)
    names = [name for name in shapes if name.endswith((A, B))]
    layers = {name: jnp.asarray(0.3 * rng.normal(size=shapes[name].shape), jnp.float32) for name in names}
    return join({"layers": layers}, base)


def our_logits(params, spec, lora=None):
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0), lora=lora)))
    return np.asarray(jax.jit(lambda p, t: nnx.merge(graph, p)(t))(params, jnp.asarray(TOKENS, jnp.int32)))


@pytest.fixture(params=[LORA, FEW], ids=["everywhere", "few"])
def exported(request, base, spec, tiny_model, tmp_path):
    """Spec, parameters and folder of exported adapters."""
    params = adapted(base, spec, request.param)
    export_adapters(params, spec, request.param, Base(str(tiny_model)), tmp_path / "adapter")
    return request.param, params, tmp_path / "adapter"


# --- out and in again ---------------------------------------------------------------------------------------------------------


def test_adapters_come_back_as_they_were_written(exported, spec, tiny_model):
    lora, params, folder = exported
    assert {file.name for file in folder.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}
    assert is_adapter_folder(folder)
    assert len(json.loads((folder / CONFIG_FILE).read_text())["target_modules"]) == len(lora.targets)
    assert read_lora(folder) == (lora, Base(str(tiny_model)))
    arrays = load_adapters(folder, spec, lora)
    assert set(arrays) == {name + suffix for name in lora.targets for suffix in (A, B)}
    for name, array in arrays.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, params["layers"][name])


def test_a_folder_of_adapters_is_a_policy_on_its_base(exported, spec, tiny_model):
    lora, params, folder = exported
    assert model_folder(str(folder)) == tiny_model
    assert find_base(str(folder)) == find_base(str(tiny_model)) == Base(str(tiny_model.resolve()))
    assert find_base("bundled") == Base(str(model_folder("bundled").resolve()))
    assert not is_adapter_folder(tiny_model)
    mesh = make_mesh((2, 2, 2))
    with jax.set_mesh(mesh):
        architecture, loaded = load_policy(ModelConfig(path=str(folder)), mesh)
    assert architecture.lora == lora
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for ours, before in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(ours, before)
    assert jax.tree.map(lambda x: x.sharding, loaded) == jax.tree.map(lambda x: x.sharding, architecture.shapes)
    with pytest.raises(ConfigError, match=r"holds adapters: leave lora.rank at 0"):
        load_policy(ModelConfig(path=str(folder)), mesh, lora=LORA)


@pytest.fixture
def hub(tiny_model, monkeypatch):
    """A Hub that has one model at every revision; the list of what was asked of it."""
    asked = []

    def snapshot_download(name, *, revision, allow_patterns):
        asked.append((name, revision))
        return str(tiny_model)

    monkeypatch.setattr("pods_jax.assembly.policy.snapshot_download", snapshot_download)
    return asked


@pytest.mark.parametrize("revision", [None, "v1.0"])
def test_adapters_of_a_hub_model_record_its_id_and_revision_and_load_on_it(revision, base, spec, tmp_path, hub):
    assert find_base("owner/model", revision) == Base("owner/model", revision)
    params = adapted(base, spec, FEW)
    export_adapters(params, spec, FEW, find_base("owner/model", revision), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("owner/model", revision)
    assert read_lora(tmp_path / "adapter") == (FEW, Base("owner/model", revision))
    hub.clear()
    # The revision of model.path is that of the adapters, were they on the Hub; their base has its own.
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    _, loaded = load_policy(ModelConfig(path=str(tmp_path / "adapter"), revision="other"), mesh)
    assert set(hub) == {("owner/model", revision)}
    np.testing.assert_array_equal(loaded["layers"]["q" + B], params["layers"]["q" + B])
    assert find_base(str(tmp_path / "adapter"), "other") == Base("owner/model", revision)


def test_a_run_exports_the_revision_of_its_hub_model(base, spec, tmp_path, hub):
    config = Config(model=ModelConfig(path="owner/model", revision="v1.0"), lora=LoraConfig(rank=2))
    architecture, params = load_policy(config.model, make_mesh((1, 1, 1), jax.devices()[:1]), lora=make_lora(config.lora))
    _export(config, architecture, params, tmp_path)
    assert set(hub) == {("owner/model", "v1.0")}
    assert json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())["revision"] == "v1.0"
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_a_config_without_a_revision_means_the_newest(folder):
    config = json.loads((folder / CONFIG_FILE).read_text())
    del config["revision"]
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    assert read_lora(folder)[1].revision is None


def test_bfloat16_adapters_load_as_float32(exported, spec):
    lora, params, folder = exported
    tensors = load_file(folder / WEIGHTS_FILE)
    save_file({name: value.astype(jnp.bfloat16) for name, value in tensors.items()}, folder / WEIGHTS_FILE)
    for name, array in load_adapters(folder, spec, lora).items():
        np.testing.assert_array_equal(array, params["layers"][name].astype(jnp.bfloat16).astype(jnp.float32))


def test_only_adapters_are_replaced_and_only_on_request(exported, spec, tiny_model, tmp_path):
    lora, params, folder = exported
    with pytest.raises(FileExistsError, match="cannot export adapters to"):
        export_adapters(params, spec, lora, Base(str(tiny_model)), folder)
    doubled = join({"layers": {name: 2 * params["layers"][name] for name in load_adapters(folder, spec, lora)}}, params)
    export_adapters(doubled, spec, lora, Base(str(tiny_model)), folder, overwrite=True)
    np.testing.assert_array_equal(load_adapters(folder, spec, lora)["q" + A], doubled["layers"]["q" + A])
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileExistsError, match="cannot export adapters to"):
        export_adapters(params, spec, lora, Base(str(tiny_model)), tmp_path / "mine", overwrite=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter", "mine"]


# --- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(base, spec, tiny_model, tmp_path):
    export_adapters(adapted(base, spec, FEW), spec, FEW, Base(str(tiny_model)), tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "IA3"},
        {"bias": "all"},
        {"use_rslora": True},
        {"use_dora": True},
        {"fan_in_fan_out": True},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"layers_to_transform": [0]},
        {"lora_bias": True},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"alora_invocation_tokens": [1]},
        {"init_lora_weights": "pissa_niter_4"},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": "all-linear"},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_config_that_asks_for_something_else_is_refused_by_name(change, folder):
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | change))
    (key,) = change
    with pytest.raises(ValueError, match=rf"{CONFIG_FILE}: {key}=.* is not supported"):
        read_lora(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"r": 2, "lora_alpha": 1, "target_modules": ["q_proj"]}'])
def test_a_broken_config_is_refused(text, folder):
    (folder / CONFIG_FILE).write_text(text)
    with pytest.raises(ValueError, match=f"{CONFIG_FILE} is no PEFT config"):
        read_lora(folder)


def test_tensors_that_are_unknown_missing_or_misshapen_are_refused_by_name(folder, spec):
    tensors = load_file(folder / WEIGHTS_FILE)
    name = next(name for name in tensors if "layers.1.mlp.down_proj.lora_A" in name)
    magnitude = name.replace("lora_A.weight", "lora_magnitude_vector")
    without = {other: value for other, value in tensors.items() if other != name}
    for changed, words in (
        (tensors | {magnitude: np.ones(3, np.float32)}, f"unknown tensors: {magnitude}"),
        (without, f"has no {name}"),
        (without | {name: np.ascontiguousarray(tensors[name].T)}, f"{name} in .* is \\(24, 2\\); the model needs \\(2, 24\\)"),
    ):
        save_file(changed, folder / WEIGHTS_FILE)
        with pytest.raises(ValueError, match=words):
            load_adapters(folder, spec, FEW)


# --- against PEFT -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peft():
    """PEFT with transformers and torch, their warnings about their own dependencies silenced."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch", reason="torch is not installed: adapters are compared with our own reading alone")
        peft = pytest.importorskip("peft", reason="peft is not installed: adapters are compared with our own reading alone")
        import transformers
        from transformers import AutoModelForCausalLM  # noqa: F401 (a lazy import that happens here, under the filter)
    transformers.utils.logging.disable_progress_bar()
    return peft


def torch_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def torch_logits(model):
    import torch  # pyright: ignore[reportMissingImports]

    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


@pytest.mark.filterwarnings("ignore")
def test_peft_loads_exported_adapters_with_our_logits(peft, exported, spec, tiny_model):
    lora, params, folder = exported
    ours, before = our_logits(params, spec, lora), torch_logits(torch_model(tiny_model))
    theirs = peft.PeftModel.from_pretrained(torch_model(tiny_model), folder).eval()
    np.testing.assert_allclose(torch_logits(theirs), ours, atol=1e-4, rtol=0)
    assert np.abs(ours - before).max() > 0.1
    with theirs.disable_adapter():
        np.testing.assert_array_equal(torch_logits(theirs), before)


@pytest.mark.filterwarnings("ignore")
def test_peft_finds_the_base_by_the_name_in_the_config(peft, exported, spec):
    lora, params, folder = exported
    model = peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    np.testing.assert_allclose(torch_logits(model), our_logits(params, spec, lora), atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_a_merged_export_with_our_logits(peft, exported, spec, tiny_model, tmp_path):
    lora, params, _ = exported
    export_folder(merge(params, lora.scale), spec, tiny_model, tmp_path / "merged", dtype=jnp.float32)
    ours = our_logits(params, spec, lora)
    np.testing.assert_allclose(torch_logits(torch_model(tmp_path / "merged")), ours, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_adapters_that_peft_saved_load_with_its_logits(peft, base, spec, tiny_model, tmp_path):
    import torch  # pyright: ignore[reportMissingImports]

    modules = ["v_proj", "gate_proj", "o_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = peft.get_peft_model(torch_model(tiny_model), config).eval()
    model.save_pretrained(tmp_path)
    lora, named = read_lora(tmp_path)
    assert lora == LoraSpec(4, 6.0, ("v", "o", "gate"))
    assert named == Base(str(tiny_model))
    layers = {key: jnp.asarray(value) for key, value in load_adapters(tmp_path, spec, lora).items()}
    ours = our_logits(join({"layers": layers}, base), spec, lora)
    np.testing.assert_allclose(ours, torch_logits(model), atol=1e-4, rtol=0)
    assert np.abs(ours - our_logits(base, spec)).max() > 0.1
