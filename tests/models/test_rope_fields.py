"""One source of each rotary fact is read, wherever it stands; two that disagree, and other kinds, are refused."""

import json

import pytest
from transformers import AutoConfig

from pods_jax.models.families import read_spec
from pods_jax.models.rope_fields import Rope, read_rope
from pods_jax.models.spec import Llama3Rope

NUMBERS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = NUMBERS | {"rope_type": "llama3", "original_max_position_embeddings": 64}
SCALED = Rope(5e5, Llama3Rope(8.0, 1.0, 4.0, 64))
PLAIN = Rope(5e5, None)
TOP = {"rope_theta": 500000}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
READ = {
    "plain": (TOP, PLAIN),
    "null blocks": (TOP | {"rope_scaling": None, "rope_parameters": None}, PLAIN),
    "empty blocks": (TOP | {"rope_scaling": {}, "rope_parameters": {}}, PLAIN),
    "old": (TOP | {"rope_scaling": LLAMA3}, SCALED),
    "old key of the kind": (
        TOP | {"rope_scaling": NUMBERS | {"type": "llama3"} | {"original_max_position_embeddings": 64}},
        SCALED,
    ),
    "both keys of the kind": (TOP | {"rope_scaling": LLAMA3 | {"type": "llama3"}}, SCALED),
    "theta inside the scaling": ({"rope_scaling": LLAMA3 | TOP}, SCALED),
    "theta inside and outside": (TOP | {"rope_scaling": LLAMA3 | {"rope_theta": 5e5}}, SCALED),
    "original length twice": (TOP | {"original_max_position_embeddings": 64, "rope_scaling": LLAMA3}, SCALED),
    "new": ({"rope_parameters": LLAMA3 | TOP}, SCALED),
    "new without a kind": ({"rope_parameters": TOP}, PLAIN),
    "new with theta outside": (TOP | {"rope_parameters": LLAMA3}, SCALED),
    "both blocks": (TOP | {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | TOP}, SCALED),
    "both blocks, plain": (TOP | {"rope_scaling": {"type": "default"}, "rope_parameters": TOP}, PLAIN),
    "factor one": (TOP | {"rope_scaling": LLAMA3 | {"partial_rotary_factor": 1.0}}, SCALED),
}
# Transformers keeps these blocks as they are, and its families cannot compute with them.
BY_LAYER = {
    "by kind of layer": ({"rope_parameters": {"full_attention": LLAMA3 | TOP}}, SCALED),
    "by kind of layer, theta outside": (
        TOP | {"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": None}},
        SCALED,
    ),
    "by kinds of layer that agree": (
        {"rope_parameters": dict.fromkeys(["full_attention", "sliding_attention"], LLAMA3 | TOP)},
        SCALED,
    ),
}


@pytest.mark.parametrize("name", READ | BY_LAYER)
def test_one_source_is_read_wherever_it_stands(name):
    config, rope = (READ | BY_LAYER)[name]
    assert read_rope(config) == rope


