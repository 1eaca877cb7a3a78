"""Host memory that loading a checkpoint takes, against the size of its parameters.

Writes a random Qwen2 of about the asked size in several safetensors files, loads it on one device in a fresh process the way a
training run does, and reads that process's peak resident memory. Pages of the mapped files count as resident. What the process
holds before loading (the interpreter, jax and a started backend) is subtracted. On the CPU backend the parameters are host
memory too, so ``ratio`` is 1 plus what loading needs besides; on an accelerator it is what loading needs alone.

Linux only: the peak is read from /proc.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pods_jax.assembly.policy import load_policy
from pods_jax.bench.measure import print_table
from pods_jax.config.fields import Checked, ConfigError, Count, Positive
from pods_jax.config.sections import ModelConfig
from pods_jax.devices.sharding import make_mesh
from pods_jax.models.families import read_spec
from pods_jax.models.hf_weights import export_folder
from pods_jax.models.weight_table import array_shapes

LAYERS, HEAD_SIZE, VOCAB_WIDTHS = 24, 16, 16
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class LoadOptions(Checked):
    """What is loaded."""

    size_gb: Positive = 2.0
    """Size of the checkpoint in GB, met within a few percent."""
    files: Count = 4
    """Files that it is cut into, or one more."""
    file_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype in the files."""
    param_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the loaded parameters."""


def run(options: LoadOptions) -> dict[str, Any]:
    """Measures, prints the table, and returns the result.

    Raises:
        ConfigError: no /proc on this system.
    """
    if not STATUS.is_file():
        raise ConfigError(f"bench load reads {STATUS}, which this system doesn't have: Linux only")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder), options)
        files = sorted(checkpoint.glob("*.safetensors"))
        model = json.dumps({"path": str(checkpoint), "param_dtype": options.param_dtype})
        command = [sys.executable, "-c", f"from {__name__} import measure; measure()", model]
        measured = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        result = {"file_bytes": sum(file.stat().st_size for file in files), "files": len(files)} | measured
    result["ratio"] = (result["peak_bytes"] - result["before_bytes"]) / result["parameter_bytes"]
    cells = [f"{result[key] / 1e9:.3f}" for key in ("file_bytes", "parameter_bytes", "before_bytes", "peak_bytes")]
    print_table(
        f"loading {options.file_dtype} files as {options.param_dtype}, GB",
        ("files", "on disk", "parameters", "before", "peak", "(peak - before) / parameters", "wall s", "CPU s"),
        [[str(len(files)), *cells, f"{result['ratio']:.3f}", f"{result['seconds']:.1f}", f"{result['cpu_seconds']:.1f}"]],
    )
    return result


def write_checkpoint(folder: Path, options: LoadOptions) -> Path:
    """Writes the random model below ``folder``; returns its folder."""
    source, target = folder / "config", folder / "model"
    source.mkdir()
    parameters = options.size_gb * 1e9 / jnp.dtype(options.file_dtype).itemsize
    (source / "config.json").write_text(json.dumps(qwen2_config(parameters)), encoding="utf-8")
    spec, rng = read_spec(source), np.random.default_rng(0)
    params: dict[str, Any] = {"layers": {}}
    for path, shape in array_shapes(spec).items():
        branch = params if len(path) == 1 else params["layers"]
        # A view that repeats one row: nothing of the model's size is held here.
        branch[path[-1]] = np.broadcast_to(rng.standard_normal(shape[-1], np.float32), shape)
    shard_bytes = math.ceil(options.size_gb * 1e9 / options.files)
    export_folder(params, spec, source, target, dtype=options.file_dtype, shard_bytes=shard_bytes)
    return target


def qwen2_config(parameters: float) -> dict[str, Any]:
    """The config of a Qwen2 with about that many parameters: 24 layers, feed-forward 4 D, vocabulary 16 D, tied."""
    # Each layer has D^2 parameters in q and o, 4 D^2 in gate, up and down.
    heads = max(1, round(math.sqrt(parameters / (LAYERS * 14 + VOCAB_WIDTHS)) / HEAD_SIZE))
    width = heads * HEAD_SIZE
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCAB_WIDTHS * width,
        "hidden_size": width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "intermediate_size": 4 * width,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def measure() -> None:
    """Loads the model of ``sys.argv[1]``, ``model`` settings as JSON, and prints one JSON line; in a process of its own."""
    config = ModelConfig(**json.loads(sys.argv[1]))
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    jax.block_until_ready(jnp.zeros(1) + 1)
    before, wall, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    with jax.set_mesh(mesh):
        _, params = load_policy(config, mesh)
        jax.block_until_ready(params)
    result = {
        "parameter_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "before_bytes": before,
        "peak_bytes": resident("VmHWM"),
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
    }
    print(json.dumps(result))


def resident(key: str) -> int:
    """Resident bytes of this process: now (VmRSS), or at their peak since it was started (VmHWM)."""
    # getrusage would not do: on Linux its peak includes what the starting process held.
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
