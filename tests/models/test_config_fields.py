"""Which configs load: all fields of the libraries' own classes, and the shapes of published folders; and which are refused."""

import pytest
from transformers import GenerationConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from pods_jax.models.config_fields import KNOWN
from pods_jax.models.families import spec_from_config

# Fields of published folders, by what wrote them. Sizes are those of the folder where they are its point.
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_1M = {
    "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
}
R1_DISTILL_QWEN = {"bos_token_id": 151646, "eos_token_id": 151643, "sliding_window": 4096, "use_mrope": False}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_32B = {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "tie_word_embeddings": False}
LLAMA31 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA32 = {"head_dim": 64, "hidden_size": 2048, "tie_word_embeddings": True}
PLAIN_LLAMA = {"rope_scaling": None, "rope_theta": 10000.0}
SMOLLM2 = PLAIN_LLAMA | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_llama_config": True,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}
UNSLOTH = {"_name_or_path": "a/b", "pad_token_id": 128004, "unsloth_fixed": True, "unsloth_version": "2024.12.4"}
# What transformers 4 wrote into a config that it was told to write out whole.
WHOLE = {
    "add_cross_attention": False,
    "bad_words_ids": None,
    "chunk_size_feed_forward": 0,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "max_length": 20,
    "num_beams": 1,
    "output_attentions": False,
    "pruned_heads": {},
    "return_dict": True,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "torchscript": False,
    "typical_p": 1.0,
    "use_bfloat16": False,
}
PUBLISHED = {
    "Qwen2.5-0.5B-Instruct": QWEN25,
    "Qwen2.5-Math-1.5B": QWEN25 | {"use_mrope": False, "max_position_embeddings": 4096, "rope_theta": 10000.0},
    "Qwen2.5-7B-Instruct-1M": QWEN25 | QWEN25_1M,
    "DeepSeek-R1-Distill-Qwen-1.5B": QWEN25 | R1_DISTILL_QWEN,
    "Qwen3-0.6B": QWEN3,
    "Qwen3-32B": QWEN3 | QWEN3_32B,
    "Qwen3-4B-Instruct-2507": QWEN3 | {"rope_theta": 5000000, "max_position_embeddings": 262144},
    "Llama-3.1-8B-Instruct": LLAMA31,
    "Llama-3.2-1B": LLAMA31 | LLAMA32,
    "DeepSeek-R1-Distill-Llama-8B": LLAMA31 | {"eos_token_id": 128001},
    "SmolLM2-135M-Instruct": LLAMA31 | SMOLLM2,
    "TinyLlama-1.1B-Chat-v1.0": LLAMA31 | PLAIN_LLAMA,
    "vicuna": LLAMA31 | PLAIN_LLAMA | {"max_sequence_length": 2048, "pad_token_id": 0},
    "unsloth": LLAMA31 | UNSLOTH,
    "dropout in training": LLAMA31 | {"attention_dropout": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "written whole": LLAMA31 | WHOLE,
}
MISTRAL = LLAMA31 | PLAIN_LLAMA | {"model_type": "mistral", "sliding_window": 4096}
GRANITE = {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
SMOLLM3 = {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 8}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_folders_of_the_families_load(name):
    assert spec_from_config(PUBLISHED[name]).vocab_size == PUBLISHED[name]["vocab_size"]


@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_every_field_of_the_librarys_own_configs_is_known(family):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = family(architectures=[family.__name__.replace("Config", "ForCausalLM")], num_hidden_layers=2, **heads)
    whole = config.to_dict()
    assert not set(whole) - KNOWN
    assert not set(PretrainedConfig().to_dict()) - KNOWN
    assert not set(GenerationConfig._get_default_generation_params()) - KNOWN
    assert spec_from_config(whole).q_heads == 4
    assert spec_from_config(config.to_diff_dict()) == spec_from_config(whole)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MISTRAL, r"model_type='mistral' and architectures\[0\]='LlamaForCausalLM' disagree.*'llama'"),
        (LLAMA31 | {"model_type": "granite"} | GRANITE, "model_type='granite'"),
        (LLAMA31 | GRANITE, "attention_multiplier=0.015625, embedding_multiplier=12.0, logits_scaling=8.0, residual_mult"),
        (LLAMA31 | SMOLLM3, "no_rope_layer_interval=4, no_rope_layers="),
        (QWEN25 | {"model_type": "qwen3"}, "model_type='qwen3'"),
        (MISTRAL | {"model_type": "llama"}, "sliding_window=4096 is not supported"),
        (QWEN25 | {"use_mrope": True}, "use_mrope=True is not supported"),
        (LLAMA31 | {"rope_interleaved": True}, "rope_interleaved=True is not supported"),
        (LLAMA31 | {"is_causal": False}, "is_causal=False is not supported"),
        (LLAMA31 | {"per_layer_config": {"0": {"num_attention_heads": 8}}}, "per_layer_config=.* is not supported"),
        (LLAMA31 | {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, "auto_map="),
        (QWEN3 | {"vision_config": {"depth": 27}}, "vision_config="),
        (LLAMA31 | {"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06 and rms_norm_eps=1e-05 disagree"),
        (QWEN3 | {"layer_types": ["full_attention"] * 27}, "layer_types has 27 entries, but num_hidden_layers=28"),
        (QWEN3 | {"layer_types": 5}, "layer_types=5 must be a list"),
        (QWEN3 | {"layer_types": "full_attention"}, "layer_types='full_attention' must be a list"),
        (LLAMA31 | {"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM' must be a list"),
        (LLAMA31 | {"architectures": {"0": 1}}, "architectures=.* must be a list"),
        (LLAMA31 | {"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, "names more than one"),
        (LLAMA31 | {"architectures": ["LlamaForCausalLM", "LlamaModel"]}, r"architectures\[1\]='LlamaModel' is not supported"),
        (LLAMA31 | {"architectures": None, "model_type": ["llama"]}, r"model_type=\['llama'\] is not supported"),
    ],
)
def test_another_computation_is_refused_by_name(config, words):
    with pytest.raises(ValueError, match=words) as error:
        spec_from_config(config)
    assert "\n" not in str(error.value)


def test_a_field_that_is_null_says_nothing():
    assert spec_from_config(LLAMA31 | {"no_rope_layers": None, "sliding_window": None}) == spec_from_config(LLAMA31)


def test_a_second_name_may_say_the_same():
    assert spec_from_config(LLAMA31 | {"layer_norm_eps": 1e-5, "n_layer": 32}) == spec_from_config(LLAMA31)