@pytest.mark.parametrize("name", READ)
def test_transformers_reads_the_same(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | READ[name][0]))
    theirs, ours = AutoConfig.from_pretrained(tmp_path).rope_parameters, read_spec(tmp_path)
    assert theirs["rope_theta"] == ours.rope_theta
    assert (theirs["rope_type"] == "llama3") == (ours.rope_scaling is not None)
    if ours.rope_scaling is not None:
        numbers = [theirs[key] for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")]
        assert Llama3Rope(*numbers) == ours.rope_scaling


YARN, LINEAR = {"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}
DYNAMIC, OTHER = {"rope_type": "dynamic", "factor": 2.0}, LLAMA3 | {"factor": 4.0}
NEW = {"rope_parameters": {"rope_type": "default"} | TOP}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        # Kinds that are not computed, in every place.
        *[(TOP | {"rope_scaling": kind}, "rope_scaling.rope_type=.* not supported") for kind in (YARN, LINEAR, DYNAMIC)],
        *[(NEW | {"rope_scaling": kind}, "rope_scaling.rope_type=.* not supported") for kind in (YARN, LINEAR, DYNAMIC)],
        (TOP | {"rope_parameters": YARN, "rope_scaling": LLAMA3}, "rope_parameters.rope_type='yarn' is not supported"),
        (
            {"rope_parameters": {"full_attention": TOP, "sliding_attention": LINEAR}},
            "rope_parameters.sliding_attention.rope_type",
        ),
        (TOP | {"rope_scaling": LLAMA3 | {"rope_type": ["llama3"]}}, "is not supported"),
        (TOP | {"rope_scaling": LLAMA3 | {"partial_rotary_factor": 0.5}}, "rope_scaling.partial_rotary_factor=0.5"),
        (TOP | {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25 is not supported"),
        # Two places that disagree.
        (NEW | {"rope_scaling": LLAMA3 | TOP}, "rope_parameters and rope_scaling disagree: theta 500000 with no scaling and"),
        (TOP | {"rope_parameters": LLAMA3, "rope_scaling": OTHER}, "rope_parameters and rope_scaling disagree"),
        (TOP | {"rope_parameters": LLAMA3, "rope_scaling": {"type": "default"}}, "rope_parameters and rope_scaling disagree"),
        (NEW | {"rope_scaling": {"rope_type": "default"}}, "rope_theta is missing"),
        (TOP | {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta=10000.0 and rope_theta=500000 disagree"),
        (
            TOP | {"rope_scaling": LLAMA3 | {"rope_theta": 1e4}},
            "rope_scaling.rope_theta=10000.0 and rope_theta=500000 dis",
        ),
        (
            TOP | {"original_max_position_embeddings": 32, "rope_scaling": LLAMA3},
            "=64 and original_max_position_embeddings=32 dis",
        ),
        (TOP | {"rope_scaling": LLAMA3 | {"type": "default"}}, "rope_type='llama3' and type='default' disagree"),
        (
            {"rope_parameters": {"full_attention": TOP, "sliding_attention": {"rope_theta": 1e4}}},
            "rope_parameters.full_attention and rope_parameters.sliding_attention disagree",
        ),
        ({"rope_parameters": {"full_attention": TOP} | TOP}, "holds both full_attention and rope_theta"),
        ({"rope_parameters": {"sliding_attention": TOP}}, "has no full_attention"),
        # A scaling without its kind, or with numbers that its kind does not take.
        (TOP | {"rope_scaling": NUMBERS}, "rope_scaling without a rope_type holds factor=8.0"),
        (TOP | {"rope_scaling": {"rope_type": None, "factor": 2.0}}, "rope_scaling without a rope_type holds factor=2.0"),
        (TOP | {"rope_scaling": LLAMA3 | {"attention_factor": 0.9}}, "rope_type='llama3' holds attention_factor=0.9"),
        (TOP | {"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "rope_type='default' holds mrope_section="),
        # Malformed.
        *[
            (TOP | {"rope_scaling": value}, "rope_scaling=.* must be an object")
            for value in ("linear", 5, ["llama3"], True, [])
        ],
        (TOP | {"rope_parameters": "default"}, "rope_parameters='default' must be an object"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention=3 must be an object"),
        (TOP | {"rope_scaling": LLAMA3 | {"factor": "8"}}, "rope_scaling: factor='8' must be a positive number"),
        (TOP | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64.0}}, "=64.0 must be an integer"),
        ({"rope_parameters": {"rope_theta": [1]}}, r"rope_theta=\[1\] must be a positive number"),
    ],
)
def test_what_disagrees_or_is_not_computed_is_refused_in_one_line(config, words):
    with pytest.raises(ValueError, match=words) as error:
        read_rope(config)
    assert "\n" not in str(error.value)
