"""Makes the bundled models: ``python -m pods_jax.assets.warm_start``.

A tiny Qwen2 decoder is trained from scratch on demonstrations of the arithmetic task, plain supervised: cross entropy of each
completion and its EOS token, given the prompt. The demonstrations are sloppy: most of them misread ``*`` as ``+``. So the model
learns the form, the sums and a bad habit, and the right rule keeps some support without being the majority. Reinforcement
learning then has something to find. The defaults made ``tally``, greedy accuracy 0.37, where rewards are plentiful. The other,
``tally_scarce``, starts where they are scarce, on problems with more multiplications (``times_share`` of a run's data.options):

    python -m pods_jax.assets.warm_start --out pods_jax/assets/tally_scarce --slip 0.8 --times_share 0.4

Only training problems are demonstrated, each once, and no held-out one ever.

The result is a Hugging Face folder, read by the same code as any other model. The same seed gives the same weights, bit for
bit, on the same hardware with the same versions of code and libraries.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from transformers import PreTrainedTokenizerBase

from pods_jax.algorithm.masked import length_mask, masked_mean
from pods_jax.assembly.policy import make_architecture
from pods_jax.assets.tokenizer import write_tokenizer
from pods_jax.config.command_line import parse
from pods_jax.config.fields import Checked, ConfigError, Count, Fraction, Positive, Seed
from pods_jax.config.sections import ModelConfig, OptimizerConfig
from pods_jax.data.arithmetic import MAX_PROBLEMS, MAX_TIMES_SHARE, TIMES_SHARE, demonstration, load_problems
from pods_jax.data.prompts import build_prompts, eos_ids, load_tokenizer, pad_prompts
from pods_jax.devices.sharding import make_mesh
from pods_jax.evaluator import Evaluator
from pods_jax.models.decoder import Decoder
from pods_jax.models.families import read_spec
from pods_jax.models.hf_weights import export_folder
from pods_jax.models.logprob import token_logp
from pods_jax.models.spec import DecoderSpec
from pods_jax.problem import Problem
from pods_jax.rewards.scoring import make_scorer
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.sampling import sampling_params
from pods_jax.types import Prompt
from pods_jax.update.optim import decayed, make_optimizer, make_schedule

BUNDLED_FOLDER = Path(__file__).parent / "tally"
MAX_LENGTH = 64
"""Longest prompt and longest completion in tokens; the task's have 14 and 32."""

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "dtype": "float32",
}
"""The model's ``config.json``, without the token ids."""


