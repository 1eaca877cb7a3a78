import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from pods_jax.models.families import read_spec
from pods_jax.models.hf_weights import export_folder, load_params
from pods_jax.models.weight_files import first_not_finite
from pods_jax.models.weight_table import array_shapes

RECIPE = runpy.run_path(str(Path(__file__).parent / "reference" / "make_reference.py"))
CASES = RECIPE["CASES"]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GATE0, GATE1 = "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def folder(tmp_path):
    RECIPE["write_checkpoint"](tmp_path / "source", CASES["qwen2_untied"])
    return tmp_path / "source"


def load_file(file):
    with safe_open(file, framework="numpy") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def load(folder, dtype=jnp.float32, **options):
    return load_params(folder, read_spec(folder), dtype=dtype, **options)


def rewrite(folder, change):
    """Applies ``change`` to the tensors of the folder's single file and writes them back."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder, tensors, parts):
    """Replaces the single file by shard files with the named tensors and an index."""
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate(parts):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


# --- loading


@pytest.mark.parametrize("case", CASES)
def test_the_tree_has_the_arrays_that_the_spec_names(case, tmp_path):
    RECIPE["write_checkpoint"](tmp_path, CASES[case])
    params, config = load(tmp_path), CASES[case]
    paths = {tuple(key.key for key in path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    assert paths == array_shapes(read_spec(tmp_path))
    assert ("head" in params) != config["tie_word_embeddings"]
    assert ("q_bias" in params["layers"]) == (config["model_type"] == "qwen2")
    assert ("q_norm" in params["layers"]) == (config["model_type"] == "qwen3")


def test_every_array_holds_its_tensors_with_axes_in_our_order(folder):
    file, params = load_file(folder / "model.safetensors"), load(folder)
    layers, width, q_heads, kv_heads, head = 2, 60, 6, 3, 10
    np.testing.assert_array_equal(params["embed"], file[EMBED])
    np.testing.assert_array_equal(params["head"], file[HEAD].T)
    np.testing.assert_array_equal(params["final_norm"], file["model.norm.weight"])
    for layer in range(layers):
        at = f"model.layers.{layer}."
        ours = {name: array[layer] for name, array in params["layers"].items()}
        for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads)):
            for n in range(heads):
                rows = slice(n * head, (n + 1) * head)
                np.testing.assert_array_equal(ours[name][:, n, :], file[f"{at}self_attn.{name}_proj.weight"][rows].T)
                np.testing.assert_array_equal(ours[f"{name}_bias"][n], file[f"{at}self_attn.{name}_proj.bias"][rows])
        assert ours["o"].shape == (q_heads, head, width)
        for n in range(q_heads):
            columns = slice(n * head, (n + 1) * head)
            np.testing.assert_array_equal(ours["o"][n], file[f"{at}self_attn.o_proj.weight"][:, columns].T)
        for name in ("gate", "up", "down"):
            np.testing.assert_array_equal(ours[name], file[f"{at}mlp.{name}_proj.weight"].T)
        np.testing.assert_array_equal(ours["input_norm"], file[f"{at}input_layernorm.weight"])
        np.testing.assert_array_equal(ours["post_norm"], file[f"{at}post_attention_layernorm.weight"])


def test_a_sharded_folder_equals_the_single_file(folder):
    single, tensors = load(folder), load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shard(folder, tensors, [names[0::3], names[1::3], names[2::3]])
    assert_equal_trees(load(folder), single)


@pytest.mark.parametrize("file_dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_files_are_read_exactly(folder, file_dtype):
    rewrite(folder, lambda tensors: tensors.update({name: t.astype(file_dtype) for name, t in tensors.items()}))
    file, params = load_file(folder / "model.safetensors"), load(folder)
    assert params["embed"].dtype == jnp.float32
    np.testing.assert_array_equal(params["embed"], file[EMBED].astype(np.float32))
    np.testing.assert_array_equal(params["layers"]["gate"][1], file[GATE1].T.astype(np.float32))


def test_arrays_come_in_the_dtype_asked_for(folder):
    params = load(folder, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    file = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(params["embed"], file[EMBED].astype(ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match="dtype='int8' is not supported; supported: float32, bfloat16, float16"):
        load(folder, jnp.int8)


@pytest.mark.parametrize("stacked_on_host", [8_000, 10**9])
def test_arrays_come_straight_to_the_shards_asked_for(stacked_on_host, tmp_path, monkeypatch):
    RECIPE["write_checkpoint"](tmp_path, CASES["qwen2_untied"])
    mesh, asked = jax.make_mesh((2, 3), ("fsdp", "tensor"), devices=jax.devices()[:6]), {}

    def sharding_of(path):
        shape = array_shapes(read_spec(tmp_path))[path]
        first = 1 if path[0] == "layers" else 0  # the layer axis stays whole
        free = [None if axis < first or size % 2 else "fsdp" for axis, size in enumerate(shape)]
        only = free.index("fsdp") if "fsdp" in free else None
        asked[path] = jax.NamedSharding(mesh, jax.P(*("fsdp" if axis == only else None for axis in range(len(shape)))))
        return asked[path]

    expected = load(tmp_path)
    monkeypatch.setattr("pods_jax.models.hf_weights.STACKED_ON_HOST", stacked_on_host)
    params = load(tmp_path, sharding_of=sharding_of)
    assert sum("fsdp" in sharding.spec for sharding in asked.values()) > 5
    for path, leaf in jax.tree.leaves_with_path(params):
        assert leaf.sharding.is_equivalent_to(asked[tuple(key.key for key in path)], leaf.ndim)
    assert_equal_trees(params, expected)
    assert_equal_trees(load(tmp_path), expected)


def test_no_file_is_open_between_two_tensors(folder, monkeypatch):
    # The pages of an open file count as memory of the process.
    held = []

    class Counted:
        def __init__(self, file, framework):
            assert not held
            self.opened = safe_open(file, framework=framework)

        def __enter__(self):
            held.append(self)
            return self.opened.__enter__()

        def __exit__(self, *error):
            held.remove(self)
            return self.opened.__exit__(*error)

    expected = load(folder)
    monkeypatch.setattr("pods_jax.models.weight_files.safe_open", Counted)
    assert_equal_trees(load(folder), expected)
    assert not held


# --- loud on whatever does not fit, before any array is placed


def refuse_sharding(path):
    raise AssertionError(f"{path} was read before the headers were checked")


def refused(folder, *patterns):
    with pytest.raises(ValueError, match="do not fit the config") as error:
        load(folder, sharding_of=refuse_sharding)
    for pattern in patterns:
        assert pattern in str(error.value)


@pytest.mark.parametrize("name", [EMBED, HEAD, GATE1, "model.layers.1.self_attn.k_proj.bias"])
def test_a_missing_tensor_is_named(folder, name):
    rewrite(folder, lambda tensors: tensors.pop(name))
    refused(folder, f"missing: {name} [")


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.gate_proj.weight", "model.layers.0.self_attn.q_norm.weight", "score.weight"]
)
def test_an_unmapped_tensor_is_named_with_shape_and_file(folder, name):
    rewrite(folder, lambda tensors: tensors.update({name: np.zeros((43, 60), np.float32)}))
    refused(folder, f"unmapped: {name} [43, 60] in model.safetensors")


def test_a_misshapen_tensor_is_named_with_both_shapes(folder):
    rewrite(folder, lambda tensors: tensors.update({GATE0: np.ascontiguousarray(tensors[GATE0].T)}))
    refused(folder, f"misshapen: {GATE0} [60, 43] in model.safetensors, expected [43, 60]")


def test_a_tensor_repeated_in_two_shards_is_named_with_both_files(folder):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shard(folder, tensors, [[*names[0::2], GATE0], [*names[1::2], GATE0]])
    refused(
        folder, f"repeated: {GATE0} [43, 60] in model-00001-of-00002.safetensors, already in model-00000-of-00002.safetensors"
    )


def test_an_index_that_says_something_else_than_the_files_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(set(tensors) - {GATE0, GATE1, EMBED})
    shard(folder, tensors, [[*names, GATE0], [GATE1, EMBED]])
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first, second = weight_map[GATE0], weight_map[GATE1]
    other = {name: file for name, file in weight_map.items() if name != EMBED} | {GATE0: second, "score.weight": first}
    index.write_text(json.dumps({"weight_map": other}))
    refused(
        folder,
        f"index: {GATE0} is said to be in {second}, and is in {first}",
        f"index: score.weight is said to be in {first}, and is in no file",
        f"index: {EMBED} in {second} has no entry",
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("file_dtype", [np.float32, ml_dtypes.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_tensor(value, file_dtype, folder):
    rewrite(folder, lambda tensors: tensors.update({name: t.astype(file_dtype) for name, t in tensors.items()}))
    rewrite(folder, lambda tensors: tensors[GATE1].__setitem__((42, 59), value))
    with pytest.raises(ValueError, match=rf"{GATE1} in .*model.safetensors holds {value} at .* as float32; all weights"):
        load(folder)


def test_weights_beyond_the_dtype_asked_for_are_refused_in_and_out(folder, tmp_path):
    params, spec = load(folder), read_spec(folder)
    large = jax.tree.map(lambda array: array, params) | {"embed": params["embed"].at[3, 5].set(-1e5)}
    with pytest.raises(ValueError, match=rf"cannot export to .*{EMBED} holds -inf at \[3, 5\] as float16; all weights"):
        export_folder(large, spec, folder, tmp_path / "export", dtype=jnp.float16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    export_folder(large, spec, folder, tmp_path / "export", dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=rf"{EMBED} in .* holds -inf at \[3, 5\] as float16"):
        load(tmp_path / "export", jnp.float16)


@pytest.mark.parametrize("at", [0, 1, 2**18 - 1, 2**18, 3 * 2**18 + 4])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_the_first_value_that_is_not_finite_is_found_wherever_it_is(at, dtype):
    values = np.full(3 * 2**18 + 5, np.finfo(dtype).max if dtype is not ml_dtypes.bfloat16 else 3e38, dtype)
    assert first_not_finite(values) is None
    values[at] = np.nan
    values[-1] = np.inf
    assert first_not_finite(values) == f"{values[at]} at [{at}]"


def test_quantised_tensors_are_named_with_their_dtype(folder):
    rewrite(folder, lambda tensors: tensors.update({GATE0: np.zeros((43, 60), np.int8)}))
    refused(folder, f"dtype: {GATE0} [43, 60] in model.safetensors is I8, expected F32, BF16, F16")


def test_all_problems_are_listed_at_once(folder):
    def change(tensors):
        del tensors[GATE1]
        tensors["score.weight"] = np.zeros((2, 60), np.float32)
        tensors["model.norm.weight"] = np.zeros(61, np.float32)

    rewrite(folder, change)
    refused(folder, f"missing: {GATE1}", "unmapped: score.weight", "misshapen: model.norm.weight [61]")


def test_rotary_buffers_of_old_exports_are_ignored(folder):
    expected = load(folder)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: np.zeros(5, np.float32)}))
    assert_equal_trees(load(folder), expected)


def test_a_tied_head_in_the_file_must_equal_the_embedding(tmp_path):
    RECIPE["write_checkpoint"](tmp_path, CASES["qwen2_tied"])
    expected = load(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBED].copy()}))
    assert_equal_trees(load(tmp_path), expected)
    rewrite(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBED] + np.float32(1e-3)}))
    with pytest.raises(
        ValueError, match=r"tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight"
    ):
        load(tmp_path, sharding_of=refuse_sharding)


def test_a_folder_without_safetensors_says_what_to_do(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"convert pytorch_model.bin to safetensors first"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds neither model.safetensors nor model.safetensors.index.json$"):
        load(folder)


def test_a_broken_index_or_file_is_named(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ValueError, match="holds both"):
        load(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(FileNotFoundError, match=r"shard files that do not exist: gone.safetensors"):
        load(folder)
    for text, words in (
        ("{}", "index.json has weight_map=None, expected an object"),
        ('{"weight_map": ["a"]}', r"index.json has weight_map=\['a'\], expected an object"),
        ("[]", "index.json holds a JSON list, expected an object"),
        ("{", "index.json is not valid JSON"),
        ('{"weight_map": {"a": 1}}', "index.json gives 1 for a, expected a .safetensors file of the same folder"),
        ('{"weight_map": {"a": "../model.safetensors"}}', r"gives '../model.safetensors' for a, expected"),
        ('{"weight_map": {"a": "/model.safetensors"}}', r"gives '/model.safetensors' for a, expected"),
        ('{"weight_map": {"a": "sub/model.safetensors"}}', r"gives 'sub/model.safetensors' for a, expected"),
        ('{"weight_map": {"a": "model.bin"}}', r"gives 'model.bin' for a, expected"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "a stands there twice, as 'x.safetensors' and as 'y"),
    ):
        index.write_text(text)
        with pytest.raises(ValueError, match=words) as error:
            load(folder)
        assert "\n" not in str(error.value)
    index.unlink()
    (folder / "model.safetensors").write_bytes((folder / "other.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors is not a readable safetensors file"):
        load(folder)


# --- exporting


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 20_000, 1])
@pytest.mark.parametrize("case", CASES)
def test_an_export_holds_the_very_tensors_that_were_loaded(case, shard_bytes, tmp_path):
    tensors = RECIPE["write_checkpoint"](tmp_path / "source", CASES[case])
    spec = read_spec(tmp_path / "source")
    target = tmp_path / "runs" / "export"
    export_folder(load(tmp_path / "source"), spec, tmp_path / "source", target, dtype=jnp.float32, shard_bytes=shard_bytes)
    files = sorted(target.glob("*.safetensors"))
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor)
    if shard_bytes == 1:
        assert len(files) == len(tensors)
    if shard_bytes == 20_000:
        assert 1 < len(files) < len(tensors)
        for file in files:
            held = load_file(file)
            assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= shard_bytes
    if len(files) == 1:
        assert files[0].name == "model.safetensors"
    else:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert_equal_trees(load(target), load(tmp_path / "source"))
    assert sorted(path.name for path in target.parent.iterdir()) == ["export"]


def test_an_export_rounds_to_its_dtype_and_says_so_in_the_config(folder, tmp_path):
    for keys in (("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")):
        config = CASES["qwen2_untied"] | dict.fromkeys(keys, "float32")
        (folder / "config.json").write_text(json.dumps(config))
        target = tmp_path / "-".join(keys)
        export_folder(load(folder), read_spec(folder), folder, target, dtype=jnp.bfloat16)
        assert json.loads((target / "config.json").read_text()) == config | dict.fromkeys(keys, "bfloat16")
        file = load_file(target / "model.safetensors")
        assert {tensor.dtype for tensor in file.values()} == {np.dtype(ml_dtypes.bfloat16)}
        expected = load_file(folder / "model.safetensors")[GATE0].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(file[GATE0], expected)
    with pytest.raises(ValueError, match="dtype='int32' is not supported"):
        export_folder(load(folder), read_spec(folder), folder, tmp_path / "int", dtype=jnp.int32)


KEPT = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "added_tokens.json",
    "bpe.codes",
    "LICENSE",
    "USE_POLICY.md",
]
LEFT = ["README.md", "training_args.bin", "optimizer.pt", "consolidated.00.pth", "model.gguf", "pytorch_model.bin.index.json"]
LEFT += ["trainer_state.json", "modeling_own.py", ".gitattributes", "adapter_config.json"]


def test_an_export_takes_all_but_weights_and_configs_along(folder, tmp_path):
    for name in [*KEPT, *LEFT]:
        (folder / name).write_text(name)
    for name in ("additional_chat_templates", "original", ".cache"):
        (folder / name).mkdir()
        (folder / name / "tool_use.jinja").write_text("{{ tools }}")
    export_folder(load(folder), read_spec(folder), folder, tmp_path / "export", dtype=jnp.float32)
    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert names == {*KEPT, "additional_chat_templates", "config.json", "model.safetensors"}
    assert all((tmp_path / "export" / name).read_text() == name for name in KEPT)
    assert (tmp_path / "export" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"


def test_an_export_takes_another_tokenizer_and_the_models_licence(folder, tmp_path):
    for owner in (folder, tmp_path / "tokenizer", tmp_path / "stops"):
        owner.mkdir(exist_ok=True)
        for name in ("tokenizer.json", "LICENSE", "generation_config.json"):
            (owner / name).write_text(owner.name)
    (folder / "vocab.json").write_text("stale")
    (tmp_path / "tokenizer" / "tekken.json").write_text("tokenizer")
    others = {"tokenizer_folder": tmp_path / "tokenizer", "generation_folder": tmp_path / "stops"}
    export_folder(load(folder), read_spec(folder), folder, tmp_path / "export", dtype=jnp.float32, **others)
    texts = {path.name: path.read_text() for path in (tmp_path / "export").iterdir() if path.suffix != ".safetensors"}
    assert texts.pop("config.json")
    whose = {"tokenizer.json": "tokenizer", "tekken.json": "tokenizer", "LICENSE": "source", "generation_config.json": "stops"}
    assert texts == whose


def test_exported_weights_are_as_readable_as_the_config(folder, tmp_path):
    export_folder(load(folder), read_spec(folder), folder, tmp_path / "export", dtype=jnp.float32)
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "export").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_sharded_parameters_are_exported_whole(folder, tmp_path):
    mesh = jax.make_mesh((2, 3), ("fsdp", "tensor"), devices=jax.devices()[:6])

    def sharding_of(path):
        return jax.NamedSharding(mesh, jax.P(None, "fsdp", "tensor") if path in (("layers", "q"), ("layers", "k")) else jax.P())

    export_folder(load(folder, sharding_of=sharding_of), read_spec(folder), folder, tmp_path / "export", dtype=jnp.float32)
    assert_equal_trees(load(tmp_path / "export"), load(folder))


def test_an_existing_target_is_replaced_only_on_request_and_only_if_it_is_a_model(folder, tmp_path):
    params, spec, target = load(folder), read_spec(folder), tmp_path / "export"
    export_folder(params, spec, folder, target, dtype=jnp.float32)
    (target / "tokenizer.json").write_text("stale")
    with pytest.raises(FileExistsError, match="overwrite is off"):
        export_folder(params, spec, folder, target, dtype=jnp.float32)
    export_folder(params, spec, folder, target, dtype=jnp.bfloat16, overwrite=True)
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "source"]
    (tmp_path / "letters").mkdir()
    with pytest.raises(FileExistsError, match="no model folder"):
        export_folder(params, spec, folder, tmp_path / "letters", dtype=jnp.float32, overwrite=True)
    for own in (folder, tmp_path):
        with pytest.raises(ValueError, match="is or holds the source folder"):
            export_folder(params, spec, folder, own, dtype=jnp.float32, overwrite=True)
    assert_equal_trees(load(folder), params)


def test_a_killed_export_leaves_the_target_as_it_was_and_the_next_one_cleans_up(folder, tmp_path, monkeypatch):
    params, spec, target = load(folder), read_spec(folder), tmp_path / "export"

    def killed(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("pods_jax.models.hf_weights.save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        export_folder(params, spec, folder, target, dtype=jnp.float32)
    assert not target.exists()
    monkeypatch.undo()
    export_folder(params, spec, folder, target, dtype=jnp.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "source"]


def test_parameters_that_do_not_fit_the_spec_or_the_source_are_refused(folder, tmp_path):
    params, spec, target = load(folder), read_spec(folder), tmp_path / "export"
    broken = {name: array for name, array in params.items() if name != "embed"}
    broken |= {"extra": jnp.zeros(3), "final_norm": jnp.zeros(61)}
    with pytest.raises(ValueError, match="do not fit the spec") as error:
        export_folder(broken, spec, folder, target, dtype=jnp.float32)
    for problem in ("unknown: extra", "missing: embed [71, 60]", "misshapen: final_norm [61], expected [60]"):
        assert problem in str(error.value)
    RECIPE["write_checkpoint"](tmp_path / "other", CASES["qwen3"])
    with pytest.raises(ValueError, match="describes another decoder"):
        export_folder(params, spec, tmp_path / "other", target, dtype=jnp.float32)
    assert not target.exists()
