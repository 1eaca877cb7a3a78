import json
import shutil

import jax
import pytest
from transformers import AutoTokenizer, GenerationConfig

from pods_jax.assembly.inputs import load_prompts
from pods_jax.assembly.policy import load_policy, make_lora
from pods_jax.assembly.texts import check_kept_template, find_texts, keep_template
from pods_jax.assets.tokenizer import write_tokenizer
from pods_jax.config.entries import Config
from pods_jax.config.fields import ConfigError
from pods_jax.config.sections import DataConfig, LoraConfig, ModelConfig
from pods_jax.data.generation import FILE as GENERATION_FILE
from pods_jax.data.templates import TEMPLATE_FILE
from pods_jax.devices.sharding import make_mesh
from pods_jax.train import _export

OWN = "{{ bos_token }}{{ messages[-1].content }}{% if thinking | default(true) %}<think>{% endif %}"


def small(**changes):
    return DataConfig(train_problems=6, held_out_problems=3, **changes)


@pytest.fixture
def own(tmp_path, tiny_model):
    """A tokenizer of the user's own: it ends with another token, and is kept with a file of its own."""
    folder = tmp_path / "own"
    write_tokenizer(folder)
    shutil.copyfile(tiny_model / "config.json", folder / "config.json")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "</answer>"}))
    (folder / "vocab.txt").write_text("kept as it is\n")
    (folder / "generation_config.json").unlink()
    return folder


@pytest.fixture
def template(tmp_path):
    (tmp_path / "own.jinja").write_text(OWN)
    return str(tmp_path / "own.jinja")


def prompts(model, data):
    return [prompt.tokens for prompt in load_prompts(data, find_texts(model, data))[0]]


def exported(model, data, folder, rank=0):
    config = Config(model=model, data=data, lora=LoraConfig(rank=rank))
    architecture, params = load_policy(model, make_mesh((1, 1, 1), jax.devices()[:1]), lora=make_lora(config.lora))
    _export(config, find_texts(model, data), architecture, params, folder)
    return folder


def test_without_a_setting_the_models_own_is_used_and_exported_as_it_is(tiny_model, tmp_path):
    texts = find_texts(ModelConfig(path=str(tiny_model)), DataConfig())
    assert (texts.stop_ids, texts.exported_files, texts.template) == ((2,), {}, None)
    assert texts.exported_tokenizer() is texts.tokenizer
    keep_template(texts, tmp_path)
    folder = exported(ModelConfig(path=str(tiny_model)), DataConfig(), tmp_path / "run") / "export"
    for path in tiny_model.iterdir():
        assert path.name == "config.json" or (folder / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.name for path in folder.iterdir()} == {path.name for path in tiny_model.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_an_own_tokenizer_ends_completions_and_is_exported_with_the_stop_ids(own, tiny_model, tmp_path):
    model = ModelConfig(path=str(tiny_model), tokenizer=str(own))
    texts = find_texts(model, DataConfig())
    assert texts.tokenizer.eos_token == "</answer>"
    assert texts.stop_ids == (2, 7)
    folder = exported(model, DataConfig(), tmp_path / "run", rank=2)
    for path in own.iterdir():
        assert path.name == "config.json" or (folder / "export" / path.name).read_bytes() == path.read_bytes(), path.name
    for name in ("export", "adapter"):
        settings = GenerationConfig.from_pretrained(folder / name)
        assert (settings.eos_token_id, settings.bos_token_id, settings.pad_token_id) == ([2, 7], 1, 0)
        assert AutoTokenizer.from_pretrained(folder / name).eos_token == "</answer>"
        assert find_texts(ModelConfig(path=str(folder / name)), DataConfig()).stop_ids == (2, 7)


@pytest.mark.parametrize("source", ["file", "tokenizer", "model"])
def test_the_exports_render_the_runs_prompts_by_themselves(source, own, template, tiny_model, tmp_path):
    model, folder = ModelConfig(path=str(tiny_model)), own if source == "tokenizer" else tmp_path / "model"
    if source == "model":
        shutil.copytree(tiny_model, folder)
        model = ModelConfig(path=str(folder))
    if source == "tokenizer":
        model = ModelConfig(path=str(tiny_model), tokenizer=str(own))
    if source != "file":
        (folder / TEMPLATE_FILE).write_text(OWN)
    data = small(template_options=["thinking=false"], chat_template=template if source == "file" else None)
    written = prompts(model, data)
    assert written != prompts(model, small(chat_template=data.chat_template))
    run = exported(model, data, tmp_path / "run", rank=2)
    for name in ("export", "adapter"):
        assert prompts(ModelConfig(path=str(run / name)), small()) == written
        assert (run / name / TEMPLATE_FILE).read_text().endswith(OWN)


def test_an_own_template_leaves_those_for_tools_as_they_are(template, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    model = ModelConfig(path=str(tmp_path / "model"))
    folder = exported(model, DataConfig(chat_template=template), tmp_path / "run", rank=2)
    for name in ("export", "adapter"):
        assert AutoTokenizer.from_pretrained(folder / name).chat_template == {"default": OWN, "tool_use": "{{ tools }}"}


def test_a_tokenizer_with_ids_that_the_model_has_not_is_refused(own, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(own)
    tokenizer.add_tokens(["one", "two"])
    tokenizer.save_pretrained(own)
    with pytest.raises(ConfigError, match=r"model\.tokenizer=.*own has token ids up to 33; .* model\.path=.* ends at 31"):
        find_texts(ModelConfig(path=str(tiny_model), tokenizer=str(own)), DataConfig())


def test_a_tokenizer_that_would_be_read_otherwise_next_to_the_model_is_refused(own, tiny_model):
    """For this kind of model transformers takes its own class, whatever the files say."""
    (own / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.tokenizer=.*own cannot .* as Qwen2Tokenizer, with another encoding"):
        find_texts(ModelConfig(path=str(tiny_model), tokenizer=str(own)), DataConfig())


@pytest.mark.parametrize(("name", "words"), [("nowhere", "is not a folder"), ("", "holds no readable tokenizer")])
def test_a_tokenizer_that_cannot_be_had_is_refused_by_its_key(name, words, tiny_model, tmp_path):
    with pytest.raises(ValueError, match=rf"model\.tokenizer=.* {words}"):
        find_texts(ModelConfig(path=str(tiny_model), tokenizer=str(tmp_path / name)), DataConfig())


def test_a_run_does_not_go_on_with_an_edited_template(template, tiny_model, tmp_path):
    model, data = ModelConfig(path=str(tiny_model)), DataConfig(chat_template=template)
    texts = find_texts(model, data)
    check_kept_template(texts, data, tmp_path)
    keep_template(texts, tmp_path)
    check_kept_template(texts, data, tmp_path)
    (tmp_path / "own.jinja").write_text(OWN + "!")
    with pytest.raises(ConfigError, match=rf"chat_template={template} has changed since .*{TEMPLATE_FILE} is what it was"):
        check_kept_template(find_texts(model, data), data, tmp_path)


def test_the_models_own_generation_settings_stay(own, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / GENERATION_FILE).write_text(json.dumps({"temperature": 0.6, "eos_token_id": 3, "bos_token_id": 9}))
    texts = find_texts(ModelConfig(path=str(tmp_path / "model"), tokenizer=str(own)), DataConfig())
    settings = json.loads(texts.exported_files[GENERATION_FILE])
    assert settings == {"temperature": 0.6, "eos_token_id": [3, 7], "bos_token_id": 1, "pad_token_id": 0}
