"""The training loop: how a prompt becomes an update.

    prompts   = loader                       tokens and lengths of P prompts                       host
    rollouts  = engine(params, prompts)      n completions of each                                 device
    scores    = scorer(problems, texts)      rewards, part by part                                 host
    kept      = keep(rewards, rollouts)      the m whose rewards vary most, and their advantages   device
    state     = learner.update(state, kept)  loss, gradient, optimiser                             device

then metrics, and every so often an evaluation and a checkpoint.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key
from transformers import PreTrainedTokenizerBase

from pods_jax.algorithm.keeping import GroupMetrics
from pods_jax.data.prompts import pad_prompts
from pods_jax.devices.compiling import watch_compiling
from pods_jax.devices.sharding import add_up, exchange, own_rows, replicate, to_global, to_local
from pods_jax.evaluator import Evaluator
from pods_jax.models.lora import join
from pods_jax.rewards.scoring import Scorer, Scores
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.sampling import SamplingParams
from pods_jax.rollout.texts import completion_texts
from pods_jax.run.checkpoint import Checkpoints, Progress
from pods_jax.run.log import RunLog
from pods_jax.run.rollouts import RolloutRecords
from pods_jax.types import Problem, Prompt, PromptBatch, Rollouts, Selection
from pods_jax.update.learner import Learner, TrainState, UpdateMetrics
from pods_jax.update.microbatches import padding_fraction, place_plan


@dataclass(frozen=True)
class Parts:
    """What the loop puts together; built by ``train.py``.

    Attributes:
        mesh: Device mesh.
        tokenizer: For the completions' text.
        loader: Endless iterator over the prompts of each step, the same on every process.
        engine: Rollout engine.
        sampling: Sampling parameters on the device.
        scorer: Rewards.
        keep: Selection and advantages, from ``learner.make_keep``.
        learner: The update.
        schedule: Learning rate by optimiser step, jitted, for the log.
        evaluators: By metric name (``eval/accuracy``).
        log: Run log.
        checkpoints: Checkpoints of the run folder.
        frozen: Parameters that are not trained (the base beside adapters), or None.
        reference: Parameters of the KL term's reference policy, or None.
    """

    mesh: Mesh
    tokenizer: PreTrainedTokenizerBase
    loader: grain.DatasetIterator
    engine: RolloutEngine
    sampling: SamplingParams
    scorer: Scorer
    keep: Any
    learner: Learner
    schedule: Callable[[Int[Array, ""]], Float[Array, ""]]
    evaluators: dict[str, Evaluator]
    log: RunLog
    checkpoints: Checkpoints
    frozen: Any
    reference: Any

    def policy(self, state: TrainState) -> Any:
        """All parameters of the policy as it stands."""
        return join(state.params, self.frozen)


@dataclass(frozen=True)
class Settings:
    """Plain numbers of the loop.

    Attributes:
        steps: Last step.
        seed: Seed of the run's keys.
        epochs: Optimiser steps on each batch.
        eval_every: Steps between evaluations; 0 is never.
        checkpoint_every: Steps between checkpoints.
        prompt_multiple: Prompts are padded to a multiple of this many tokens.
        config: Resolved configuration as YAML, kept in every checkpoint.
        record_rollouts: Write every rollout's numbers into the run's log.
    """

    steps: int
    seed: int
    epochs: int
    eval_every: int
    checkpoint_every: int
    prompt_multiple: int
    config: str
    record_rollouts: bool = True


class Clock:
    """Seconds by name of the parts of one step."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to ``time/<name>_seconds``."""
        start = time.perf_counter()
        yield
        self._add(name, time.perf_counter() - start)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Times a whole step: ``time/step_seconds``, and of those ``time/compile_seconds``; ``time/step_cpu_seconds`` of all
        threads of the process."""
        cpu = time.process_time()
        with watch_compiling() as compiling, self("step"):
            yield
        self._add("step_cpu", time.process_time() - cpu)
        self._add("compile", compiling.seconds)

    def _add(self, name: str, seconds: float) -> None:
        key = f"time/{name}_seconds"
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds


class Trainer:
    """A run in progress, one step at a time.

    Args:
        parts: The parts.
        settings: Plain numbers.
        state: State after step ``done``; the first step takes it over.
        done: Steps already taken; 0 is a new run, whose untrained policy ``begin`` evaluates.
        wall_seconds: The run's clock at that point.

    Attributes:
        state: State after step ``done``.
        done: Steps taken.
        wall_seconds: Time spent in this run alone, whatever else happens between its steps.
        accuracy: Greedy held-out accuracy of the newest evaluation, or None.
    """

    def __init__(self, parts: Parts, settings: Settings, state: TrainState, done: int = 0, wall_seconds: float = 0.0):
        self.parts, self.settings = parts, settings
        self.state, self.done, self.wall_seconds = state, done, wall_seconds
        self.accuracy: float | None = None
        self._base_key = jax.random.key(replicate(np.uint32(settings.seed)))

    @property
    def finished(self) -> bool:
        """Whether the last step has been taken."""
        return self.done >= self.settings.steps

    def begin(self) -> None:
        """Evaluates and logs the untrained policy of a new run."""
        if self.done > 0:
            return
        start, clock = time.perf_counter(), Clock()
        metrics = self._evaluate(clock)
        self.wall_seconds += time.perf_counter() - start
        self.parts.log.log_step(0, metrics | clock.seconds, wall_seconds=self.wall_seconds)

    def step(self) -> None:
        """Takes the next step, with its evaluation, log line and checkpoint where they are due."""
        settings, step, clock = self.settings, self.done + 1, Clock()
        start, last = time.perf_counter() - self.wall_seconds, step == settings.steps
        with asked_transfers_only(), clock.step():
            key = jax.random.fold_in(self._base_key, replicate(np.uint32(step)))
            self.state, metrics, records = one_step(self.parts, settings, self.state, key, clock)
        self.done = step
        if settings.eval_every and (last or step % settings.eval_every == 0):
            metrics |= self._evaluate(clock)
        seconds = time.perf_counter() - start
        rollouts = records if settings.record_rollouts else None
        self.parts.log.log_step(step, metrics | clock.seconds, wall_seconds=seconds, rollouts=rollouts)
        if last or step % settings.checkpoint_every == 0:
            self.parts.log.settle()
            progress = Progress(step, seconds, self.parts.loader.get_state(), settings.config)
            self.parts.checkpoints.save(self.state, progress)
        self.wall_seconds = time.perf_counter() - start

    def _evaluate(self, clock: Clock) -> dict[str, float]:
        metrics = evaluate(self.parts, self.state, clock)
        self.accuracy = metrics.get("eval/accuracy")
        return metrics


def train(parts: Parts, settings: Settings, state: TrainState, done: int, wall_seconds: float) -> TrainState:
    """Runs steps ``done + 1 .. steps``; arguments as those of ``Trainer``, returns the final state."""
    trainer = Trainer(parts, settings, state, done, wall_seconds)
    del state  # the first step takes its memory over
    trainer.begin()
    while not trainer.finished:
        trainer.step()
    return trainer.state


def one_step(
    parts: Parts, settings: Settings, state: TrainState, key: Key[Array, ""], clock: Clock
) -> tuple[TrainState, dict[str, float], RolloutRecords]:
    """Prompts to update: returns the new state, the step's metrics, and every rollout for the log."""
    rollout_key, tie_key = jax.random.split(key)
    prompts: list[Prompt] = next(parts.loader)
    batch = to_global(parts.mesh, PromptBatch(*pad_prompts(prompts, multiple=settings.prompt_multiple)))  # type: ignore[arg-type]

    with clock("rollout"):
        rollouts = parts.engine(parts.policy(state), batch, rollout_key, parts.sampling)
        local = to_local(rollouts)

    with clock("reward"):
        problems = [prompt.problem for prompt in prompts]
        texts = completion_texts(parts.tokenizer, local.tokens_PNC, local.length_PN)
        scores = score(parts.scorer, problems, texts, local.length_PN)

    with clock("update"):
        rewards, valid, each = to_global(parts.mesh, (scores.rewards_PN, scores.valid_PN, _stacked(scores)))
        steps = parts.engine.bucket(int(local.length_PN.max()))
        kept, selection, groups = parts.keep(batch, rollouts, rewards, valid, each, tie_key, steps=steps)
        selection, advantage_PM, weight_PM, length_PM = to_local((selection, kept.advantage_PM, kept.weight_PM, kept.length_PM))
        learning_rate = parts.schedule(state.updates)
        passes: list[UpdateMetrics] = []
        padding = 0.0
        # With nothing to train the step is logged, and the optimiser rests.
        if weight_PM.any():
            padded = {"steps": steps, "prompt_length": batch.tokens_PL.shape[1]}
            plan = parts.learner.plan(length_PM, weight_PM, **padded)
            prompt_length_P = np.array([len(prompt.tokens) for prompt in prompts])
            padding = padding_fraction(plan, prompt_length_P, int(length_PM[weight_PM > 0].sum()), **padded)
            plan = place_plan(parts.mesh, plan)
            if parts.reference is not None:
                kept = parts.learner.with_reference(parts.reference, kept)
            for _ in range(settings.epochs):
                state, trained = parts.learner.update(state, kept, parts.frozen, plan)
                passes.append(trained)
        groups, passes, learning_rate = to_local((groups, passes, learning_rate))

    metrics = reward_metrics(groups, list(scores.parts)) | update_metrics(passes)
    if parts.reference is None:
        metrics.pop("policy/kl", None)
    metrics["update/padding_fraction"] = padding
    metrics["reward/unscored"] = float(sum(scores.unscored.values()))
    metrics |= {f"reward/verifier_{fault}": float(count) for fault, count in scores.faults.items()}
    metrics["policy/learning_rate"] = float(learning_rate)
    return state, metrics, _records(prompts, texts, scores, local, selection, advantage_PM)


