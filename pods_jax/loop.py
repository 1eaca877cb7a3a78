"""The training loop: how a prompt becomes an update.

    prompts   = loader                       tokens and lengths of P prompts                       host
    rollouts  = engine(params, prompts)      n completions of each                                 device
    scores    = scorer(problems, texts)      rewards, part by part                                 host
    kept      = keep(rollouts, rewards)      the m whose rewards vary most, and their advantages   device
    state     = learner(state, kept)         loss, gradient, optimiser                             device

then the log, and every so often an evaluation and a checkpoint. A metric has its name from where it is computed; here the
dicts are joined.
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
from jaxtyping import Array, Key
from transformers import PreTrainedTokenizerBase

from pods_jax.devices.compiling import watch_compiling
from pods_jax.devices.sharding import add_up, exchange, own_rows, replicate, to_global, to_local
from pods_jax.evaluator import Evaluator
from pods_jax.models.lora import join
from pods_jax.rewards.scoring import Scorer, Scores
from pods_jax.rollout.engine import Engine
from pods_jax.rollout.prompts import place_prompts
from pods_jax.rollout.sampling import SamplingParams
from pods_jax.rollout.texts import Completions, read_completions
from pods_jax.run.checkpoint import Checkpoints, Progress
from pods_jax.run.log import RunLog
from pods_jax.run.rollouts import RolloutRecords
from pods_jax.types import KeptBatch, Problem, Prompt
from pods_jax.update.learner import Learner, TrainState


@dataclass(frozen=True)
class Parts:
    """What the loop puts together; built by ``train.py``.

    Attributes:
        mesh: Device mesh.
        tokenizer: For the completions' text.
        stop_ids: Tokens that end a completion.
        loader: Endless iterator over the prompts of each step, the same on every process.
        engine: Rollout engine.
        sampling: Sampling parameters on the device.
        scorer: Rewards.
        keep: Selection and advantages, from ``keeping.make_keep``.
        learner: The update.
        evaluators: Called one after another at each evaluation.
        log: Run log.
        checkpoints: Checkpoints of the run folder.
        frozen: Parameters that are not trained (the base beside adapters), or None.
        reference: Parameters of the KL term's reference policy, or None.
    """

    mesh: Mesh
    tokenizer: PreTrainedTokenizerBase
    stop_ids: Sequence[int]
    loader: grain.DatasetIterator
    engine: Engine
    sampling: SamplingParams
    scorer: Scorer
    keep: Callable[..., tuple[KeptBatch, dict[str, Array]]]
    learner: Learner
    evaluators: Sequence[Evaluator]
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
        eval_every: Steps between evaluations; 0 is never.
        checkpoint_every: Steps between checkpoints.
        prompt_multiple: Prompts are padded to a multiple of this many tokens.
        config: Resolved configuration as YAML, kept in every checkpoint.
        record_rollouts: Write every rollout's numbers into the run's log.
    """

    steps: int
    seed: int
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
            self.state, metrics, records = one_step(self.parts, settings, self.state, step, key, clock)
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
        metrics: dict[str, float] = {}
        with clock("eval"):
            for evaluator in self.parts.evaluators:
                metrics |= evaluator(self.parts.policy(self.state))
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
    parts: Parts, settings: Settings, state: TrainState, step: int, key: Key[Array, ""], clock: Clock
) -> tuple[TrainState, dict[str, float], RolloutRecords]:
    """Prompts to update: returns the new state, the step's metrics, and every rollout for the log."""
    rollout_key, tie_key = jax.random.split(key)
    prompts = next(parts.loader)
    batch = place_prompts(parts.mesh, prompts, multiple=settings.prompt_multiple)
    with clock("rollout"):
        rollouts = parts.engine(parts.policy(state), batch, rollout_key, parts.sampling)
        completions = read_completions(parts.tokenizer, rollouts, stop_ids=parts.stop_ids)
    with clock("reward"):
        scores = score(parts.scorer, [prompt.problem for prompt in prompts], completions.texts_PN, completions.length_PN)
    with clock("update"):
        scored = to_global(parts.mesh, (scores.rewards_PN, scores.parts, scores.valid_PN))
        padded_length = parts.engine.padded_length(int(completions.length_PN.max()))
        kept, metrics = parts.keep(batch, rollouts, *scored, tie_key, completion_length=padded_length)
        state, update_metrics = parts.learner(state, kept, step, parts.frozen, parts.reference)
        metrics, index_PM, advantage_PM = to_local((metrics, kept.index_PM, kept.advantage_PM))
    metrics = {name: float(value) for name, value in metrics.items()} | scores.metrics | update_metrics
    return state, metrics, _records(prompts, completions, scores, index_PM, advantage_PM)


@contextmanager
def asked_transfers_only() -> Iterator[None]:
    """Refuses every transfer between host and device that ``devices/sharding.py`` was not asked for: each stalls the device."""
    with jax.transfer_guard_host_to_device("disallow"), jax.transfer_guard_device_to_host("disallow"):
        yield


def score(scorer: Scorer, problems: Sequence[Problem], texts: Sequence[Sequence[str]], length_PN: np.ndarray) -> Scores:
    """Scores of every completion; each process scores its share of the groups."""
    mine = own_rows(len(problems))
    # A reward may be a model of its own, which moves its data as it likes.
    with jax.transfer_guard("allow"):
        scores = scorer.score(problems[mine], texts[mine], length_PN=length_PN[mine])
    rewards, valid, parts = exchange((scores.rewards_PN, scores.valid_PN, scores.parts), length_PN.shape)
    unscored = {name: int(np.isnan(part).sum()) for name, part in parts.items()}
    return Scores(rewards, parts, valid, unscored, add_up(scores.faults))


def _records(
    prompts: Sequence[Prompt], completions: Completions, scores: Scores, index_PM: np.ndarray, advantage_PM: np.ndarray
) -> RolloutRecords:
    return RolloutRecords(
        prompt_id_P=[prompt.problem.id for prompt in prompts],
        prompt_P=[prompt.problem.messages[-1]["content"] for prompt in prompts],
        answer_P=[prompt.problem.answer for prompt in prompts],
        texts_PN=completions.texts_PN,
        rewards_PN=scores.rewards_PN,
        parts=scores.parts,
        valid_PN=scores.valid_PN,
        length_PN=completions.length_PN,
        finished_PN=completions.finished_PN,
        index_PM=index_PM,
        advantage_PM=advantage_PM,
    )
