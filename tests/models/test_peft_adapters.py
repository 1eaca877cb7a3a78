import json
import os
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from pods_jax.assembly.exporting import check_tokens
from pods_jax.assembly.policy import ModelFolders, find_base, find_folders, load_policy, make_lora, model_folder
from pods_jax.assembly.texts import find_texts
from pods_jax.config.entries import Config
from pods_jax.config.fields import ConfigError
from pods_jax.config.sections import LoraConfig, ModelConfig
from pods_jax.data.prompts import load_tokenizer
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
    _export(config, find_texts(config.model, config.data), architecture, params, tmp_path)
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
        {"init_lora_weights": "lora_ga"},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": ["gaussian"]},
        {"lora_ga_config": {"direction": "ArB2r"}},
        {"use_bdlora": {"nblocks": 2}},
        {"kasa_config": {"beta": 0.1}},
        {"arrow_config": {"top_k": 3}},
        {"velora_config": {"num_groups": 4}},
        {"monteclora_config": {"num_samples": 2}},
        {"a_later_invention": True},
        {"r": "8", "words": "must be an integer"},
        {"r": True, "words": "must be an integer"},
        {"lora_alpha": "16", "words": "must be a number"},
        {"lora_alpha": float("nan"), "words": "must be a number"},
        {"base_model_name_or_path": None, "words": "must name the model"},
        {"base_model_name_or_path": ["a/b"], "words": "must name the model"},
        {"revision": 3, "words": "must be a branch"},
        {"target_modules": [], "words": "is not supported"},
        {"target_modules": [["q_proj"]], "words": "is not supported"},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": "all-linear"},
    ],
    ids=lambda change: f"{next(iter(change))}-{next(iter(change.values()))}",
)
def test_a_config_that_asks_for_something_else_is_refused_by_name(change, folder):
    config = json.loads((folder / CONFIG_FILE).read_text())
    key, words = next(iter(change)), change.get("words", "is not supported")
    (folder / CONFIG_FILE).write_text(json.dumps(config | {key: change[key]}))
    with pytest.raises(ValueError, match=rf"{CONFIG_FILE}: {key}=.* {words}"):
        read_lora(folder)


def test_settings_that_change_nothing_pass(folder):
    """All that PEFT writes into the config of plain adapters today, and what older versions wrote."""
    harmless = {
        "alora_invocation_tokens": None,
        "arrow_config": None,
        "auto_mapping": {"base_model_class": "Qwen2ForCausalLM", "parent_library": "transformers", "unsloth_fixed": True},
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": {"rho": 2.0},
        "exclude_modules": ["lm_head"],
        "init_lora_weights": "eva",
        "layer_replication": None,
        "layers_pattern": None,
        "loftq_config": {},
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "target_parameters": None,
        "trainable_token_indices": None,
        "use_qalora": False,
    }
    plain = read_lora(folder)
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | harmless))
    assert read_lora(folder) == plain


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a JSON list"),
        ("{}", "peft_type=None"),
        (
            '{"peft_type": "LORA", "r": 2, "lora_alpha": 1, "target_modules": ["q_proj"]}',
            "base_model_name_or_path=None must name",
        ),
        ('{"peft_type": "LORA", "r": 2, "r": 3}', "r stands there twice, as 2 and as 3"),
    ],
)
def test_a_broken_config_is_refused(text, words, folder):
    (folder / CONFIG_FILE).write_text(text)
    with pytest.raises(ValueError, match=rf"{CONFIG_FILE}.*{words}") as error:
        read_lora(folder)
    assert "\n" not in str(error.value)


def test_tensors_that_are_unknown_missing_or_misshapen_are_refused_by_name(folder, spec):
    tensors = load_file(folder / WEIGHTS_FILE)
    name = next(name for name in tensors if "layers.1.mlp.down_proj.lora_A" in name)
    magnitude = name.replace("lora_A.weight", "lora_magnitude_vector")
    nan = tensors[name].copy()
    nan[1, 2] = np.nan
    without = {other: value for other, value in tensors.items() if other != name}
    for changed, words in (
        (tensors | {name: nan}, rf"{name} in .* holds nan at \[1, 2\]"),
        (tensors | {name: np.zeros((2, 24), np.int8)}, f"{name} in .* is I8, expected F32, BF16, F16"),
        (tensors | {magnitude: np.ones(3, np.float32)}, f"unknown tensors: {magnitude}"),
        (without, f"has no {name}"),
        (without | {name: np.ascontiguousarray(tensors[name].T)}, f"{name} in .* is \\(24, 2\\); the model needs \\(2, 24\\)"),
    ):
        save_file(changed, folder / WEIGHTS_FILE)
        with pytest.raises(ValueError, match=words):
            load_adapters(folder, spec, FEW)


