import json

import pytest

from pods_jax.data.generation import stop_lines
from pods_jax.data.prompts import eos_ids, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model)


def test_stop_ids_and_defaults_that_are_not_taken_are_said(tokenizer, tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [2, 31], "temperature": 0.6, "top_k": 20, "top_p": None, "pad_token_id": 0}))
    ids = eos_ids(tokenizer, tmp_path)
    stops, defaults = stop_lines(tokenizer, ids, tmp_path)
    for i in ids:
        assert f"{i} ({tokenizer.convert_ids_to_tokens(i)!r})" in stops
    assert f"{file} has temperature=0.6, top_k=20: not taken" in defaults
    file.write_text(json.dumps({"eos_token_id": 2}))
    assert len(stop_lines(tokenizer, ids, tmp_path)) == 1
    file.unlink()
    assert len(stop_lines(tokenizer, ids, tmp_path)) == 1


@pytest.mark.parametrize(
    ("text", "words"), [("[2]", "holds a JSON list"), ("{", "is not valid JSON"), ('{"eos_token_id": "2"}', "eos_token_id='2'")]
)
def test_a_malformed_generation_config_is_one_line_with_the_files_name(text, words, tokenizer, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"generation_config.json.*{words}") as error:
        stop_lines(tokenizer, eos_ids(tokenizer, tmp_path), tmp_path)
    assert "\n" not in str(error.value)
