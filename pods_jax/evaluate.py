"""Accuracy of a policy on held-out problems: ``python -m pods_jax.evaluate --help``.

The policy (--model.path) is a Hugging Face folder or Hub id, a PEFT folder, or a run folder, whose newest checkpoint is taken.
Prints greedy accuracy, and over the sampled completions of each problem the mean accuracy, pass@k for k = 2, 4, ... up to their
number, and majority-vote accuracy, each with its standard error over problems; optionally writes every completion and its
verdict. The last line printed is one JSON object.
"""

import io
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import IO

import jax
import numpy as np
from rich.progress import track

from pods_jax.assembly.inputs import check_names, find_mesh, load_prompts, make_verifier
from pods_jax.assembly.opening import join_hosts
from pods_jax.assembly.parts import engine_numbers, make_engine, make_sampling
from pods_jax.assembly.sources import find_policy, load_any_policy
from pods_jax.assembly.texts import find_texts
from pods_jax.config.command_line import parse
from pods_jax.config.entries import EvaluateConfig
from pods_jax.config.fields import ConfigError
from pods_jax.devices.compiling import keep_compiled, use_32_bits
from pods_jax.devices.sharding import replicate
from pods_jax.evaluator import Evaluator, Verdicts
from pods_jax.problem import Problem
from pods_jax.rewards.answers import vote
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.sampling import sampling_params


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    config = parse(EvaluateConfig, argv, prog="python -m pods_jax.evaluate", description=(__doc__ or "").strip())
    try:
        evaluate(config)
    except (ConfigError, ValueError, FileNotFoundError) as error:
        print(f"pods_jax.evaluate: error: {error}", file=sys.stderr)
        return 2
    return 0


def evaluate(config: EvaluateConfig) -> dict[str, float]:
    """Evaluates as configured and returns the result; of several hosts the first prints it and writes the file."""
    check_names(config)
    use_32_bits()
    join_hosts(config)
    first = jax.process_index() == 0
    with nullcontext() if first else redirect_stdout(io.StringIO()):
        return _evaluate(config, Path(config.out) if config.out and first else None)


def _evaluate(config: EvaluateConfig, out_file: Path | None) -> dict[str, float]:
    keep_compiled(config.compile_cache)
    mesh = find_mesh(config)
    source = find_policy(config.model, config.data)
    texts = find_texts(source.model, source.data)
    _, prompts = load_prompts(source.data, texts, evaluation=True)
    result: dict[str, float] = {"problems": len(prompts)}
    with make_verifier(config.verify) as scorer, jax.set_mesh(mesh):
        architecture, params = load_any_policy(source, mesh, layers=config.tuning.layers)

        def engine(completions: int) -> RolloutEngine:
            of = (config.rollout, config.tuning, architecture, mesh, texts.stop_ids, completions)
            numbers = engine_numbers(*of, prompt_length=config.data.max_prompt_length, prompts=len(prompts))
            return make_engine(architecture, mesh, source.model.compute_dtype, **numbers)

        evaluator = partial(
            Evaluator,
            prompts=prompts,
            batch=config.batch,
            mesh=mesh,
            tokenizer=texts.tokenizer,
            stop_ids=texts.stop_ids,
            judge=scorer.correct,
        )
        runs = {"greedy": (engine(1), sampling_params(temperature=0.0))}
        if config.samples:
            runs["sampled"] = (engine(config.samples), make_sampling(config.rollout))
        key = jax.random.key(replicate(np.uint32(config.seed)))
        with out_file.open("w", encoding="utf-8") if out_file else nullcontext() as out:
            for name, (used, sampling) in runs.items():
                judge = evaluator(name=name, engine=used, sampling=replicate(sampling), key=key)
                batches = math.ceil(len(prompts) / config.batch)
                verdicts = list(track(judge.verdicts(params), description=name, total=batches, transient=True))
                _write(out, name, verdicts)
                result |= _measures(name, verdicts, config.verify.sources)
    _print(result, config.samples)
    return result