@dataclass(frozen=True)
class WarmStartConfig(Checked):
    """Supervised training of the bundled model; the defaults are those that made it."""

    out: str = str(BUNDLED_FOLDER)
    """Hugging Face folder to write; an earlier model there is replaced once the new one is complete."""
    seed: Seed = 0
    """Seed of the initial parameters, of the problems and of the slips."""
    steps: Count = 1000
    """Optimiser steps."""
    batch: Count = 64
    """Demonstrations of one step; each is of a problem of its own."""
    learning_rate: Positive = 3e-3
    """Peak learning rate, after a short warm-up; a cosine brings it to 0."""
    slip: Fraction = 0.9
    """Probability that a demonstration computes a * as if it were a +."""
    times_share: Fraction = TIMES_SHARE
    """Probability that an operation of a problem is a *, at most 0.9."""
    held_out_problems: Count = 512
    """Held-out problems on which the accuracy is measured before the model is written."""

    def __post_init__(self):
        super().__post_init__()
        if self.steps * self.batch > MAX_PROBLEMS:
            raise ConfigError(f"steps={self.steps} x batch={self.batch} asks for more than {MAX_PROBLEMS:,} different problems")
        if self.times_share > MAX_TIMES_SHARE:
            raise ConfigError(f"times_share={self.times_share} must be at most {MAX_TIMES_SHARE}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Demonstrations:
    """One batch of prompts with a demonstrated completion each, padded on the right; B demonstrations."""

    prompt_BL: Int[Array, "B L"]
    prompt_length_B: Int[Array, "B"]
    tokens_BC: Int[Array, "B C"]
    length_B: Int[Array, "B"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    config = parse(WarmStartConfig, argv, prog="python -m pods_jax.assets.warm_start", description=__doc__ or "")
    try:
        warm_start(config, say=partial(print, flush=True))
    except ConfigError as error:
        print(f"pods_jax.assets.warm_start: error: {error}", file=sys.stderr)
        return 2
    return 0


def warm_start(config: WarmStartConfig, say: Callable[[str], None] = print) -> list[float]:
    """Trains a model, measures it and writes its folder.

    Args:
        config: The numbers of the training.
        say: Takes each line of progress.

    Returns:
        The loss of every step: mean cross entropy in nats per completion token.

    Raises:
        ConfigError: ``config.out`` is something else than a model folder; nothing has been trained then.
    """
    out = Path(config.out)
    if out.exists() and not (out / "config.json").is_file():
        raise ConfigError(f"out={config.out} exists and is no model folder; nothing there is replaced")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch)
        write_description(source)
        tokenizer, spec = load_tokenizer(source), read_spec(source)
        mesh = make_mesh((1, 1, 1), jax.devices()[:1])
        graph, params = make_architecture(ModelConfig(), spec, mesh).graph, initial_params(spec, config.seed)
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        say(f"{size:,} parameters, {config.steps:,} steps of {config.batch} demonstrations, slip {config.slip:g}")
        params, losses = fit(graph, params, batches(config, tokenizer), config, say)
        ends = eos_ids(tokenizer, source)
        engine = RolloutEngine(graph, rollouts=1, max_completion_length=MAX_LENGTH, chunk=MAX_LENGTH, eos_ids=ends)
        for name, accuracy in held_out_accuracy(engine, params, tokenizer, mesh, config).items():
            say(f"held-out accuracy, {name}: {accuracy:.3f}")
        export_folder(params, spec, source, config.out, dtype="float32", overwrite=True)
    say(f"written to {config.out}")
    return losses


def write_description(folder: Path) -> None:
    """Writes the tokenizer files and ``config.json``: the whole Hugging Face folder but the weights."""
    write_tokenizer(folder)
    ids = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(QWEN2 | ids, indent=2) + "\n", encoding="utf-8")


def initial_params(spec: DecoderSpec, seed: int) -> Any:
    """Random parameters of the decoder.

    The decoder draws its matrices as large models want them, with a standard deviation of 0.02. At width 64 that leaves the
    attention blind for hundreds of steps, so they are scaled up to ``initializer_range``.
    """
    params = nnx.to_pure_dict(nnx.state(Decoder(spec, rngs=nnx.Rngs(seed))))
    scale = QWEN2["initializer_range"] / 0.02
    return jax.tree.map(lambda p, is_matrix: p * scale if is_matrix else p, params, decayed(params))


