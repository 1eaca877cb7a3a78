import shutil

import pytest
from transformers import AutoTokenizer

from pods_jax.assets.tokenizer import write_tokenizer
from pods_jax.data.prompts import build_prompts, load_tokenizer
from pods_jax.data.templates import TEMPLATE_FILE, check_options, default_template, read_options, read_template, with_defaults
from pods_jax.problem import Problem

PROBLEM = Problem("p/0", ({"role": "user", "content": "4+5"},), "9", "made_up")
# Options are read in a macro, as published templates do; generation and break are transformers' own additions to Jinja.
TEMPLATE = """
{%- macro turn(message) %}{{ message.content }}{% if thinking is defined and not thinking %}={% endif %}{% endmacro %}

{% for message in messages %}
  {% generation %}
{{ turn(message) }}{% endgeneration %}
  {% break %}
{% endfor %}
{% for _ in range(level | default(0)) %}*{% endfor %}{{ sign | default('') }}"""


@pytest.fixture
def tokenizer(tmp_path):
    write_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def text(tokenizer, **options):
    [prompt], _ = build_prompts(
        [PROBLEM], tokenizer, max_length=64, over_long="error", system_prompt=None, template_options=options
    )
    return tokenizer.decode(prompt.tokens)


def test_a_template_file_is_read_as_it_is_and_its_byte_order_mark_left_out(tmp_path):
    (tmp_path / "own.jinja").write_text(TEMPLATE, encoding="utf-8-sig")
    assert read_template(str(tmp_path / "own.jinja")) == TEMPLATE


@pytest.mark.parametrize(
    ("written", "words"),
    [(b"{% for %}", "is no Jinja template: .* \\(line 1\\)"), (b"\xff\xfe\x00", "cannot be read"), (None, "cannot be read")],
)
def test_a_file_that_is_no_template_is_refused_by_name(written, words, tmp_path):
    if written is not None:
        (tmp_path / "own.jinja").write_bytes(written)
    with pytest.raises(ValueError, match=rf"data\.chat_template=.*own\.jinja {words}"):
        read_template(str(tmp_path / "own.jinja"))


def test_options_are_read_as_yaml_reads_them():
    given = ["thinking=false", "level=2", "share=0.5", "sign='3'", "date_string=4 Dec 2026", "empty=''", "pair=a=b"]
    read = {"thinking": False, "level": 2, "share": 0.5, "sign": "3", "date_string": "4 Dec 2026", "empty": "", "pair": "a=b"}
    assert read_options(given) == read


@pytest.mark.parametrize(
    "option", ["thinking", "thinking=", "=1", "a-b=1", "x=[1]", "x={a: 1}", "x=[", "x=null", "x=.inf", "x=.nan", "x=2024-07-26"]
)
def test_an_option_that_is_none_is_refused(option):
    with pytest.raises(ValueError, match=r"data\.template_options=.* must be name=value"):
        read_options([option])


def test_an_option_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"data\.template_options gives level twice"):
        read_options(["level=1", "level=2"])


def test_options_change_the_prompt(tokenizer):
    tokenizer.chat_template = TEMPLATE
    assert (text(tokenizer), text(tokenizer, thinking=False), text(tokenizer, level=2)) == ("\n4+5", "\n4+5=", "\n4+5**")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("thinkin", "reads no such variable; did you mean 'thinking'\\? it reads: level, sign, thinking"),
        ("messages", "reads no such variable; it reads: level, sign, thinking"),
        ("bos_token", "reads no such variable; it reads: level"),
    ],
)
def test_an_option_that_the_template_does_not_read_is_refused(name, words, tokenizer):
    tokenizer.chat_template = TEMPLATE + "{{ bos_token }}"
    check_options(tokenizer, {"thinking": True, "sign": "+"})
    with pytest.raises(ValueError, match=rf"data\.template_options={name}: the chat template {words}"):
        check_options(tokenizer, {"level": 1, name: 1})


def test_options_without_a_template_are_refused(tokenizer):
    tokenizer.chat_template = None
    check_options(tokenizer, {})
    with pytest.raises(ValueError, match=r"the model has no chat template; give data\.chat_template"):
        check_options(tokenizer, {"thinking": True})


def test_of_several_templates_the_default_one_is_meant(tokenizer):
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "{{ tools }}"}
    assert default_template(tokenizer) == TEMPLATE
    check_options(tokenizer, {"level": 1})


@pytest.mark.parametrize(
    "options",
    [{"thinking": False}, {"level": 3, "sign": "+\"'\\n("}, {"thinking": True, "sign": "é"}, {"date_string": "1"}, {}],
)
@pytest.mark.parametrize("head", ["", "\n", "  ", "  {% if true %}\n  ({% endif %}\n"])
def test_the_template_with_its_options_in_front_renders_the_same_by_itself(head, options, tokenizer, tmp_path):
    template = head + TEMPLATE + "{{ date_string | default('') }}"
    write_tokenizer(tmp_path / "exported")
    (tmp_path / "exported" / TEMPLATE_FILE).write_text(with_defaults(template, options), encoding="utf-8")
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")

    def rendered(tokenizer, **options):
        return tokenizer.apply_chat_template(PROBLEM.messages, tokenize=False, **options)

    tokenizer.chat_template = template
    assert rendered(exported) == rendered(tokenizer, **options)
    other = dict.fromkeys(options, 1)
    assert rendered(exported, **other) == rendered(tokenizer, **other)
    shutil.rmtree(tmp_path / "exported")
