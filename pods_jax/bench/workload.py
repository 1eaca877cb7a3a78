"""What the benchmarks run on: a policy with random or real weights, on one device, and random prompts."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from pods_jax.assembly.policy import Architecture, load_policy, make_architecture, make_prepare
from pods_jax.config.fields import Checked, ConfigError, Count
from pods_jax.config.sections import ModelConfig
from pods_jax.devices.sharding import make_mesh, to_global
from pods_jax.models.decoder import Decoder
from pods_jax.models.spec import DecoderSpec
from pods_jax.rollout.compaction import default_width
from pods_jax.rollout.engine import RolloutEngine, default_chunk
from pods_jax.rollout.lanes import Lanes, default_lanes
from pods_jax.types import PromptBatch

RANDOM = "random"


@dataclass(frozen=True)
class ModelOptions(Checked, key="model"):
    """The policy that is measured; as in training, but random by default."""

    path: str = RANDOM
    """Hugging Face folder, "bundled" for the package's own model, or "random" for random weights of the given shape."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and matrix products."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which parameters are stored; an update is measured with float32 alone, as it is trained."""
    layers: Literal["auto", "scan", "unroll"] = "auto"
    """Layer loop; auto picks by backend."""

    def config(self) -> ModelConfig:
        """The same as a training run's section."""
        return ModelConfig(path=self.path, compute_dtype=self.compute_dtype, param_dtype=self.param_dtype)


@dataclass(frozen=True)
class ShapeOptions(Checked, key="shape"):
    """Shape of the Qwen2 with random weights that is measured when model.path is "random"."""

    vocab_size: Count = 512
    """Vocabulary (V)."""
    width: Count = 256
    """Model width (D)."""
    layers: Count = 4
    """Decoder layers."""
    q_heads: Count = 4
    """Query heads (Q)."""
    kv_heads: Count = 2
    """Key-value heads (K)."""
    head_size: Count = 64
    """Size of one head (H)."""
    feed_forward: Count = 1024
    """Width of the gated MLP (F)."""

    def __post_init__(self):
        super().__post_init__()
        if self.q_heads % self.kv_heads:
            raise ConfigError(f"shape.q_heads={self.q_heads} must be a multiple of shape.kv_heads={self.kv_heads}")
        if self.head_size % 2:
            raise ConfigError(f"shape.head_size={self.head_size} must be even: rotary positions turn pairs")

    def spec(self) -> DecoderSpec:
        """The decoder: tied embedding, biases on q, k and v."""
        return DecoderSpec(
            vocab_size=self.vocab_size,
            width=self.width,
            layers=self.layers,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            feed_forward=self.feed_forward,
            tied=True,
            qkv_bias=True,
        )


@dataclass(frozen=True)
class Policy:
    """A decoder with parameters on a mesh of one device."""

    mesh: Mesh
    architecture: Architecture
    params: Any
    compute_dtype: str

    @property
    def spec(self) -> DecoderSpec:
        """The decoder's shape."""
        return self.architecture.spec

    @property
    def platform(self) -> str:
        """The device's platform: cpu, gpu or tpu."""
        return self.mesh.devices.flat[0].platform

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.architecture.shapes))

    def describe(self) -> dict[str, Any]:
        """What a result must say of the machine and the model."""
        device = self.mesh.devices.flat[0]
        dtype = self.compute_dtype
        return {"jax": jax.__version__, "device": device.device_kind, "parameters": self.parameters, "compute_dtype": dtype}

    def engine(self, *, n: int, prompt_length: int, completion_length: int, chunk: int, lanes: int = 0) -> RolloutEngine:
        """The rollout engine as a training run builds it, with an EOS id outside the vocabulary: no completion ends early."""
        return RolloutEngine(
            self.architecture.graph,
            rollouts=n,
            max_completion_length=completion_length,
            chunk=chunk or default_chunk(self.platform),
            eos_ids=[self.spec.vocab_size],
            width=default_width(self.platform, self.spec, prompt_length),
            rungs=2,
            lanes=Lanes(lanes) if lanes else default_lanes(self.mesh.size, self.platform, self.spec),
            prepare=make_prepare(self.architecture, self.mesh, self.compute_dtype),
        )

    def prompts(self, prompts: int, length: int, seed: int) -> PromptBatch:
        """Random prompts without padding."""
        tokens = np.random.default_rng(seed).integers(self.spec.vocab_size, size=(prompts, length), dtype=np.int32)
        return to_global(self.mesh, PromptBatch(tokens, np.full(prompts, length, np.int32)))  # type: ignore[arg-type]


@contextmanager
def policy(options: ModelOptions, shape: ShapeOptions, *, remat: bool = False, trained: bool = True) -> Iterator[Policy]:
    """The policy, with its mesh set.

    Raises:
        ConfigError: ``model.path`` is neither "random" nor a folder, a shape is given for a model that has its own, or the
            policy is to be trained in another dtype than training has.
    """
    if trained and options.param_dtype != "float32":
        raise ConfigError(f"model.param_dtype={options.param_dtype} is not how a model is trained: parameters are float32")
    model, mesh = options.config(), make_mesh((1, 1, 1), jax.devices()[:1])
    if model.path != RANDOM and shape != ShapeOptions():
        raise ConfigError(f"shape.* is for model.path={RANDOM}; model.path={model.path} has its own shape")
    with jax.set_mesh(mesh):
        if model.path == RANDOM:
            architecture = make_architecture(model, shape.spec(), mesh, layers=options.layers, remat=remat)
            decoder = Decoder(architecture.spec, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(model.param_dtype))
            shardings = jax.tree.map(lambda s: s.sharding, architecture.shapes)
            params = jax.device_put(nnx.to_pure_dict(nnx.state(decoder)), shardings)
        else:
            architecture, params = load_policy(model, mesh, layers=options.layers, remat=remat)
        yield Policy(mesh, architecture, params, model.compute_dtype)