def test_weights_that_cannot_be_read_are_named(folder, spec):
    (folder / WEIGHTS_FILE).write_bytes(b"cut off")
    with pytest.raises(ValueError, match=f"{WEIGHTS_FILE} is not a readable safetensors file"):
        load_adapters(folder, spec, FEW)
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=f"{WEIGHTS_FILE} does not exist; convert adapter_model.bin to safetensors"):
        load_adapters(folder, spec, FEW)


def test_adapters_that_are_not_finite_are_not_exported(base, spec, tiny_model, tmp_path):
    params = adapted(base, spec, FEW)
    broken = join({"layers": {"o" + A: params["layers"]["o" + A].at[1].set(jnp.inf)}}, params)
    with pytest.raises(ValueError, match=r"layers.1.self_attn.o_proj.lora_A.weight holds inf at"):
        export_adapters(broken, spec, FEW, Base(str(tiny_model)), tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_could_mean_two_models_is_refused(folder, tiny_model):
    shutil.copyfile(tiny_model / "config.json", folder / "config.json")
    assert find_folders(str(folder)).model == tiny_model
    shutil.copyfile(tiny_model / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.path=.* holds a model and adapters, .* give each its own folder"):
        find_folders(str(folder))


def test_a_base_that_is_no_model_is_refused_by_the_adapters_file(folder, tmp_path):
    config = json.loads((folder / CONFIG_FILE).read_text())
    for name, words in ((str(tmp_path / "gone"), "is not a folder"), (str(folder), "holds adapters")):
        other = tmp_path / "other"
        other.mkdir(exist_ok=True)
        (other / CONFIG_FILE).write_text(json.dumps(config | {"base_model_name_or_path": name}))
        with pytest.raises(ConfigError, match=rf"{CONFIG_FILE}: base_model_name_or_path={name}.* {words}"):
            find_folders(str(other))


# --- the folder's own tokenizer -----------------------------------------------------------------------------------------------


@pytest.fixture
def own_texts(folder, tiny_model):
    """Adapters with their own template and stop ids, beside the tokenizer's files."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_model / name, folder / name)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    return folder


def test_the_folders_own_tokenizer_template_and_stop_ids_go_first(own_texts, tiny_model):
    folders = find_folders(str(own_texts))
    assert folders == ModelFolders(tiny_model, own_texts, own_texts, own_texts)
    (own_texts / "generation_config.json").unlink()
    assert find_folders(str(own_texts)).generation == tiny_model
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (own_texts / name).unlink()
    assert find_folders(str(own_texts)) == ModelFolders(tiny_model, own_texts, tiny_model, tiny_model)
    assert find_folders(str(tiny_model)) == ModelFolders(tiny_model, None, tiny_model, tiny_model)


def test_both_exports_carry_the_folders_own_tokenizer(own_texts, tiny_model, tmp_path):
    load_tokenizer(tiny_model).save_pretrained(str(own_texts))
    (own_texts / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    config = Config(model=ModelConfig(path=str(own_texts)))
    architecture, params = load_policy(config.model, make_mesh((1, 1, 1), jax.devices()[:1]))
    _export(config, find_texts(config.model, config.data), architecture, params, tmp_path / "run")
    for export in (tmp_path / "run" / "adapter", tmp_path / "run" / "export"):
        for name in ("chat_template.jinja", "generation_config.json"):
            assert (export / name).read_text() == (own_texts / name).read_text(), name
        check_tokens(load_tokenizer(own_texts), export)
        check_tokens(load_tokenizer(export), own_texts)
    assert not (tmp_path / "run" / "adapter" / "config.json").exists()
    assert find_folders(str(tmp_path / "run" / "adapter")).tokenizer == tmp_path / "run" / "adapter"


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_an_export_that_encodes_otherwise_is_refused(file, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "export")
    tokenizer = load_tokenizer(tiny_model)
    check_tokens(tokenizer, tmp_path / "export")
    text = (tmp_path / "export" / file).read_text()
    changed = {"tokenizer.json": text.replace('"1"', '"A"'), "chat_template.jinja": text + "!"}
    changed["tokenizer_config.json"] = text.replace(str(tokenizer.eos_token), str(tokenizer.bos_token))
    assert changed[file] != text
    (tmp_path / "export" / file).write_text(changed[file])
    with pytest.raises(RuntimeError, match=r"export has another (encoding|special|chat)"):
        check_tokens(tokenizer, tmp_path / "export")


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
