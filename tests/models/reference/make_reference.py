"""Writes the frozen logits beside this file, from transformers' own torch models, when run as a script.

The tests run the recipe below without torch: it makes the same checkpoint anew and compares our logits with the frozen ones.
Weights come from NumPy's legacy generator, whose streams are frozen, seeded with each tensor's name.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_SHARED = {"hidden_act": "silu", "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False} | _SHARED
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False} | _SHARED
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False} | _SHARED


def _sizes(vocab, width, layers, q_heads, kv_heads, feed_forward, **others):
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": feed_forward,
    } | others


_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}

CASES = {
    "qwen2_tied": _QWEN2 | _sizes(61, 84, 3, 6, 2, 53, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True),
    "qwen2_untied": _QWEN2 | _sizes(71, 60, 2, 6, 3, 43, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False),
    "qwen3": _QWEN3 | _PLAIN_ROPE | _sizes(67, 22, 3, 6, 2, 37, head_dim=10, rms_norm_eps=1e-6, tie_word_embeddings=True),
    "llama3_scaled": _LLAMA
    | {"rope_theta": 500.0, "rope_scaling": _SCALING}
    | _sizes(59, 72, 2, 6, 2, 41, head_dim=12, rms_norm_eps=1e-5, tie_word_embeddings=False),
    "llama_plain_tied": _LLAMA | _sizes(73, 40, 2, 4, 4, 47, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=True),
}


def tensor_shapes(config):
    """Names and shapes of a checkpoint, written out independently of the package's table."""
    width, ff, q_heads, kv_heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    head = config.get("head_dim", width // q_heads)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (width,)
        shapes[at + "mlp.gate_proj.weight"] = shapes[at + "mlp.up_proj.weight"] = (ff, width)
        shapes[at + "mlp.down_proj.weight"] = (width, ff)
        shapes[at + "self_attn.o_proj.weight"] = (width, q_heads * head)
        for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads)):
            shapes[at + f"self_attn.{name}_proj.weight"] = (heads * head, width)
            if config["model_type"] == "qwen2":
                shapes[at + f"self_attn.{name}_proj.bias"] = (heads * head,)
        if config["model_type"] == "qwen3":
            shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (head,)
    return shapes


def random_tensor(name, shape):
    """Float32 values: matrices 0.2 n, norms 1 + 0.2 n, biases 0.3 n, with n standard normal."""
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    scale, offset = (0.3, 0.0) if name.endswith("bias") else (0.2, float("norm" in name))
    return (offset + scale * values).astype(np.float32)


def write_checkpoint(folder, config):
    """Writes a Hugging Face folder with config.json and model.safetensors, and returns its tensors."""
    tensors = {name: random_tensor(name, shape) for name, shape in tensor_shapes(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def main():
    import tempfile

    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    for case, config in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), config)
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        model, info = loaded
        assert not any(info.values()), info
        tokens = np.random.RandomState(0).randint(0, config["vocab_size"], size=(2, 23)).astype(np.int32)
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens).long()).logits.numpy()
        np.savez_compressed(
            Path(__file__).parent / f"{case}.npz", config=np.array(json.dumps(config)), tokens=tokens, logits=logits
        )
        print(f"{case}: logits {logits.shape}, largest {abs(logits).max():.3f}")


if __name__ == "__main__":
    main()
