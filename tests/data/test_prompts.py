import json
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from pods_jax.assets.tokenizer import write_tokenizer
from pods_jax.data.prompts import build_prompts, eos_ids, load_tokenizer, pad_prompts
from pods_jax.data.rows import Source
from pods_jax.data.tasks import THINK_ANSWER_PROMPT, load_splits
from pods_jax.problem import Problem
from pods_jax.types import Prompt

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


ENDS_IN_TURN = "{{ messages[-1]['content'] }}[assistant]"
R1 = ENDS_IN_TURN + "{{ '<think>\\n' }}"
NO_REASONING = ENDS_IN_TURN + "{{ '<think>\\n\\n</think>\\n\\n' }}"


@pytest.mark.parametrize(
    ("template", "question", "opened"),
    [
        (R1, "4", "<think>\n"),
        (R1, " 4 ", "<think>\n"),
        (NO_REASONING, "4", "<think>\n\n</think>\n\n"),
        (ENDS_IN_TURN + "<think>7", "4", "<think>7"),
        (ENDS_IN_TURN, "4", ""),
        (ENDS_IN_TURN, "4 <think>", ""),  # the user's, not the model's
        (None, "4 <think>\n", "<think>\n"),
        (None, "4 <think></think> <answer></answer>", ""),
        (None, "", ""),
    ],
)
def test_a_problem_says_which_tags_its_prompt_has_opened(tokenizer, template, question, opened):
    tokenizer.chat_template = template
    system_prompt = "<think></think><answer></answer>"
    [prompt], _ = build([problem(question)], tokenizer, system_prompt=system_prompt)
    assert prompt.problem == replace(problem(question), opened=opened)


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


QWEN = (
    "{% if messages[0]['role'] != 'system' %}{{ '<sys>default' }}{% endif %}"
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content']|trim %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}{{ '[system]Today: ' + date_string + '\n' + system }}"
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content']|trim }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
DROPS_REASONING = "{% for m in messages %}{{ m['content'].split('</think>')[-1] }}{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[0]['content'] }}"
)
EXAMPLES = [
    Problem("e/0", ({"role": "user", "content": "1+1="},), "2", "made_up", solution="one more"),
    Problem("e/1", ({"role": "user", "content": "2+2="},), "4", "made_up"),
]
SHOWN = ["<think>one more</think>\n<answer>2</answer>", "<think>Working it out gives 4.</think>\n<answer>4</answer>"]


@pytest.fixture
def words(tokenizer):
    """The bundled tokenizer with every character of the templates, so that texts come back whole."""
    tokenizer.add_tokens(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ[]<>"))
    return tokenizer


def text_of(tokenizer, examples, template, system_prompt="reason"):
    tokenizer.chat_template = template
    prompts, _ = build_prompts(
        [problem("3+3=")], tokenizer, max_length=400, over_long="error", system_prompt=system_prompt, examples=examples
    )
    return tokenizer.decode(prompts[0].tokens)


def test_examples_are_turns_between_system_prompt_and_problem(words):
    assert text_of(words, EXAMPLES, QWEN) == (
        f"[system]reason<eos>\n[user]1+1=<eos>\n[assistant]{SHOWN[0]}<eos>\n"
        f"[user]2+2=<eos>\n[assistant]{SHOWN[1]}<eos>\n[user]3+3=<eos>\n[assistant]"
    )


def test_a_template_with_a_date_writes_the_same_one_every_day_and_one_bos(words):
    assert text_of(adding_bos(words), EXAMPLES[:1], LLAMA_3) == (
        f"<bos>[system]Today: 26 Jul 2024\nreason[user]1+1=[assistant]{SHOWN[0]}[user]3+3=[assistant]"
    )


def test_without_a_template_examples_are_plain_text(words):
    assert text_of(words, EXAMPLES[:1], None) == f"reason\n\n1+1=\n\n{SHOWN[0]}\n\n3+3="


def test_a_template_that_drops_the_reasoning_of_examples_is_refused(words):
    with pytest.raises(ValueError, match=r"leaves the reasoning of earlier turns out.*data\.few_shot=0"):
        text_of(words, EXAMPLES, DROPS_REASONING)
    assert text_of(words, [], DROPS_REASONING) == "reason3+3="


def test_a_template_without_system_role_is_refused_with_the_way_out(words):
    with pytest.raises(ValueError, match=r"refuses the messages \(no system role\); data\.system_prompt=''"):
        text_of(words, [], NO_SYSTEM)
    assert text_of(words, [], NO_SYSTEM, system_prompt="") == "3+3="


def test_a_real_tokenizer_gets_one_bos_the_system_prompt_and_examples_as_turns(smollm2):
    tokenizer = load_tokenizer(smollm2)
    text = text_of(tokenizer, EXAMPLES[:1], tokenizer.chat_template, THINK_ANSWER_PROMPT)
    assert text == (
        f"<|im_start|>system\n{THINK_ANSWER_PROMPT}<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n"
        f"<|im_start|>assistant\n{SHOWN[0]}<|im_end|>\n<|im_start|>user\n3+3=<|im_end|>\n<|im_start|>assistant\n"
    )
    prompts, _ = build([problem("3+3=")], tokenizer, max_length=400)
    assert prompts[0].tokens.count(tokenizer.bos_token_id) == text_of(tokenizer, [], tokenizer.chat_template).count(
        "<|im_start|>"
    )
    assert prompts[0].tokens[0] == tokenizer.bos_token_id != prompts[0].tokens[1]


def test_over_long_real_prompts_are_counted(smollm2, real_data):
    splits = load_splits("gsm8k", train_problems=300, held_out_problems=1, seed=0, source=Source(path=str(real_data / "gsm8k")))
    tokenizer = load_tokenizer(smollm2)
    _, whole = build(splits.train, tokenizer, max_length=512, system_prompt=THINK_ANSWER_PROMPT)
    assert (whole.kept, whole.dropped) == (300, 0)
    _, cut = build(splits.train, tokenizer, max_length=150, system_prompt=THINK_ANSWER_PROMPT)
    assert 0 < cut.dropped < 150
    assert cut.longest <= 150