def batches(config: WarmStartConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Demonstrations]:
    """Yields the batch of each step: training problems in the order of the seed, each with one sloppy demonstration."""
    count, share = config.steps * config.batch, config.times_share
    problems = load_problems("train", count=count, seed=config.seed, times_share=share)
    prompts = _prompts(problems, tokenizer)
    rng = np.random.default_rng(config.seed)
    texts = [demonstration(question(problem), slip=config.slip, rng=rng) for problem in problems]
    completions = [(*tokens, tokenizer.eos_token_id) for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    longest = max(map(len, completions))
    for first in range(0, len(prompts), config.batch):
        block = slice(first, first + config.batch)
        yield Demonstrations(*pad_prompts(prompts[block], multiple=1), *_pad(completions[block], longest))  # type: ignore[arg-type]


def fit(
    graph: nnx.GraphDef,
    params: Any,
    data: Iterator[Demonstrations],
    config: WarmStartConfig,
    say: Callable[[str], None],
) -> tuple[Any, list[float]]:
    """Takes one AdamW step on each batch.

    Args:
        graph: Graph definition of the ``Decoder``.
        params: Its initial parameters; donated.
        data: The batches.
        config: The numbers of the training.
        say: Takes each line of progress.

    Returns:
        The trained parameters, and the loss of every step.
    """
    settings = OptimizerConfig(
        learning_rate=config.learning_rate, schedule="cosine", warmup_steps=min(50, config.steps // 10), weight_decay=0.01
    )
    optimizer, schedule = make_optimizer(settings), make_schedule(settings, config.steps)

    @partial(jax.jit, donate_argnums=(0, 1))
    def one_step(params: Any, opt_state: Any, batch: Demonstrations, done: Array) -> tuple[Any, Any, Array]:
        loss, gradient = jax.value_and_grad(partial(cross_entropy, graph))(params, batch)
        direction, opt_state = optimizer.update(gradient, opt_state, params)
        rate = jnp.asarray(schedule(done))
        change = jax.tree.map(lambda x: -rate * x, direction)
        return optax.apply_updates(params, change), opt_state, loss

    opt_state, losses, start = optimizer.init(params), [], time.perf_counter()
    for step, batch in enumerate(data, start=1):
        params, opt_state, loss = one_step(params, opt_state, batch, jnp.int32(step - 1))
        losses.append(float(loss))
        if step == 1 or step % max(1, config.steps // 10) == 0:
            say(f"step {step:>5,}  loss {losses[-1]:.4f}  {time.perf_counter() - start:5.1f} s")
    return params, losses


def cross_entropy(graph: nnx.GraphDef, params: Any, batch: Demonstrations) -> Float[Array, ""]:
    """Mean over completion tokens, EOS included, of ``-log p(token | what stands before it)``, in nats."""
    decoder = nnx.merge(graph, params)
    tokens_B1C = batch.tokens_BC[:, None]
    hidden_B1CD = decoder.group_hidden(batch.prompt_BL, batch.prompt_length_B, tokens_B1C)
    logp_B1C, _ = token_logp(hidden_B1CD, decoder.head_DV(), tokens_B1C, temperature=jnp.float32(1), logit_chunk=1 << 22)
    return -masked_mean(logp_B1C[:, 0], length_mask(batch.length_B, batch.tokens_BC.shape[1]))


def held_out_accuracy(
    engine: RolloutEngine, params: Any, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, config: WarmStartConfig
) -> dict[str, float]:
    """Share of held-out problems answered right, by greedy decoding and by sampling once at temperature 1."""
    count, share = config.held_out_problems, config.times_share
    problems = load_problems("held_out", count=count, seed=config.seed, times_share=share)
    evaluator = partial(
        Evaluator,
        engine=engine,
        prompts=_prompts(problems, tokenizer),
        batch=min(128, config.held_out_problems),
        mesh=mesh,
        tokenizer=tokenizer,
        judge=make_scorer(["correct"]).correct,
        key=jax.random.key(config.seed),
    )
    temperatures = {"greedy": 0.0, "sampled": 1.0}
    return {
        name: evaluator(name=name, sampling=sampling_params(temperature=t))(params)[name] for name, t in temperatures.items()
    }


def question(problem: Problem) -> str:
    """The expression that a problem of the arithmetic task asks for."""
    return problem.messages[-1]["content"]


def _prompts(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    return build_prompts(problems, tokenizer, max_length=MAX_LENGTH, over_long="error", system_prompt=None)[0]


def _pad(rows: Sequence[Sequence[int]], size: int) -> tuple[Int[np.ndarray, "B C"], Int[np.ndarray, "B"]]:
    padded_BC = np.zeros((len(rows), size), np.int32)
    for row, tokens in zip(padded_BC, rows, strict=True):
        row[: len(tokens)] = tokens
    return padded_BC, np.array([len(tokens) for tokens in rows], np.int32)


if __name__ == "__main__":
    sys.exit(main())