@contextmanager
def asked_transfers_only() -> Iterator[None]:
    """Refuses every transfer between host and device that ``sharding.py`` was not asked for: each would stall the device."""
    with jax.transfer_guard_host_to_device("disallow"), jax.transfer_guard_device_to_host("disallow"):
        yield


def score(scorer: Scorer, problems: Sequence[Problem], texts: Sequence[Sequence[str]], length_PN: np.ndarray) -> Scores:
    """Scores of every completion; each process scores its share of the groups."""
    mine = own_rows(len(problems))
    # A reward may be a model of its own, which moves its data as it likes.
    with jax.transfer_guard("allow"):
        scores = scorer.score(problems[mine], texts[mine], length_PN=length_PN[mine])
    shape = len(texts), len(texts[0])
    rewards, valid, parts = exchange((scores.rewards_PN, scores.valid_PN, scores.parts), shape)
    unscored = {name: int(np.isnan(part).sum()) for name, part in parts.items()}
    return Scores(rewards, parts, valid, unscored, add_up(scores.faults))


def evaluate(parts: Parts, state: TrainState, clock: Clock) -> dict[str, float]:
    """Metrics of every evaluator on the current policy."""
    metrics: dict[str, float] = {}
    with clock("eval"):
        for name, evaluator in parts.evaluators.items():
            accuracy = evaluator(parts.policy(state))
            metrics |= {
                name: accuracy.mean,
                f"{name}_standard_error": accuracy.standard_error,
                f"{name}_truncated_fraction": accuracy.truncated_fraction,
            }
    return metrics


