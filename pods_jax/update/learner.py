"""The learner: kept rollouts in, a new state and metrics out.

``Learner`` is the one door of the update. It deals the kept rollouts to micro-batches, scores the reference policy where there
is a KL term, and takes one optimiser step for each epoch. An optimiser step is one jitted program with donated state: a loop
over micro-batches adds up loss, gradient and metrics, then the optimiser moves the parameters. The loss divides by a number
that belongs to the whole step, so no way of cutting the batch changes the gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from pods_jax.algorithm.losses import Loss, Numbers, evaluate_loss, join_sums, token_means, zero_sums
from pods_jax.devices.sharding import constrain, group_shards, replicate, to_local
from pods_jax.models.logprob import token_logp
from pods_jax.models.lora import join
from pods_jax.models.packing import pack, packing, unpack
from pods_jax.types import KeptBatch
from pods_jax.update.microbatches import (
    Deal,
    deal_rollouts,
    micro_batch_shape,
    most_sizes,
    padding_fraction,
    place,
    take_micro_batch,
)

# Over the epochs of a step, the gap is that of the first, before the policy has moved, and these are summed; of any other
# metric the last epoch's counts.
FIRST = ("policy/logp_gap", "policy/logp_gap_max")
SUMMED = ("tokens/trained", "update/taken", "update/nonfinite")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Trained parameters, optimiser state, and the number of optimiser steps taken (int32)."""

    params: Any
    opt_state: Any
    updates: Int[Array, ""]


@dataclass(frozen=True)
class UpdateSettings:
    """Plain numbers of the update, static in the compiled programs.

    Attributes:
        loss: The objective.
        numbers: Its clip bounds and beta.
        temperature: Sampling temperature under which log-probabilities are taken.
        epochs: Optimiser steps on each batch.
        micro_batch: Rollouts of one micro-batch over all devices; 0 is all at once.
        logit_chunk: Most logits held at once by one device.
        multiple: Packed places of a shard are a multiple of this many.
        rungs: Sizes of a micro-batch from one half to the next; 0 is one, with all padding.
    """

    loss: Loss
    numbers: Numbers = Numbers()
    temperature: float = 1.0
    epochs: int = 1
    micro_batch: int = 0
    logit_chunk: int = 1 << 22
    multiple: int = 8
    rungs: int = 0


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


