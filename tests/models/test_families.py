import json

import pytest

from pods_jax.models.families import FAMILIES, read_spec, spec_from_config
from pods_jax.models.spec import DecoderSpec, Llama3Rope

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "layer_types": ["full_attention"] * 28,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_SCALING,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
CONFIGS = {"Qwen2ForCausalLM": QWEN2, "Qwen3ForCausalLM": QWEN3, "LlamaForCausalLM": LLAMA}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_qwen2_has_qkv_biases_and_derives_its_head_size():
    assert spec_from_config(QWEN2) == DecoderSpec(
        vocab_size=151936,
        width=896,
        layers=24,
        q_heads=14,
        kv_heads=2,
        head_size=64,
        feed_forward=4864,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=True,
        qkv_bias=True,
        max_positions=32768,
    )


def test_qwen3_normalises_heads_and_keeps_its_own_head_size():
    assert spec_from_config(QWEN3) == DecoderSpec(
        vocab_size=151936,
        width=1024,
        layers=28,
        q_heads=16,
        kv_heads=8,
        head_size=128,
        feed_forward=3072,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=True,
        qk_norm=True,
        max_positions=40960,
    )


def test_llama_reads_the_llama3_scaling():
    spec = spec_from_config(LLAMA)
    assert spec.rope_scaling == Llama3Rope(32.0, 1.0, 4.0, 8192)
    assert (spec.rope_theta, spec.norm_eps, spec.qkv_bias, spec.qk_norm) == (5e5, 1e-5, False, False)


def test_both_styles_of_rotary_settings_give_the_same_spec():
    new = without(LLAMA, "rope_theta", "rope_scaling") | {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 500000.0}}
    assert spec_from_config(new) == spec_from_config(LLAMA)
    half_new = without(LLAMA, "rope_scaling") | {"rope_parameters": LLAMA3_SCALING}
    assert spec_from_config(half_new) == spec_from_config(LLAMA)


def test_the_old_key_type_is_read_as_rope_type():
    with pytest.raises(ValueError, match=r"rope_scaling.rope_type='linear'.*'default', 'llama3'"):
        spec_from_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert spec_from_config(LLAMA | {"rope_scaling": {"type": "default"}}).rope_scaling is None


def test_model_type_decides_where_no_architecture_is_named():
    assert spec_from_config(without(QWEN3, "architectures")) == spec_from_config(QWEN3)
    assert spec_from_config(QWEN3 | {"architectures": None}) == spec_from_config(QWEN3)


def test_absent_tie_word_embeddings_means_untied():
    assert not spec_from_config(without(LLAMA, "tie_word_embeddings")).tied


def test_null_key_value_heads_means_one_for_each_query_head():
    assert spec_from_config(LLAMA | {"num_key_value_heads": None}).kv_heads == 32


def test_read_spec_reads_the_file_and_names_it_in_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert read_spec(tmp_path) == spec_from_config(QWEN2)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | {"hidden_act": "gelu"}))
    with pytest.raises(ValueError, match=rf"{tmp_path}.*hidden_act='gelu'"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="JSON list, expected an object"):
        read_spec(tmp_path)


def test_unknown_architectures_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'MistralForCausalLM' is not supported.*Qwen2ForCausalLM.*LlamaForCausalLM"):
        spec_from_config(QWEN2 | {"architectures": ["MistralForCausalLM"]})
    with pytest.raises(ValueError, match=r"model_type='mistral' is not supported.*qwen2, qwen3, llama"):
        spec_from_config(without(QWEN2, "architectures") | {"model_type": "mistral"})


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"pretraining_tp": 2},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"num_experts": 60},
        {"num_local_experts": 8},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_would_change_the_arithmetic_is_refused_by_name(architecture, change):
    key = next(iter(change))
    key = "rope_type|partial_rotary_factor" if key == "rope_parameters" else key
    with pytest.raises(ValueError, match=rf"({key}).*not supported.*supported: "):
        spec_from_config(CONFIGS[architecture] | change)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
def test_a_missing_or_impossible_number_is_named(architecture, key):
    config = CONFIGS[architecture]
    with pytest.raises(ValueError, match=f"{key} is missing"):
        spec_from_config(without(config, key))
    for value in (0, -1, "64", True):
        with pytest.raises(ValueError, match=f"{key}={value!r} must be"):
            spec_from_config(config | {key: value})


def test_a_missing_rotary_base_is_named():
    with pytest.raises(ValueError, match="rope_theta is missing"):
        spec_from_config(without(QWEN2, "rope_theta"))
    with pytest.raises(ValueError, match="rope_theta is missing"):
        spec_from_config(QWEN3 | {"rope_parameters": {"rope_type": "default"}})


def test_qwen3_must_name_its_head_size():
    with pytest.raises(ValueError, match="head_dim is missing"):
        spec_from_config(without(QWEN3, "head_dim"))


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_an_incomplete_llama3_scaling_is_named(key):
    with pytest.raises(ValueError, match=f"rope_scaling: {key} is missing"):
        spec_from_config(LLAMA | {"rope_scaling": without(LLAMA3_SCALING, key)})


def test_impossible_arithmetic_is_refused():
    with pytest.raises(ValueError, match="num_attention_heads=14 must be a multiple of num_key_value_heads=4"):
        spec_from_config(QWEN2 | {"num_key_value_heads": 4})
    with pytest.raises(ValueError, match="hidden_size=897 must be a multiple of num_attention_heads=14"):
        spec_from_config(QWEN2 | {"hidden_size": 897})
    with pytest.raises(ValueError, match="head size 63 is odd"):
        spec_from_config(LLAMA | {"head_dim": 63})
    with pytest.raises(ValueError, match=r"high_freq_factor=1.0 must be above low_freq_factor=1.0"):
        spec_from_config(LLAMA | {"rope_scaling": LLAMA3_SCALING | {"high_freq_factor": 1.0}})
    with pytest.raises(ValueError, match="tie_word_embeddings='no' must be true or false"):
        spec_from_config(QWEN2 | {"tie_word_embeddings": "no"})
