"""The learner: kept rollouts in, one optimiser step out.

The whole step is one jitted program with donated state: a loop over micro-batches adds up loss, gradient and statistics, then
the optimiser moves the parameters. The loss divides by a number that belongs to the whole step, so no way of cutting the batch
changes the gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from pods_jax.algorithm.losses import Loss, LossStats
from pods_jax.algorithm.masked import length_mask, safe_divide
from pods_jax.config.entries import micro_batch_sizes
from pods_jax.devices.sharding import constrain
from pods_jax.models.logprob import token_logp
from pods_jax.models.lora import join
from pods_jax.models.packing import pack, packing, unpack
from pods_jax.types import KeptBatch
from pods_jax.update.microbatches import UpdatePlan, most_sizes, plan_update, take_micro_batch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Trained parameters, optimiser state, and the number of optimiser steps taken (int32)."""

    params: Any
    opt_state: Any
    updates: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UpdateMetrics:
    """Means over trained tokens, on the device; ``taken`` is 0 when the optimiser rested: nothing to train, or not finite."""

    loss: Float[Array, ""]
    entropy: Float[Array, ""]
    kl: Float[Array, ""]
    clip_low_fraction: Float[Array, ""]
    clip_high_fraction: Float[Array, ""]
    ratio_deviation: Float[Array, ""]
    logp_gap: Float[Array, ""]
    logp_gap_max: Float[Array, ""]
    grad_norm: Float[Array, ""]
    tokens: Float[Array, ""]
    taken: Float[Array, ""]
    finite: Float[Array, ""]


@dataclass(frozen=True)
class UpdateSettings:
    """Plain numbers of the update, static in the compiled program.

    Attributes:
        clip_low: Lower clip of the ratio is 1 - clip_low.
        clip_high: Upper clip of the ratio is 1 + clip_high.
        beta: Weight of the KL term.
        temperature: Sampling temperature under which log-probabilities are taken.
        micro_batch: Rollouts of one micro-batch over all devices; 0 is all at once.
        chunk_logits: Most logits held at once by one device.
        data_shards: Devices over which groups are spread.
        devices: All devices.
        tile: Packed places of a shard are a multiple of this many.
        sizes: Sizes of a micro-batch from one half to the next; 0 is one, with all padding.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    temperature: float = 1.0
    micro_batch: int = 0
    chunk_logits: int = 1 << 22
    data_shards: int = 1
    devices: int = 1
    tile: int = 8
    sizes: int = 0


def abstract_state(params: Any, *, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes of the state before the first step, each of the optimiser's moments with its parameter's sharding.

    Nothing ties a moment's zeros to the parameter: the compiler alone would put all of them on every device.
    """

    def beside(moment: jax.ShapeDtypeStruct, param: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=param.sharding)

    opt_state = optax.tree_map_params(optimizer, beside, jax.eval_shape(optimizer.init, params), params)
    return TrainState(params, opt_state, jax.ShapeDtypeStruct((), jnp.int32))  # type: ignore[arg-type]


def init_state(params: Any, *, optimizer: optax.GradientTransformation) -> TrainState:
    """State before the first step, placed as ``abstract_state`` says."""
    shardings = jax.tree.map(lambda shape: shape.sharding, abstract_state(params, optimizer=optimizer).opt_state)
    return TrainState(params, jax.jit(optimizer.init, out_shardings=shardings)(params), jnp.int32(0))


# --- selecting ----------------------------------------------------------------------------------------------------------------


# --- updating -----------------------------------------------------------------------------------------------------------------


