import json
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from pods_jax.assets.tokenizer import write_tokenizer
from pods_jax.data.prompts import build_prompts, eos_ids, load_tokenizer, pad_prompts
from pods_jax.types import Problem, Prompt

BOS, EOS = 1, 2


def problem(content, problem_id="p/0"):
    return Problem(problem_id, ({"role": "user", "content": content},), "1", "made_up")


def build(problems, tokenizer, max_length=64, over_long: Literal["drop", "error"] = "drop", system_prompt=None):
    return build_prompts(problems, tokenizer, max_length=max_length, over_long=over_long, system_prompt=system_prompt)


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(folder)


def adding_bos(tokenizer):
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    assert tokenizer("4")["input_ids"][0] == BOS
    return tokenizer


DOUBLE_BOS = "{{ bos_token }}{{ bos_token }}{{ messages[0]['content'] }}"
NO_BOS = "{{ messages[0]['content'] }}"
ONE_BOS = "{{ bos_token }}{{ messages[0]['content'] }}"


@pytest.mark.parametrize("template", [ONE_BOS, DOUBLE_BOS, NO_BOS, None])
def test_exactly_one_bos_when_the_tokenizer_adds_one_whatever_the_template_does(tokenizer, template):
    tokenizer = adding_bos(tokenizer)
    tokenizer.chat_template = template
    [prompt], _ = build([problem("4+5")], tokenizer)
    assert prompt.tokens[0] == BOS
    assert tokenizer.decode(prompt.tokens[1:]) == "4+5"


@pytest.mark.parametrize(("template", "bos"), [(ONE_BOS, (BOS,)), (DOUBLE_BOS, (BOS,)), (NO_BOS, ()), (None, ())])
def test_a_tokenizer_that_adds_no_bos_leaves_it_to_the_template(tokenizer, template, bos):
    tokenizer.chat_template = template
    [prompt], _ = build([problem("4+5")], tokenizer)
    assert prompt.tokens == (*bos, *tokenizer("4+5")["input_ids"])


def test_a_bos_token_that_also_opens_later_turns_is_kept_there(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ bos_token }}{{ m['content'] }}{% endfor %}"
    [prompt], _ = build([problem("4")], tokenizer, system_prompt="3")
    assert tokenizer.decode(prompt.tokens) == "<bos>3<bos>4"


def test_a_model_without_bos_gets_none(tokenizer):
    tokenizer.bos_token = None
    tokenizer.chat_template = NO_BOS
    [prompt], _ = build([problem("4")], tokenizer)
    assert BOS not in prompt.tokens


def test_the_generation_prompt_is_part_of_the_prompt(tokenizer):
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if add_generation_prompt %}={% endif %}"
    [prompt], _ = build([problem("4")], tokenizer)
    assert tokenizer.decode(prompt.tokens) == "4="


@pytest.mark.parametrize(("system_prompt", "text"), [(None, "4="), ("", "4="), ("1+1", "1+1\n\n4=")])
def test_without_a_chat_template_the_messages_are_plain_text(tokenizer, system_prompt, text):
    tokenizer.chat_template = None
    [prompt], _ = build([problem("4=")], tokenizer, system_prompt=system_prompt)
    assert tokenizer.decode(prompt.tokens) == text


def test_over_long_prompts_are_dropped_whole_and_counted(tokenizer):
    problems = [problem("1" * length, f"p/{length}") for length in (3, 4, 5, 2)]
    prompts, report = build(problems, tokenizer, max_length=5)  # BOS counts
    assert [prompt.problem.id for prompt in prompts] == ["p/3", "p/4", "p/2"]
    assert (report.kept, report.dropped, report.longest) == (3, 1, 5)


def test_an_over_long_prompt_is_refused_on_request_with_id_length_and_limit(tokenizer):
    with pytest.raises(ValueError, match=r"problem p/7 has 8 tokens; the limit is data\.max_prompt_length=7"):
        build([problem("1" * 7, "p/7")], tokenizer, max_length=7, over_long="error")


@pytest.mark.parametrize("problems", [[], [problem("1" * 9)]])
def test_no_prompt_left_is_an_error(tokenizer, problems):
    with pytest.raises(ValueError, match=r"none of . prompts is within data\.max_prompt_length=5"):
        build(problems, tokenizer, max_length=5)


def test_a_prompt_without_tokens_is_an_error(tokenizer):
    tokenizer.chat_template = NO_BOS
    with pytest.raises(ValueError, match="problem p/0 has no token"):
        build([problem("")], tokenizer)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), multiple=st.integers(1, 9))
def test_padding_keeps_tokens_on_the_left_and_takes_the_next_multiple(lengths, multiple):
    prompts = [Prompt(problem("1"), tuple(range(5, 5 + length))) for length in lengths]
    tokens_PL, length_P = pad_prompts(prompts, multiple=multiple)
    assert tokens_PL.dtype == length_P.dtype == np.int32
    assert length_P.tolist() == lengths
    assert tokens_PL.shape[1] % multiple == 0
    assert 0 <= tokens_PL.shape[1] - max(lengths) < multiple
    for row, prompt in zip(tokens_PL.tolist(), prompts, strict=True):
        assert row == [*prompt.tokens, *[0] * (len(row) - len(prompt.tokens))]


@pytest.mark.parametrize(("count", "multiple"), [(0, 8), (1, 0)])
def test_padding_nothing_or_to_nothing_is_refused(count, multiple):
    with pytest.raises(ValueError, match=f"{count} prompts to a multiple of {multiple}"):
        pad_prompts([Prompt(problem("1"), (5,))] * count, multiple=multiple)


@pytest.mark.parametrize(("configured", "expected"), [(2, (2,)), ([9, 2], (2, 9)), ([9], (2, 9)), (None, (2,))])
def test_eos_ids_are_those_of_tokenizer_and_generation_config_together(folder, tokenizer, configured, expected):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": configured}))
    assert eos_ids(tokenizer, folder) == expected


def test_without_a_generation_config_the_models_config_is_asked(folder, tokenizer):
    (folder / "generation_config.json").unlink()
    assert eos_ids(tokenizer, folder) == (2,)
    (folder / "config.json").write_text('{"eos_token_id": [4, 5]}')
    assert eos_ids(tokenizer, folder) == (2, 4, 5)


@pytest.mark.parametrize("configured", ["2", [2, -1], [True], 2.0])
def test_an_impossible_eos_id_is_refused(folder, tokenizer, configured):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": configured}))
    with pytest.raises(ValueError, match="eos_token_id"):
        eos_ids(tokenizer, folder)


def test_a_model_without_any_eos_is_refused(folder, tokenizer):
    tokenizer.eos_token = None
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(ValueError, match="names an EOS token"):
        eos_ids(tokenizer, folder)


def test_a_missing_or_unreadable_tokenizer_folder_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path=.*nowhere' is not a folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"model\.path=.* holds no readable tokenizer"):
        load_tokenizer(tmp_path)
