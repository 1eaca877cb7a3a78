import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pods_jax.assets.tokenizer import CHARACTERS, TAGS, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundled") / "tokenizer"
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@given(pieces=st.lists(st.sampled_from([*CHARACTERS, *TAGS])))
def test_decoding_gives_back_the_encoded_text_with_one_token_a_piece(tokenizer, pieces):
    text = "".join(pieces)
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(pieces)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_skipping_special_tokens_removes_bos_eos_and_padding_alone(tokenizer):
    ids = [tokenizer.bos_token_id, *tokenizer("<think>4")["input_ids"], tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>4"


def test_special_tokens_are_four_different_ids_within_a_vocabulary_of_32(tokenizer):
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert sorted(special) == [0, 1, 2, 3]
    assert len(tokenizer) == 32


def test_characters_outside_the_alphabet_are_unknown_one_by_one(tokenizer):
    assert tokenizer("4é~5")["input_ids"][1:3] == [tokenizer.unk_token_id] * 2


def test_chat_template_writes_one_bos_then_the_messages_as_they_stand(tokenizer):
    messages = [{"role": "system", "content": "1\n"}, {"role": "user", "content": "+4*3="}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokens[0] == tokenizer.bos_token_id
    assert tokens.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(tokens[1:]) == "1\n+4*3="


def test_generation_config_names_the_tokenizers_own_ids(folder, tokenizer):
    written = json.loads((folder / "generation_config.json").read_text())
    assert written == {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def test_files_are_the_same_on_every_write(folder, tmp_path):
    write_tokenizer(tmp_path)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == {f.name: f.read_bytes() for f in tmp_path.iterdir()}