class Learner:
    """The update of one decoder with one optimiser and loss; its programs are compiled once for each size that is met.

    Args:
        graph: Graph definition of the ``Decoder``.
        optimizer: The optax transformation, without the learning rate.
        schedule: Learning rate by steps of the run that are done.
        settings: Plain numbers.
        reference_graph: Graph definition of the reference policy; the decoder's own when not given.
        like: State from ``abstract_state``; the update's new state is sharded like it. The compiler alone may spell shardings
            otherwise, and the second step would compile anew.

    Attributes:
        settings: The plain numbers.
        update: One optimiser step, jitted, the state donated: ``(state, kept, frozen, logp_ref_IPWC, rate, deal)``.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        optimizer: optax.GradientTransformation,
        schedule: optax.Schedule,
        settings: UpdateSettings,
        *,
        reference_graph: nnx.GraphDef | None = None,
        like: TrainState | None = None,
    ):
        shardings = None if like is None else (jax.tree.map(lambda shape: shape.sharding, like), None)
        self.settings = settings
        self.update = jax.jit(partial(_update, graph, optimizer, settings), donate_argnums=0, out_shardings=shardings)
        self._reference_logp = jax.jit(partial(_reference_logp, reference_graph or graph, settings))
        self._rate = jax.jit(schedule)

    def __call__(
        self, state: TrainState, kept: KeptBatch, step: int, frozen: Any = None, reference: Any = None
    ) -> tuple[TrainState, dict[str, float]]:
        """Trains what has signal among the kept rollouts; with nothing to train the optimiser rests.

        Args:
            state: State before the step; its memory is taken over.
            kept: The kept rollouts.
            step: Step of the run, from 1, which decides the learning rate.
            frozen: Parameters that are not trained (the base of adapters), or None.
            reference: Parameters of the KL term's reference policy, or None.

        Returns:
            The state after the step, and the metrics of its optimiser steps.
        """
        deal, metrics = self.deal(kept)
        rate = self._rate(replicate(np.int32(step - 1)))
        epochs: list[dict[str, Array]] = []
        if deal is not None:
            placed = place(deal)
            logp_ref_IPWC = None if reference is None else self._reference_logp(reference, kept, placed)
            for _ in range(self.settings.epochs):
                state, trained = self.update(state, kept, frozen, logp_ref_IPWC, rate, placed)
                epochs.append(trained)
        epochs, rate = to_local((epochs, rate))
        return state, metrics | _over_epochs(epochs) | {"policy/learning_rate": float(rate)}

    def deal(self, kept: KeptBatch) -> tuple[Deal | None, dict[str, float]]:
        """Micro-batches of the kept rollouts, on the host (None with nothing to train), and the share that is padding."""
        length_PM, weight_PM, prompt_length_P = to_local((kept.length_PM, kept.weight_PM, kept.prompt_length_P))
        if not weight_PM.any():
            return None, {"update/padding_fraction": 0.0}
        prompts, rollouts, completion_length = kept.tokens_PMC.shape
        padded = {"completion_length": completion_length, "prompt_length": kept.prompt_PL.shape[1]}
        deal = deal_rollouts(
            length_PM,
            weight_PM,
            **padded,
            shape=micro_batch_shape(prompts, rollouts, self.settings.micro_batch, group_shards()),
            shards=group_shards(),
            multiple=self.settings.multiple,
            rungs=self.settings.rungs,
        )
        waste = padding_fraction(deal, prompt_length_P, int(length_PM[weight_PM > 0].sum()), **padded)
        return deal, {"update/padding_fraction": waste}

    def most_programs(self, prompts: int, kept: int) -> int:
        """Most programs that are ever compiled for one padded length of prompts and completions."""
        groups, rollouts = micro_batch_shape(prompts, kept, self.settings.micro_batch, group_shards())
        sizes = most_sizes(groups, groups * group_shards() == prompts and rollouts == kept, self.settings.rungs)
        return sizes * (2 if self.settings.numbers.beta else 1)

    def compiled_programs(self) -> int:
        """Number of compiled programs of the update so far."""
        return self.update._cache_size() + self._reference_logp._cache_size()  # type: ignore[attr-defined]


def _over_epochs(epochs: Sequence[dict[str, Any]]) -> dict[str, float]:
    if not epochs:
        return {"tokens/trained": 0.0, "update/taken": 0.0}
    metrics = epochs[-1] | {name: epochs[0][name] for name in FIRST}
    metrics |= {name: sum(epoch[name] for epoch in epochs) for name in SUMMED}
    return {name: float(value) for name, value in metrics.items()}


def _scores(
    graph: nnx.GraphDef, settings: UpdateSettings, params: Any, batch: KeptBatch, places: int
) -> tuple[Float[Array, "P M C"], Float[Array, "P M C"]]:
    """Log-probabilities and entropies of the completions' tokens; in so many packed places of each shard, or as they lie."""
    decoder = nnx.merge(graph, params)
    mesh = jax.sharding.get_abstract_mesh()
    score = partial(
        token_logp,
        head_DV=decoder.head_DV(),
        temperature=jnp.float32(settings.temperature),
        logit_chunk=settings.logit_chunk,
        shards=1 if mesh.empty else mesh.size,
        entropy_gradient=settings.loss.entropy_gradient,
    )
    if not places:
        hidden_PMCD = decoder.group_hidden(batch.prompt_PL, batch.prompt_length_P, batch.tokens_PMC)
        return score(hidden_PMCD, tokens_PMC=batch.tokens_PMC)
    shape, shards = batch.tokens_PMC.shape, group_shards()
    trained_PM = jnp.where(batch.weight_PM > 0, batch.length_PM, 0)
    layout = packing(trained_PM.reshape(shards, -1), shape[-1], places)
    hidden_STD = decoder.packed_hidden(batch.prompt_PL, batch.prompt_length_P, batch.tokens_PMC, layout)
    tokens_ST = pack(batch.tokens_PMC.reshape(shards, -1, shape[-1]), layout)
    logp, entropy = score(hidden_STD[:, None], tokens_PMC=tokens_ST[:, None])
    return unpack(logp[:, 0], layout).reshape(shape), unpack(entropy[:, 0], layout).reshape(shape)