class Learner:
    """Compiled programs of the update for one decoder, optimiser and loss.

    Args:
        graph: Graph definition of the ``Decoder``.
        optimizer: The optax transformation.
        loss: Entry of ``LOSSES``.
        settings: Plain numbers.
        reference_graph: Graph definition of the reference policy; the decoder's own when not given.
        like: State from ``abstract_state``; the update's new state is sharded like it. The compiler alone may spell shardings
            otherwise, and the second step would compile anew.

    Attributes:
        update: ``(state, kept, frozen=None, plan=None) -> (state, UpdateMetrics)``, jitted, the state donated; ``frozen`` holds
            the parameters that are not trained (the base beside adapters), ``plan`` is from ``update_plan.py``. Without a plan
            the whole batch is trained with its padding; the gradient is the same.
        logp: ``(params, kept) -> logp_PMC`` of the reference policy, jitted.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        optimizer: optax.GradientTransformation,
        loss: Loss,
        settings: UpdateSettings,
        *,
        reference_graph: nnx.GraphDef | None = None,
        like: TrainState | None = None,
    ):
        shardings = None if like is None else (jax.tree.map(lambda shape: shape.sharding, like), None)
        self.settings = settings
        step = partial(_update, graph, optimizer, loss, settings)
        self.update = jax.jit(step, donate_argnums=0, out_shardings=shardings)
        self.logp = jax.jit(partial(_batch_logp, graph if reference_graph is None else reference_graph, settings))

    def plan(
        self, length_PM: Int[np.ndarray, "P M"], weight_PM: Float[np.ndarray, "P M"], *, steps: int, prompt_length: int
    ) -> UpdatePlan:
        """The plan of an update of these kept rollouts, still on the host; completions are padded to ``steps`` tokens."""
        chosen = self.settings
        prompts, kept = length_PM.shape
        return plan_update(
            length_PM,
            weight_PM,
            steps=steps,
            prompt_length=prompt_length,
            shape=micro_batch_shape(prompts, kept, chosen.micro_batch, chosen.data_shards),
            shards=chosen.data_shards,
            tile=chosen.tile,
            sizes=chosen.sizes,
        )

    def most_programs(self, prompts: int, kept: int) -> int:
        """Most programs of the update that are ever compiled for one padded length of prompts and completions."""
        chosen = self.settings
        groups, rollouts = micro_batch_shape(prompts, kept, chosen.micro_batch, chosen.data_shards)
        return most_sizes(groups, groups * chosen.data_shards == prompts and rollouts == kept, chosen.sizes)

    def with_reference(self, params: Any, kept: KeptBatch) -> KeptBatch:
        """The batch with the log-probabilities of the reference parameters, of all groups and with all padding."""
        return replace(kept, logp_ref_PMC=self.logp(params, kept))

    def compiled_programs(self) -> int:
        """Number of compiled programs so far."""
        return self.update._cache_size() + self.logp._cache_size()  # type: ignore[attr-defined]


def _scores(
    graph: nnx.GraphDef, settings: UpdateSettings, params: Any, batch: KeptBatch, places: int = 0
) -> tuple[Float[Array, "P M C"], Float[Array, "P M C"]]:
    """Log-probabilities and entropies of the completions' tokens; in so many packed places of each shard, or as they lie."""
    decoder = nnx.merge(graph, params)
    score = partial(
        token_logp,
        head_DV=decoder.head_DV(),
        temperature=jnp.float32(settings.temperature),
        chunk_logits=settings.chunk_logits,
        shards=settings.devices,
    )
    if not places:
        hidden_PMCD = decoder.group_hidden(batch.prompt_PL, batch.prompt_length_P, batch.tokens_PMC)
        return score(hidden_PMCD, tokens_PMC=batch.tokens_PMC)
    shape, shards = batch.tokens_PMC.shape, settings.data_shards
    by_shard = (shards, -1, shape[-1])
    trained_PM = jnp.where(batch.weight_PM > 0, batch.length_PM, 0)
    layout = packing(trained_PM.reshape(shards, -1), shape[-1], places)
    hidden_STD = decoder.packed_hidden(batch.prompt_PL, batch.prompt_length_P, batch.tokens_PMC, layout)
    tokens_ST = pack(batch.tokens_PMC.reshape(by_shard), layout)
    logp, entropy = score(hidden_STD[:, None], tokens_PMC=tokens_ST[:, None])
    return unpack(logp[:, 0], layout).reshape(shape), unpack(entropy[:, 0], layout).reshape(shape)