def reward_metrics(groups: GroupMetrics, parts: list[str]) -> dict[str, float]:
    """Metrics of rewards, completions and selection by their names in the log."""
    metrics = {
        "reward/mean": groups.reward_mean,
        "reward/std": groups.reward_std,
        "reward/kept_mean": groups.kept_reward_mean,
        "reward/invalid_fraction": groups.invalid_fraction,
        "selection/variance_all": groups.variance_all,
        "selection/variance_kept": groups.variance_kept,
        "selection/no_signal_fraction": groups.no_signal_fraction,
        "completions/mean_length": groups.mean_length,
        "completions/truncated_fraction": groups.truncated_fraction,
        "tokens/generated": groups.tokens_generated,
        "rollout/padding_fraction": groups.decode_padding_fraction,
    }
    metrics |= {f"reward/{name}/mean": value for name, value in zip(parts, groups.parts_mean, strict=True)}
    return {name: float(value) for name, value in metrics.items()}


def update_metrics(passes: Sequence[UpdateMetrics]) -> dict[str, float]:
    """Metrics of a step's optimiser steps (one for each epoch); of a step without signal only that nothing was trained.

    Those of the last one, except that the gap between the engine's log-probabilities and the learner's is the first's, before
    the policy has moved, and that tokens, steps taken and broken gradients are summed.
    """
    if not passes:
        return {"tokens/trained": 0.0, "update/taken": 0.0}
    first, last = passes[0], passes[-1]
    metrics = {
        "loss": last.loss,
        "policy/entropy": last.entropy,
        "policy/kl": last.kl,
        "policy/clip_fraction": last.clip_low_fraction + last.clip_high_fraction,
        "policy/clip_low_fraction": last.clip_low_fraction,
        "policy/clip_high_fraction": last.clip_high_fraction,
        "policy/ratio_deviation": last.ratio_deviation,
        "policy/logp_gap": first.logp_gap,
        "policy/logp_gap_max": first.logp_gap_max,
        "policy/grad_norm": last.grad_norm,
        "tokens/trained": sum(one.tokens for one in passes),
        "update/taken": sum(one.taken for one in passes),
        "update/nonfinite": sum(1.0 - one.finite for one in passes),
    }
    return {name: float(value) for name, value in metrics.items()}


def _stacked(scores: Scores) -> np.ndarray:
    return np.stack(list(scores.parts.values()), axis=-1)


def _records(
    prompts: list[Prompt],
    texts: list[list[str]],
    scores: Scores,
    local: Rollouts,
    selection: Selection,
    advantage_PM: np.ndarray,
) -> RolloutRecords:
    return RolloutRecords(
        prompt_id_P=[prompt.problem.id for prompt in prompts],
        prompt_P=[prompt.problem.messages[-1]["content"] for prompt in prompts],
        answer_P=[prompt.problem.answer for prompt in prompts],
        texts_PN=texts,
        rewards_PN=scores.rewards_PN,
        parts=scores.parts,
        valid_PN=scores.valid_PN,
        length_PN=np.asarray(local.length_PN),
        finished_PN=np.asarray(local.finished_PN),
        index_PM=np.asarray(selection.index_PM),
        advantage_PM=advantage_PM,
    )
