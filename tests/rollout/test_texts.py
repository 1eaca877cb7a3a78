import json

import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped
from transformers import AutoTokenizer

from pods_jax.assets.tokenizer import TAGS, write_tokenizer
from pods_jax.rollout import texts
from pods_jax.rollout.texts import read_completions
from pods_jax.types import Rollouts

completion_texts = jaxtyped(typechecker=beartype)(texts.completion_texts)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def completions(tokenizer, written, width, filler):
    """Tokens and lengths of written completions, what lies beyond them taken from another text."""
    rows = [[tokenizer(text)["input_ids"] for text in group] for group in written]
    tokens = np.full((len(rows), len(rows[0]), width), tokenizer(filler)["input_ids"][0], np.int32)
    for p, group in enumerate(rows):
        for n, row in enumerate(group):
            tokens[p, n, : len(row)] = row
    return tokens, np.array([[len(row) for row in group] for group in rows], np.int32)


def test_every_rollout_gets_its_own_text_up_to_its_length(tokenizer):
    written = [["1+2=3", "", "<think>7</think>\n"], ["9", "<answer>4</answer>", "1 - 1, 0?"], ["=", " ", "\n\n"]]
    assert completion_texts(tokenizer, *completions(tokenizer, written, 13, "8")) == written


def test_eos_and_padding_leave_no_trace(tokenizer):
    written = [["5<eos>", "<pad>6 <eos>"]]
    assert completion_texts(tokenizer, *completions(tokenizer, written, 8, "<pad>")) == [["5", "6 "]]


def test_spaces_before_punctuation_are_kept(tokenizer):
    written = [["1 , 2 . 3 ?", "4 :"]]
    assert completion_texts(tokenizer, *completions(tokenizer, written, 11, "0")) == written


def test_any_tokens_read_as_the_tokenizer_reads_them(tokenizer):
    rng = np.random.default_rng(0)
    tokens_PNC = rng.integers(0, len(tokenizer), (3, 20, 11)).astype(np.int32)
    length_PN = rng.integers(0, 12, (3, 20)).astype(np.int32)
    for texts_N, tokens_NC, length_N in zip(
        completion_texts(tokenizer, tokens_PNC, length_PN), tokens_PNC, length_PN, strict=True
    ):
        rows = [row[:length].tolist() for row, length in zip(tokens_NC, length_N, strict=True)]
        read = tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)
        assert texts_N == [text.replace("<bos>", "").replace("<eos>", "").replace("<pad>", "") for text in read]


@pytest.mark.parametrize(
    "named",
    [
        None,
        {"extra_special_tokens": {f"tag_{index}": tag for index, tag in enumerate(TAGS)}},
        {"additional_special_tokens": ["<step>"]},
        {"extra_special_tokens": ["<step>"]},
    ],
)
def test_special_tokens_other_than_bos_eos_and_padding_stay_in_the_text(tmp_path, named):
    write_tokenizer(tmp_path)
    file = tmp_path / ("tokenizer_config.json" if named else "tokenizer.json")
    settings = json.loads(file.read_text()) | (named or {})
    for token in settings.get("added_tokens", []):
        token["special"] = True
    file.write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    written = "<think>3</think><answer>4</answer>" if "<step>" not in str(named) else "3<step>4"
    ids = tokenizer(written)["input_ids"]
    assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True) == "34"  # what must not be read
    assert completion_texts(tokenizer, *completions(tokenizer, [[f"<bos>{written}<eos>"]], 10, "<pad>")) == [[written]]


@pytest.mark.parametrize(("stop_ids", "text"), [([], "123"), (["3"], "12")])
def test_an_end_that_only_the_models_folder_names_leaves_no_trace(tokenizer, stop_ids, text):
    tokens_PNC, length_PN = completions(tokenizer, [["123"]], 4, "0")
    rollouts = Rollouts(
        tokens_PNC=jnp.asarray(tokens_PNC),
        logp_PNC=jnp.zeros((1, 1, 4)),
        length_PN=jnp.asarray(length_PN),
        finished_PN=jnp.array([[True]]),
        decoded_rows=jnp.float32(3),
    )
    ids = tokenizer.convert_tokens_to_ids(stop_ids)
    assert read_completions(tokenizer, rollouts, stop_ids=ids).texts_PN[0] == [text]