def _batch_logp(graph: nnx.GraphDef, settings: UpdateSettings, params: Any, kept: KeptBatch) -> Float[Array, "P M C"]:
    micro = split_micro_batches(kept, settings.micro_batch, settings.data_shards)
    _, logp = jax.lax.scan(lambda carry, batch: (carry, _scores(graph, settings, params, batch)[0]), None, micro)
    prompts, rollouts = kept.length_PM.shape
    return join_micro_batches(logp, (prompts, rollouts), settings.data_shards)


def _update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    settings: UpdateSettings,
    state: TrainState,
    kept: KeptBatch,
    frozen: Any = None,
    plan: UpdatePlan | None = None,
) -> tuple[TrainState, UpdateMetrics]:
    normaliser = loss.normaliser(kept.length_PM, kept.weight_PM)
    value, gradient, stats, entropy = _accumulate(graph, loss, settings, state.params, frozen, kept, normaliser, plan)
    grad_norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(value)
    taken = finite & (normaliser > 0)
    steps, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    moved = TrainState(optax.apply_updates(state.params, steps), opt_state, state.updates + 1)
    # Select leaf by leaf: a step without signal, or with a broken gradient, leaves every bit of the state as it was.
    state = jax.tree.map(lambda new, old: jnp.where(taken, new, old), moved, state)
    mean = partial(safe_divide, count=stats.tokens)
    return state, UpdateMetrics(
        loss=value,
        entropy=mean(entropy),
        kl=mean(stats.kl),
        clip_low_fraction=mean(stats.clipped_low),
        clip_high_fraction=mean(stats.clipped_high),
        ratio_deviation=mean(stats.ratio_deviation),
        logp_gap=mean(stats.logp_gap),
        logp_gap_max=stats.logp_gap_max,
        grad_norm=grad_norm,
        tokens=stats.tokens,
        taken=taken.astype(jnp.float32),
        finite=finite.astype(jnp.float32),
    )


def _accumulate(
    graph: nnx.GraphDef,
    loss: Loss,
    settings: UpdateSettings,
    params: Any,
    frozen: Any,
    kept: KeptBatch,
    normaliser: Array,
    plan: UpdatePlan | None,
) -> tuple[Array, Any, LossStats, Array]:
    """Loss, gradient, statistics and summed entropy of the whole batch, one micro-batch at a time."""

    def part(params: Any, batch: KeptBatch) -> tuple[Array, tuple[LossStats, Array]]:
        places = 0 if plan is None else plan.places
        logp_PMC, entropy_PMC = _scores(graph, settings, join(params, frozen), batch, places)
        value, stats = loss.value(
            logp_PMC,
            batch.logp_old_PMC,
            batch.advantage_PM,
            batch.length_PM,
            batch.weight_PM,
            normaliser=normaliser,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            beta=settings.beta,
            logp_ref_PMC=batch.logp_ref_PMC,
        )
        trained = length_mask(batch.length_PM, logp_PMC.shape[-1]) & (batch.weight_PM > 0)[..., None]
        return value, (stats, jnp.sum(jnp.where(trained, entropy_PMC, 0.0)))

    value_and_grad = jax.value_and_grad(part, has_aux=True)
    count, micro_batch = _micro_batches(kept, settings, plan)
    if count is None:
        (value, (stats, entropy)), gradient = value_and_grad(params, micro_batch(0))
        return value, gradient, stats, entropy

    def add(i: Array, total: Any) -> Any:
        (value, (stats, entropy)), gradient = value_and_grad(params, micro_batch(i))
        gradient = jax.tree.map(lambda a, g: a + g.astype(a.dtype), total[1], gradient)
        return total[0] + value, gradient, total[2] + stats, total[3] + entropy

    zero = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    start = (jnp.float32(0), zero, LossStats.zero(), jnp.float32(0))
    value, gradient, stats, entropy = jax.lax.fori_loop(0, count, add, start)
    return value, jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, params), stats, entropy