def pass_at_k(correct_EN: np.ndarray, k: int) -> np.ndarray:
    """Chance that at least one of k completions drawn from the N is right, for each problem.

        1 - C(N - c, k) / C(N, k)

    Reference: Evaluating Large Language Models Trained on Code, arXiv 2107.03374, equation 1 (unbiased).
    """
    n = correct_EN.shape[1]
    return np.array([1.0 - math.comb(n - int(c), k) / math.comb(n, k) for c in correct_EN.sum(axis=1)])


def majority_correct(
    problems: list[Problem], texts_EN: list[list[str]], correct_EN: np.ndarray, sources: Sequence[str]
) -> np.ndarray:
    """Whether the most frequent answer is right, for each problem; ties share the vote equally.

    Completions without an answer do not vote; a problem without any vote is wrong.
    """
    shares = []
    for problem, texts, correct in zip(problems, texts_EN, correct_EN, strict=True):
        answers = [vote(problem, text, sources) for text in texts]
        votes = Counter(answer for answer in answers if answer is not None)
        top = [answer for answer, count in votes.items() if count == max(votes.values())]
        right = {answer for answer, verdict in zip(answers, correct, strict=True) if verdict}
        shares.append(sum(answer in right for answer in top) / len(top) if top else 0.0)
    return np.array(shares)


def _measures(name: str, verdicts: list[Verdicts], sources: Sequence[str]) -> dict[str, float]:
    problems = [problem for v in verdicts for problem in v.problems]
    correct_EN = np.concatenate([v.correct_EN for v in verdicts])
    texts_EN = [texts for v in verdicts for texts in v.texts]
    values = {"accuracy" if name == "greedy" else "mean_accuracy": correct_EN.mean(axis=1)}
    if name == "sampled":
        values |= {
            **{f"pass_at_{k}": pass_at_k(correct_EN, k) for k in _drawn(correct_EN.shape[1])},
            "majority_accuracy": majority_correct(problems, texts_EN, correct_EN, sources),
        }
    measured = {}
    for key, value_E in values.items():
        error = float(value_E.std() / math.sqrt(max(1, len(value_E) - 1)))  # 0 for a single problem, which tells nothing of it
        measured |= {f"{name}/{key}": float(value_E.mean()), f"{name}/{key}_standard_error": error}
    measured[f"{name}/truncated_fraction"] = 1.0 - float(np.concatenate([v.finished_EN for v in verdicts]).mean())
    return measured


def _drawn(samples: int) -> list[int]:
    """The k of pass@k: powers of two below the number of samples, and that number; pass@1 is the mean accuracy."""
    return [*takewhile(lambda k: k < samples, (2**i for i in count(1))), samples]


def _write(out: IO[str] | None, name: str, verdicts: list[Verdicts]) -> None:
    if out is None:
        return
    for batch in verdicts:
        for problem, texts, correct, finished in zip(
            batch.problems, batch.texts, batch.correct_EN.tolist(), batch.finished_EN.tolist(), strict=True
        ):
            for index, text in enumerate(texts):
                row = {
                    "problem": problem.id,
                    "run": name,
                    "index": index,
                    "answer": problem.answer,
                    "correct": correct[index],
                    "finished": finished[index],
                    "text": text,
                }
                out.write(json.dumps(row) + "\n")


def _print(result: dict[str, float], samples: int) -> None:
    names = {
        "greedy/accuracy": "greedy accuracy",
        "sampled/mean_accuracy": f"mean accuracy over {samples} samples",
        **{f"sampled/pass_at_{k}": f"pass@{k}" for k in _drawn(samples)},
        "sampled/majority_accuracy": f"maj@{samples}",
    }
    print(f"{int(result['problems'])} held-out problems")
    for key, label in names.items():
        if key in result:
            print(f"{label:<32} {result[key]:.4f} ± {result[f'{key}_standard_error']:.4f}")
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