def _reference_logp(
    graph: nnx.GraphDef, settings: UpdateSettings, params: Any, kept: KeptBatch, deal: Deal
) -> Float[Array, "I P W C"]:
    """Log-probabilities of the reference policy, in the same micro-batches as the update."""
    blocks, shards, groups, rollouts = deal.rollout_ISGW.shape

    def one(i: Any) -> Array:
        batch = take_micro_batch(kept, deal.group_ISG[i], deal.rollout_ISGW[i])
        return _scores(graph, settings, params, batch, deal.places)[0]

    if blocks == 1:
        return one(0)[None]
    shape = (blocks, shards * groups, rollouts, kept.tokens_PMC.shape[2])
    nothing = constrain(jnp.zeros(shape, jnp.float32), (None, "prompts"))
    return jax.lax.fori_loop(0, deal.count, lambda i, logp: logp.at[i].set(one(i)), nothing)


def _update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    settings: UpdateSettings,
    state: TrainState,
    kept: KeptBatch,
    frozen: Any,
    logp_ref_IPWC: Float[Array, "I P W C"] | None,
    rate: Float[Array, ""],
    deal: Deal,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    normaliser = settings.loss.averaging.normaliser(kept.length_PM, kept.weight_PM)

    def part(params: Any, i: Any) -> tuple[Array, dict[str, Array]]:
        batch = take_micro_batch(kept, deal.group_ISG[i], deal.rollout_ISGW[i])
        logp_PMC, entropy_PMC = _scores(graph, settings, join(params, frozen), batch, deal.places)
        return evaluate_loss(
            settings.loss,
            settings.numbers,
            logp_PMC=logp_PMC,
            logp_old_PMC=batch.logp_old_PMC,
            entropy_PMC=entropy_PMC,
            advantage_PM=batch.advantage_PM,
            length_PM=batch.length_PM,
            weight_PM=batch.weight_PM,
            normaliser=normaliser,
            logp_ref_PMC=None if logp_ref_IPWC is None else logp_ref_IPWC[i],
        )

    value, sums, gradient = _accumulate(settings, part, state.params, deal)
    grad_norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(value)
    taken = finite & (normaliser > 0)
    direction, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    change = jax.tree.map(lambda x: -rate.astype(x.dtype) * x, direction)
    moved = TrainState(optax.apply_updates(state.params, change), opt_state, state.updates + 1)
    # Selected leaf by leaf: a step without signal, or with a broken gradient, leaves every bit of the state as it was.
    state = jax.tree.map(lambda new, old: jnp.where(taken, new, old), moved, state)
    return state, token_means(sums) | {
        "loss": value,
        "policy/grad_norm": grad_norm,
        "update/taken": taken.astype(jnp.float32),
        "update/nonfinite": 1.0 - finite.astype(jnp.float32),
    }


def _accumulate(
    settings: UpdateSettings, part: Callable[[Any, Any], tuple[Array, dict[str, Array]]], params: Any, deal: Deal
) -> tuple[Array, dict[str, Array], Any]:
    """Loss, token sums and gradient of the whole batch, one micro-batch at a time."""
    value_and_grad = jax.value_and_grad(part, has_aux=True)
    if deal.group_ISG.shape[0] == 1:
        (value, sums), gradient = value_and_grad(params, 0)
        return value, sums, gradient

    def add(i: Array, total: Any) -> Any:
        (value, sums), gradient = value_and_grad(params, i)
        return total[0] + value, join_sums(total[1], sums), jax.tree.map(lambda a, g: a + g.astype(a.dtype), total[2], gradient)

    nothing = (
        jnp.float32(0),
        zero_sums(settings.loss, settings.numbers),
        jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
    )
    value, sums, gradient = jax.lax.fori_loop(0, deal.count, add, nothing)
    return value, sums, jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, params)
