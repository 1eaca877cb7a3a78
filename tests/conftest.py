"""Every test runs on eight virtual CPU devices, with implicit rank promotion refused."""

import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Where runs keep their compiled programs unless told otherwise.
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / "pods_jax_tests")
# The programs of the tests run for milliseconds and compile for seconds.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pods_jax.assets.tokenizer import write_tokenizer
from pods_jax.config.fields import Checked
from pods_jax.models.families import read_spec
from pods_jax.models.hf_weights import export_folder
from pods_jax.models.weight_table import array_shapes

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

TINY_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Hugging Face folder of a random Qwen2 with the arithmetic task's tokenizer."""
    root = tmp_path_factory.mktemp("tiny")
    write_tokenizer(root / "source")
    (root / "source" / "config.json").write_text(json.dumps(TINY_QWEN2))
    spec, rng, layers, params = read_spec(root / "source"), np.random.default_rng(0), {}, {}
    for path, shape in array_shapes(spec).items():
        (params if len(path) == 1 else layers)[path[-1]] = jnp.asarray(
            rng.normal(1.0 if path[-1].endswith("_norm") else 0.0, 0.3, shape), jnp.float32
        )
    export_folder(params | {"layers": layers}, spec, root / "source", root / "model", dtype=jnp.float32)
    return root / "model"


@pytest.fixture(scope="session")
def compiled_once(tmp_path_factory):
    """Folder that keeps compiled programs: whole runs of equal shapes compile once per session."""
    folder = str(tmp_path_factory.mktemp("compiled"))
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def keys_read(monkeypatch):
    """Records which configuration keys are read from the call on; returns the set that grows."""

    def record():
        read = set()

        def recorded(self, name):
            read.add(f"{type(self).prefix}{name}")
            return object.__getattribute__(self, name)

        monkeypatch.setattr(Checked, "__getattribute__", recorded, raising=False)
        return read

    return record
