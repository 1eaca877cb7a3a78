"""The decoder-only transformer, with one set of parameters and five ways to run it.

``__call__`` is the plain forward pass over whole sequences, against which the tests hold the others. ``prefill`` and ``decode``
generate. ``group_hidden`` is the update's forward pass, with each prompt computed once per group, and ``packed_hidden`` is the
same without the completions' padding. Parameters of all layers are stacked on a leading axis; the loop over layers is a scan
(fast to compile) or unrolled (fast to run on a CPU).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pods_jax.devices.sharding import constrain
from pods_jax.models import attention
from pods_jax.models.layers import rms_norm, rotary_tables, rotate
from pods_jax.models.lora import PROJECTIONS, LoraSpec, initial_adapters, project
from pods_jax.models.packing import Packing, pack, unpack
from pods_jax.models.spec import DecoderSpec

Weights = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeInputs:
    """What ``decode`` reads at every token, made once outside the token loop.

    Attributes:
        layers: Layer weights in the compute dtype, cut into layers where the loop is unrolled.
        head_DV: Output head in the compute dtype.
        tables_TP1h: Cosine and sine of T consecutive completion positions of each prompt.
        begin: The first of these positions (int32).
    """

    layers: Any
    head_DV: Float[Array, "D V"]
    tables_TP1h: tuple[Float[Array, "T P 1 h"], Float[Array, "T P 1 h"]]
    begin: Int[Array, ""]


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype), axes=axes)


def _constant(value: float, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(jnp.full(shape, value, dtype), axes=axes)


class DecoderLayers(nnx.Module):
    """Parameters of all layers, stacked on a leading axis."""

    def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, dtype: DTypeLike, lora: LoraSpec | None = None):
        layers, width, q_heads, kv_heads, head, ff = (
            spec.layers,
            spec.width,
            spec.q_heads,
            spec.kv_heads,
            spec.head_size,
            spec.feed_forward,
        )
        self.input_norm = _constant(1.0, (layers, width), ("layers", "norm"), dtype)
        self.q = _normal(rngs, (layers, width, q_heads, head), ("layers", "embed", "q_heads", "head"), dtype)
        self.k = _normal(rngs, (layers, width, kv_heads, head), ("layers", "embed", "kv_heads", "head"), dtype)
        self.v = _normal(rngs, (layers, width, kv_heads, head), ("layers", "embed", "kv_heads", "head"), dtype)
        self.o = _normal(rngs, (layers, q_heads, head, width), ("layers", "q_heads", "head", "embed"), dtype)
        if spec.qkv_bias:
            self.q_bias = _constant(0.0, (layers, q_heads, head), ("layers", "q_heads", "head"), dtype)
            self.k_bias = _constant(0.0, (layers, kv_heads, head), ("layers", "kv_heads", "head"), dtype)
            self.v_bias = _constant(0.0, (layers, kv_heads, head), ("layers", "kv_heads", "head"), dtype)
        if spec.qk_norm:
            self.q_norm = _constant(1.0, (layers, head), ("layers", "norm"), dtype)
            self.k_norm = _constant(1.0, (layers, head), ("layers", "norm"), dtype)
        self.post_norm = _constant(1.0, (layers, width), ("layers", "norm"), dtype)
        self.gate = _normal(rngs, (layers, width, ff), ("layers", "embed", "mlp"), dtype)
        self.up = _normal(rngs, (layers, width, ff), ("layers", "embed", "mlp"), dtype)
        self.down = _normal(rngs, (layers, ff, width), ("layers", "mlp", "embed"), dtype)
        if lora is not None:
            for name, (axes, value) in initial_adapters(spec, lora, rngs.params()).items():
                setattr(self, name, nnx.Param(value, axes=axes))


class Decoder(nnx.Module):
    """A decoder-only transformer of any shape in ``DecoderSpec``.

    Args:
        spec: The shape.
        rngs: Source of the initial parameters (normal, standard deviation 0.02).
        param_dtype: Dtype in which parameters are stored.
        compute_dtype: Dtype of activations and matrix products; logits are float32.
        unroll: Unroll the layer loop instead of scanning it.
        remat: Recompute each layer's activations in the backward pass.
        form: Entry of ``attention.DECODE_FORMS``.
        lora: Low-rank adapters of the projections; None for a plain decoder.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike = jnp.float32,
        unroll: bool = False,
        remat: bool = False,
        form: str = "dots",
        lora: LoraSpec | None = None,
    ):
        self.spec = spec
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.unroll = unroll
        self.remat = remat
        self.form = form
        self.adapter_scale = 0.0 if lora is None else lora.scale
        self.embed = _normal(rngs, (spec.vocab_size, spec.width), ("vocab", "embed"), param_dtype)
        self.layers = DecoderLayers(spec, rngs=rngs, dtype=param_dtype, lora=lora)
        self.final_norm = _constant(1.0, (spec.width,), ("norm",), param_dtype)
        if not spec.tied:
            self.head = _normal(rngs, (spec.width, spec.vocab_size), ("embed", "vocab"), param_dtype)

    # --- the plain forward ---------------------------------------------------------------------------------------------------

    def __call__(self, tokens_PL: Int[Array, "P L"]) -> Float[Array, "P L V"]:
        """Returns float32 logits at every position of right-padded sequences."""
        hidden_PLD, _ = self.prefill(tokens_PL)
        return self.logits(hidden_PLD)

    # --- generating ----------------------------------------------------------------------------------------------------------

    def prefill(self, tokens_PL: Int[Array, "P L"]) -> tuple[Float[Array, "P L D"], Any]:
        """Returns the final hidden states of right-padded prompts, and the prompt cache of every layer."""
        tables = rotary_tables(jnp.arange(tokens_PL.shape[1])[None], self.spec)
        prompt_cache = attention.DECODE_FORMS[self.form].prompt_cache

        def layer(x, w, _):
            q, k, v = self._project(w, x, tables)
            x = self._close(w, x, attention.prompt_attention(q, k, v))
            return constrain(x, ("prompts", "tokens", "width")), prompt_cache(k, v)

        x, cache = self._through_layers(layer, self._embed(tokens_PL), self._cast_layers())
        return self._final(x), cache

    def decode_inputs(self, prompt_length_P: Int[Array, "P"], begin: int, end: int) -> DecodeInputs:
        """Returns what ``decode`` reads at the completion positions ``begin .. end - 1``.

        Made inside the token loop, a CPU would compute the rotary tables anew for every row and head of every layer.
        """
        positions_TP = jnp.arange(begin, end)[:, None] + prompt_length_P[None]
        tables = rotary_tables(positions_TP[..., None], self.spec)
        return DecodeInputs(self._cast_layers(), self.head_DV(), tables, jnp.int32(begin))

    def decode(
        self,
        inputs: DecodeInputs,
        token_PN: Int[Array, "P N"],
        prompt_length_P: Int[Array, "P"],
        prompt_cache: Any,
        cache: Any,
        filled: Int[Array, ""],
    ) -> tuple[Float[Array, "P N V"], Any]:
        """Runs one token of every rollout through all layers.

        Args:
            inputs: What ``decode_inputs`` returned for positions that include ``filled``.
            token_PN: The token at completion position ``filled``.
            prompt_length_P: Prompt lengths in tokens.
            prompt_cache: What ``prefill`` returned.
            cache: The rollouts' own keys and values, of which the first ``filled`` tokens are set.
            filled: Number of completion tokens before this one.

        Returns:
            Float32 logits of the next token, and the cache with this token's keys and values in slot ``filled``.
        """
        form = attention.DECODE_FORMS[self.form]
        row = partial(jax.lax.dynamic_index_in_dim, index=filled - inputs.begin, keepdims=False)
        tables = jax.tree.map(row, inputs.tables_TP1h)

        def layer(x, w, caches):
            prompt, own = caches
            q, k, v = self._project(w, x, tables)
            out, new = form.attend(q, k, v, prompt, prompt_length_P, own, filled)
            return constrain(self._close(w, x, out), ("prompts", "rollouts", "width")), new

        x, new = self._through_layers(layer, self._embed(token_PN), inputs.layers, (prompt_cache, cache))
        if self.unroll:
            cache = tuple(form.write(*layer, filled) for layer in zip(cache, new, strict=True))
        else:
            cache = jax.vmap(form.write, in_axes=(0, 0, None))(cache, new, filled)
        return _logits(self._final(x), inputs.head_DV), cache

    def empty_cache(self, prompts: int, rollouts: int, capacity: int) -> Any:
        """Returns empty own caches of all layers, with room for ``capacity`` tokens of each rollout."""
        spec = self.spec
        empty = attention.DECODE_FORMS[self.form].empty_cache

        def one(_):
            return empty(prompts, rollouts, capacity, spec.kv_heads, spec.head_size, self.compute_dtype)

        return tuple(one(i) for i in range(spec.layers)) if self.unroll else jax.vmap(one)(jnp.arange(spec.layers))

    def grow_cache(self, cache: Any, capacity: int) -> Any:
        """Returns the same caches with room for ``capacity`` tokens."""
        grow = attention.DECODE_FORMS[self.form].grow
        return self.each_layer(lambda own: grow(own, capacity), cache)

    def each_layer(self, change: Callable[[Any], Any], cache: Any) -> Any:
        """Returns the own or prompt caches after ``change`` has been applied to each layer's."""
        return tuple(map(change, cache)) if self.unroll else jax.vmap(change)(cache)

    # --- the update's forward ------------------------------------------------------------------------------------------------

    def group_hidden(
        self,
        prompt_PL: Int[Array, "P L"],
        prompt_length_P: Int[Array, "P"],
        tokens_PMC: Int[Array, "P M C"],
    ) -> Float[Array, "P M C D"]:
        """Returns the final hidden states that predict each completion token, with every prompt computed once per group.

        For the token-wise parts a group is one row ``[prompt | completion 1 | ... | completion M]`` of ``L + M*C`` tokens. The
        state that predicts completion token 0 is the prompt's last; that for token t is the state of token t-1.
        """
        prompts, kept, steps = tokens_PMC.shape
        length = prompt_PL.shape[1]
        tokens_PT = jnp.concatenate([prompt_PL, tokens_PMC.reshape(prompts, kept * steps)], axis=1)
        own_positions = jnp.tile(jnp.arange(steps), kept)[None] + prompt_length_P[:, None]
        prompt_positions = jnp.broadcast_to(jnp.arange(length)[None], prompt_PL.shape)
        positions = jnp.concatenate([prompt_positions, own_positions], axis=1)

        def split(a: Array) -> tuple[Array, Array]:
            return a[:, :length], a[:, length:].reshape(prompts, kept, steps, *a.shape[2:])

        def join(on_prompt: Array, on_own: Array) -> Array:
            return jnp.concatenate([on_prompt, on_own.reshape(prompts, kept * steps, *on_own.shape[3:])], axis=1)

        x, own_PMCD = split(self._group_layers(tokens_PT, positions, prompt_length_P, split, join))
        last_P1D = jnp.take_along_axis(x, (prompt_length_P - 1)[:, None, None], axis=1)
        first_PM1D = jnp.broadcast_to(last_P1D[:, None], (prompts, kept, 1, x.shape[-1]))
        return self._final(jnp.concatenate([first_PM1D, own_PMCD[:, :, :-1]], axis=2))

    def packed_hidden(
        self,
        prompt_PL: Int[Array, "P L"],
        prompt_length_P: Int[Array, "P"],
        tokens_PMC: Int[Array, "P M C"],
        layout: Packing,
    ) -> Float[Array, "S T D"]:
        """Returns the states of ``group_hidden`` for the tokens of a layout, without computing the completions' padding.

        The layout's rows are the groups' completions in order, ``P * M / S`` of each shard.
        """
        prompts, kept, steps = tokens_PMC.shape
        shards, rows, _ = layout.place_SRC.shape
        length, groups = prompt_PL.shape[1], rows // kept
        group_ST = layout.row_ST // kept
        tokens_ST = pack(tokens_PMC.reshape(shards, rows, steps), layout)
        start_ST = jnp.take_along_axis(prompt_length_P.reshape(shards, groups), group_ST, axis=1)
        positions_SX = jnp.tile(jnp.arange(length), (shards, groups))

        def split(a: Array) -> tuple[Array, Array]:
            own = unpack(a[:, groups * length :], layout)
            return a[:, : groups * length].reshape(prompts, length, *a.shape[2:]), own.reshape(
                prompts, kept, steps, *a.shape[2:]
            )

        def join(on_prompt: Array, on_own: Array) -> Array:
            own = pack(on_own.reshape(shards, rows, steps, *on_own.shape[3:]), layout)
            return jnp.concatenate([on_prompt.reshape(shards, groups * length, *on_prompt.shape[2:]), own], axis=1)

        x = self._group_layers(
            jnp.concatenate([prompt_PL.reshape(shards, groups * length), tokens_ST], axis=1),
            jnp.concatenate([positions_SX, start_ST + layout.step_ST], axis=1),
            prompt_length_P,
            split,
            join,
        )
        own_STD = x[:, groups * length :]
        prompts_PLD = x[:, : groups * length].reshape(prompts, length, -1)
        last_PD = jnp.take_along_axis(prompts_PLD, (prompt_length_P - 1)[:, None, None], axis=1)[:, 0]
        first_STD = jnp.take_along_axis(last_PD.reshape(shards, groups, -1), group_ST[..., None], axis=1)
        before_STD = jnp.pad(own_STD, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return self._final(jnp.where((layout.step_ST == 0)[..., None], first_STD, before_STD))

    def _group_layers(
        self,
        tokens: Int[Array, "S T"],
        positions: Int[Array, "S T"],
        prompt_length_P: Int[Array, "P"],
        split: Callable[[Array], tuple[Array, Array]],
        join: Callable[[Array, Array], Array],
    ) -> Float[Array, "S T D"]:
        """Runs rows of prompts and completions through all layers; ``split`` and ``join`` part them for attention alone."""
        tables = rotary_tables(positions, self.spec)

        def layer(x, w, _):
            q, k, v = self._project(w, x, tables)
            (q, q_own), (k, k_own), (v, v_own) = map(split, (q, k, v))
            on_prompt = attention.prompt_attention(q, k, v)
            on_own = attention.completion_attention(q_own, k_own, v_own, k, v, prompt_length_P)
            out = join(on_prompt, on_own)
            return constrain(self._close(w, x, out), ("prompts", "tokens", "width")), None

        return self._through_layers(layer, self._embed(tokens), self._cast_layers())[0]

    # --- pieces --------------------------------------------------------------------------------------------------------------

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Returns the float32 logits of final hidden states."""
        return _logits(hidden, self.head_DV())

    def head_DV(self) -> Float[Array, "D V"]:
        """Returns the output head in the compute dtype, which is the embedding's transpose in a tied decoder."""
        head = jnp.einsum("vd->dv", self.embed.get_value()) if self.spec.tied else self.head.get_value()
        return head.astype(self.compute_dtype)

    def _embed(self, tokens: Int[Array, "P *time"]) -> Float[Array, "P *time D"]:
        # Gathered over the width first: a lookup in a table sharded both ways makes the compiler replicate the whole of it.
        table = constrain(self.embed.get_value(), ("vocab", "width"))
        x = jnp.take(table, tokens, axis=0).astype(self.compute_dtype)
        return constrain(x, ("prompts", "tokens", "width"))

    def _project(self, w: Weights, x: Array, tables: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Returns queries, keys and values of every token; queries and keys are normalised (Qwen3) and rotated."""
        spec = self.spec
        h = rms_norm(x, w["input_norm"], spec.norm_eps)
        q, k, v = (self._product(h, w, name) for name in ("q", "k", "v"))
        if spec.qkv_bias:
            q, k, v = (a + jnp.expand_dims(w[f"{n}_bias"], tuple(range(a.ndim - 2))) for n, a in (("q", q), ("k", k), ("v", v)))
        if spec.qk_norm:
            q, k = rms_norm(q, w["q_norm"], spec.norm_eps), rms_norm(k, w["k_norm"], spec.norm_eps)
        return rotate(q, *tables), rotate(k, *tables), v

    def _close(self, w: Weights, x: Array, attended: Array) -> Array:
        """Returns the layer's output: attention's projection and the MLP, each added to the residual stream ``x``."""
        x = x + self._product(attended, w, "o")
        h = rms_norm(x, w["post_norm"], self.spec.norm_eps)
        # Gated MLP: GLU Variants Improve Transformer, arXiv 2002.05202, equation 6 (SwiGLU).
        gated = jax.nn.silu(self._product(h, w, "gate")) * self._product(h, w, "up")
        return x + self._product(gated, w, "down")

    def _product(self, x: Array, w: Weights, name: str) -> Array:
        """Returns one projection of every token.

        On a CPU all token axes become one first: a weight's gradient contracts them, and over two axes XLA writes a transposed
        copy of the activations element by element, which costs more than the product.
        """
        if self.form not in attention.ON_CPU:
            return project(x, w, name, self.adapter_scale)
        tokens = x.shape[: x.ndim - len(PROJECTIONS[name].inputs)]
        out = project(x.reshape(-1, *x.shape[len(tokens) :]), w, name, self.adapter_scale)
        return out.reshape(*tokens, *out.shape[1:])

    def _final(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.final_norm.get_value().astype(self.compute_dtype), self.spec.norm_eps)

    def _cast_layers(self) -> Any:
        """Returns the layers' parameters in the compute dtype: stacked for the scan, or a list of one dict per layer."""
        stacked = nnx.to_pure_dict(nnx.state(self.layers))
        cast = jax.tree.map(lambda a: a.astype(self.compute_dtype), stacked)
        return unstack(cast, self.spec.layers) if self.unroll else cast

    def _through_layers(
        self, layer: Callable[[Array, Weights, Any], tuple[Array, Any]], x: Array, weights: Any, per_layer: Any = None
    ) -> tuple[Array, Any]:
        """Runs ``x`` through all layers; ``per_layer`` and the outputs are stacked (scan) or tuples of layers (unrolled)."""
        layer = jax.checkpoint(layer) if self.remat else layer
        if not self.unroll:
            return jax.lax.scan(lambda x, inputs: layer(x, *inputs), x, (weights, per_layer))
        extras = [None] * self.spec.layers if per_layer is None else list(zip(*per_layer, strict=True))
        outputs = []
        for w, extra in zip(weights, extras, strict=True):
            x, out = layer(x, w, extra)
            outputs.append(out)
        return x, tuple(outputs)


def _logits(hidden: Float[Array, "... D"], head_DV: Float[Array, "D V"]) -> Float[Array, "... V"]:
    return jnp.einsum("...d,dv->...v", hidden, head_DV, preferred_element_type=jnp.float32)


def unstack(stacked: Any, layers: int) -> list[Any]:
    """Returns a list of one tree per layer from a tree of stacked arrays.

    It uses ``split``, whose transpose is one concatenation: the backward pass would pad each slice to the whole stack.
    """
    leaves, structure = jax.tree.flatten(stacked)
    split = [jax.lax.split(leaf, (1,) * layers) for leaf in leaves]
    return [jax.tree.unflatten(structure, [jnp.squeeze(parts[i], 0) for parts in split]) for i in range(layers)]
