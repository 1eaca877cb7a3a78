"""Which fields of a ``config.json`` are read, which must have one value, and which change no logit.

Every other field is refused by name: a model that was written for another architecture computes something else, and the
fields that say so are the only sign of it.
"""

from collections.abc import Mapping
from typing import Any

from pods_jax.json_file import shown

_READ = {
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "layer_types",
    # Read by rope_fields.py.
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    # Stop ids are read where completions are generated.
    "eos_token_id",
}
# Fields that change the computation, with the one value that this decoder computes; null means that value too.
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "rope_interleaved": False,
    "use_mrope": False,
    "pruned_heads": {},
    "per_layer_config": {},
    "quantization_config": None,
    "num_experts": None,
    "num_local_experts": None,
}
# Second names of a field, which must say the same.
_SECOND_NAMES = {
    "layer_norm_eps": "rms_norm_eps",
    "layer_norm_epsilon": "rms_norm_eps",
    "num_layers": "num_hidden_layers",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
}
# What transformers keeps in every config: provenance, dtypes, ways to compute the same, and what it returns besides logits.
_BOOKKEEPING = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_commit_hash",
    "_experts_implementation",
    "_flash_attn_2_enabled",
    "_name_or_path",
    "attn_implementation",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "dtype",
    "experts_implementation",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_decoder",
    "label2id",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "prefix",
    "problem_type",
    "return_dict",
    "task_specific_params",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tie_last_hidden_states",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "use_bfloat16",
    "use_cache",
}
_TOKEN_IDS = {
    "bos_token_id",
    "cls_token_id",
    "decoder_start_token_id",
    "mask_token_id",
    "pad_token_id",
    "sep_token_id",
    "unk_token_id",
}
# Defaults of sampling that older versions kept in the config: here the configuration of the run says them.
_SAMPLING = {
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
# Dropout is off when logits are computed, and in this learner always: the policy that is trained is the one that was sampled.
_DROPOUT = {
    "attention_dropout",
    "attn_pdrop",
    "classifier_dropout",
    "embd_pdrop",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_pdrop",
    "residual_dropout",
}
# Marks of the programs that trained, converted or published a folder of these families.
_MARKS = {
    "is_llama_config",
    "max_sequence_length",
    "neftune_noise_alpha",
    "transformers.js_config",
    "unsloth_fixed",
    "unsloth_version",
    # Another attention beyond 262,144 tokens (Qwen2.5-1M), which transformers does not compute either.
    "dual_chunk_attention_config",
}
# Without use_sliding_window both are idle in the Qwen families; a window alone is another architecture's.
_WINDOW = {"sliding_window", "max_window_layers"}

KNOWN = frozenset(_READ | set(_ONLY) | set(_SECOND_NAMES) | _BOOKKEEPING | _TOKEN_IDS | _SAMPLING | _DROPOUT | _MARKS | _WINDOW)
"""Every field that may stand in a config with a value; any other must be null."""


def check_fields(config: Mapping[str, Any], *, windows: bool) -> None:
    """Refuses a config that asks for another computation than this decoder's.

    Args:
        config: The parsed ``config.json``.
        windows: The family knows sliding windows, so that ``sliding_window`` counts only with ``use_sliding_window``.

    Raises:
        ValueError: A field is unknown, or has a value that is not computed; the message names field, value and what is
            supported.
    """
    for key, only in _ONLY.items():
        value = config.get(key)
        if value is not None and value != only:
            supported = "a config without it" if only is None else repr(only)
            raise ValueError(f"{key}={shown(value)} is not supported; supported: {supported}")
    window = config.get("sliding_window")
    if window is not None and not windows and config.get("use_sliding_window") is None:
        raise ValueError(f"sliding_window={shown(window)} is not supported; supported: a config without it")
    _check_layer_types(config)
    for key, name in _SECOND_NAMES.items():
        if config.get(key) is not None and config[key] != config.get(name):
            raise ValueError(f"{key}={shown(config[key])} and {name}={shown(config.get(name))} disagree; keep one of them")
    unknown = [f"{key}={shown(value)}" for key, value in config.items() if key not in KNOWN and value is not None]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} may change the computation, and is not supported; remove what does not")


def _check_layer_types(config: Mapping[str, Any]) -> None:
    kinds = config.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types={shown(kinds)} must be a list with the kind of each layer")
    for kind in kinds:
        if kind != "full_attention":
            raise ValueError(f"layer_types holds {shown(kind)}, which is not supported; supported: 'full_attention'")


def required(config: Mapping[str, Any], key: str) -> Any:
    """Returns a field that must stand in the config.

    Raises:
        ValueError: It does not.
    """
    if key not in config:
        raise ValueError(f"{key} is missing; the decoder cannot be built without it")
    return config[key]


def positive_int(config: Mapping[str, Any], key: str) -> int:
    """Returns an integer field of at least 1.

    Raises:
        ValueError: It is missing or something else.
    """
    value = required(config, key)
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={shown(value)} must be an integer of at least 1")
    return value


def positive(config: Mapping[str, Any], key: str) -> float:
    """Returns a finite number field above 0.

    Raises:
        ValueError: It is missing or something else.
    """
    value = required(config, key)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{key}={shown(value)} must be a positive number")
    return float(value)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """Returns a true-or-false field; an absent one is false.

    Raises:
        ValueError: It is something else.
    """
    value = config.get(key, False)
    if type(value) is not bool:
        raise ValueError(f"{key}={shown(value)} must be true or false")
    return value