def _micro_batches(
    kept: KeptBatch, settings: UpdateSettings, plan: UpdatePlan | None
) -> tuple[Array | int | None, Callable[[Any], KeptBatch]]:
    """How many micro-batches there are (None for a single one), and the function that gives each."""
    if plan is not None:
        single = plan.group_ISG.shape[0] == 1
        return None if single else plan.count, lambda i: take_micro_batch(kept, plan.group_ISG[i], plan.rollout_ISGW[i])
    micro = split_micro_batches(kept, settings.micro_batch, settings.data_shards)
    count = micro.length_PM.shape[0]
    return None if count == 1 else count, lambda i: jax.tree.map(lambda x: x[i], micro)


# --- micro-batches ------------------------------------------------------------------------------------------------------------


def micro_batch_shape(prompts: int, kept: int, micro_batch: int, data_shards: int) -> tuple[int, int]:
    """Groups per device and rollouts per group of one micro-batch."""
    if micro_batch == 0:
        return prompts // data_shards, kept
    if micro_batch not in (sizes := micro_batch_sizes(prompts, kept, data_shards)):
        raise ValueError(
            f"update.micro_batch={micro_batch} cannot cut {prompts} groups of {kept} kept rollouts over {data_shards} devices: "
            f"possible are {', '.join(map(str, sizes))}"
        )
    each = micro_batch // data_shards
    return (each // kept, kept) if each >= kept else (1, each)


def split_micro_batches(kept: KeptBatch, micro_batch: int, data_shards: int) -> KeptBatch:
    """Cuts a batch into micro-batches on a new leading axis, each with its share of every device's groups.

    Args:
        kept: The whole batch.
        micro_batch: Rollouts of one micro-batch over all devices; 0 is all.
        data_shards: Devices over which groups are spread.

    Raises:
        ValueError: the batch cannot be cut so.
    """
    prompts, rollouts = kept.length_PM.shape
    groups, size = micro_batch_shape(prompts, rollouts, micro_batch, data_shards)
    parts = rollouts // size

    def cut(x: Array, per_rollout: bool) -> Array:
        tail = x.shape[2:] if per_rollout else x.shape[1:]
        x = (
            x.reshape(data_shards, -1, groups, parts, size, *tail)
            if per_rollout
            else x.reshape(data_shards, -1, groups, 1, *tail)
        )
        if per_rollout:  # shards, blocks, groups, parts, size -> blocks, parts, shards, groups, size
            x = jnp.transpose(x, (1, 3, 0, 2, 4, *range(5, x.ndim))).reshape(-1, data_shards * groups, size, *tail)
        else:
            x = jnp.repeat(jnp.moveaxis(x, (0, 3), (2, 1)), parts, axis=1).reshape(-1, data_shards * groups, *tail)
        return constrain(x, (None, "prompts", *[None] * (x.ndim - 2)))

    names = [f.name for f in fields(kept) if getattr(kept, f.name) is not None]
    return replace(kept, **{name: cut(getattr(kept, name), not name.startswith("prompt_")) for name in names})


def join_micro_batches(x: Array, shape: tuple[int, int], data_shards: int) -> Array:
    """Undoes ``split_micro_batches`` for one per-rollout array ``[micro, groups, size, ...]``; ``shape`` is ``(P, M)``."""
    prompts, rollouts = shape
    size, tail = x.shape[2], x.shape[3:]
    groups, parts = x.shape[1] // data_shards, rollouts // size
    x = x.reshape(-1, parts, data_shards, groups, size, *tail)
    x = jnp.transpose(x, (2, 0, 3, 1, 4, *range(5, x.ndim)))
    return constrain(x.reshape(prompts, rollouts, *tail), ("prompts", *[None] * (x.ndim - 4)))
