import itertools
import json
import math
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_jax import evaluate, train
from pods_jax.assets.tokenizer import write_tokenizer
from pods_jax.config.command_line import leaf_kinds, parse
from pods_jax.config.entries import EvaluateConfig
from pods_jax.evaluate import majority_correct, pass_at_k
from pods_jax.types import Problem

pytestmark = pytest.mark.usefixtures("compiled_once")


def problem(answer="7", kind="exact"):
    return Problem("p/0", ({"role": "user", "content": "?"},), answer, "own", kind)


def answered(*answers):
    return [f"<answer>{answer}</answer>" if answer is not None else "no answer" for answer in answers]


def majority(texts, correct, of=None):
    return majority_correct([of or problem()], [texts], np.array([correct], bool), ("answer", "boxed")).tolist()


# --- the measures -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_right_completion(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    subsets = list(itertools.combinations(correct, k))
    assert pass_at_k(np.array([correct]), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_one_is_the_mean_accuracy_and_pass_at_all_is_any():
    correct_EN = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    np.testing.assert_allclose(pass_at_k(correct_EN, 1), correct_EN.mean(axis=1))
    np.testing.assert_array_equal(pass_at_k(correct_EN, 4), correct_EN.any(axis=1))


def test_the_most_frequent_answer_is_the_majoritys():
    assert majority(answered("7", "8", "7"), [1, 0, 1]) == [1.0]
    assert majority(answered("8", "7", "8"), [0, 1, 0]) == [0.0]


def test_a_tie_shares_the_vote():
    assert majority(answered("7", "8"), [1, 0]) == [0.5]
    assert majority(answered("7", "8", "9", "9", "8", "7"), [1, 0, 0, 0, 0, 1]) == [pytest.approx(1 / 3)]
    assert majority(answered("8", "9"), [0, 0]) == [0.0]


def test_completions_without_an_answer_do_not_vote():
    assert majority(answered(None, None, None, "7"), [0, 0, 0, 1]) == [1.0]
    assert majority(answered(None, None), [0, 0]) == [0.0]


def test_equal_numbers_vote_together_however_they_are_written():
    number = problem("1000", "number")
    assert majority(answered("5", "5", "1,000", "1000.0", "$1000"), [0, 0, 1, 1, 1], number) == [1.0]


@given(st.integers(1, 70))
def test_pass_at_k_is_told_for_powers_of_two_and_for_all_samples(samples):
    drawn = evaluate._drawn(samples)
    assert drawn == sorted(set(drawn))
    assert drawn[-1] == samples
    assert drawn[:-1] == [2**i for i in range(1, 8) if 2**i < samples]


# --- the command --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Builds a command line of 16 problems."""
    root = tmp_path_factory.mktemp("evaluated")
    numbers = itertools.count()

    def build(**changes):
        options = {
            "data.held_out_problems": 16,
            "rollout.max_completion_length": 24,
            "samples": 4,
            "batch": 8,
            "mesh.fsdp": 1,
            "out": root / f"{next(numbers)}.jsonl",
        }
        options |= {key.replace("__", "."): value for key, value in changes.items()}
        return [text for key, value in options.items() for text in (f"--{key}", str(value))], options["out"]

    return build


@pytest.fixture(scope="module")
def evaluated(arguments):
    """Evaluates; returns the rows of the file."""

    def call(**changes):
        argv, out = arguments(**changes)
        assert evaluate.main(argv) == 0
        return [json.loads(line) for line in out.read_text().splitlines()]

    return call


def test_the_bundled_model_is_evaluated_greedily_and_sampled(arguments, capsys):
    argv, out = arguments(rollout__max_completion_length=40)
    assert evaluate.main(argv) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert result["problems"] == 16
    assert [(row["run"], row["index"]) for row in rows] == [("greedy", 0)] * 16 + [("sampled", i) for i in range(4)] * 16
    assert len({row["problem"] for row in rows}) == 16

    def verdicts(name):
        right = [row["correct"] for row in rows if row["run"] == name]
        return np.array(right, float).reshape(16, -1)

    wanted = {
        "greedy/accuracy": verdicts("greedy")[:, 0],
        "sampled/mean_accuracy": verdicts("sampled").mean(axis=1),
        "sampled/pass_at_2": pass_at_k(verdicts("sampled"), 2),
        "sampled/pass_at_4": verdicts("sampled").max(axis=1),
    }
    for name, value_E in wanted.items():
        assert result[name] == pytest.approx(value_E.mean()), name
        assert result[f"{name}_standard_error"] == pytest.approx(value_E.std(ddof=1) / math.sqrt(16)), name
    assert 0 < result["sampled/mean_accuracy"] < result["sampled/pass_at_2"] < result["sampled/pass_at_4"]
    assert 0 <= result["sampled/majority_accuracy"] <= 1
    for row in rows:
        assert row["correct"] == (f"<answer>{row['answer']}</answer>" in row["text"])
    finished = [row["finished"] for row in rows if row["run"] == "sampled"]
    assert result["sampled/truncated_fraction"] == pytest.approx(1 - np.mean(finished))
    for line in ("16 held-out problems", "greedy accuracy", "mean accuracy over 4 samples", "pass@2", "pass@4", "maj@4"):
        assert line in printed


def test_every_key_that_is_accepted_is_read_and_no_other(arguments, keys_read):
    argv, _ = arguments(data__held_out_problems=8)
    config = parse(EvaluateConfig, argv, prog="evaluate", description="Evaluate.")
    read = keys_read()
    evaluate.evaluate(config)
    accepted = set(leaf_kinds(EvaluateConfig))
    assert accepted - read == set()
    assert set(EvaluateConfig.unread) & read == set()


def test_without_samples_only_the_greedy_completion_is_judged(evaluated, capsys):
    rows = evaluated(samples=0)
    assert [row["run"] for row in rows] == ["greedy"] * 16
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name.split("/")[0] for name in result} == {"problems", "greedy"}


def test_a_single_problem_gives_a_line_that_every_reader_of_json_accepts(evaluated, capsys):
    evaluated(samples=0, data__held_out_problems=1)

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    result = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=refuse)
    assert result["greedy/accuracy_standard_error"] == 0


# --- a run folder -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """Trains two steps of a tiny run that exports after them; returns the run folder."""
    root = tmp_path_factory.mktemp("runs")

    def call(name, **changes):
        options = {
            "run.dir": root,
            "run.name": name,
            "run.steps": 2,
            "run.checkpoint_every": 1,
            "model.path": tiny_model,
            "data.prompts_per_step": 2,
            "data.train_problems": 40,
            "data.held_out_problems": 8,
            "rollout.n": 6,
            "rollout.max_completion_length": 12,
            "selection.m": 3,
            "optimizer.learning_rate": 0.05,
            "optimizer.warmup_steps": 0,
            "reward.functions": "length,tag_count",
            "reward.length_margin": 1.0,
            "mesh.fsdp": 1,
            "eval.every": 0,
            "log.progress": "false",
        }
        options |= {key.replace("__", "."): value for key, value in changes.items()}
        assert train.main([text for key, value in options.items() for text in (f"--{key}", str(value))]) == 0
        return root / name

    return call


@pytest.fixture(scope="module")
def full(trained):
    return trained("full")


@pytest.fixture(scope="module")
def adapted(trained, tiny_model, tmp_path_factory):
    """A run of adapters with a tokenizer, a chat template and an option of the user's own."""
    own = tmp_path_factory.mktemp("own")
    write_tokenizer(own)
    shutil.copyfile(tiny_model / "config.json", own / "config.json")
    settings = json.loads((own / "tokenizer_config.json").read_text())
    (own / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "9"}))
    (own / "own.jinja").write_text("{{ bos_token }}{{ sign | default('') }}{{ messages[-1].content }}")
    texts = {"model__tokenizer": own, "data__chat_template": own / "own.jinja", "data__template_options": "sign=++"}
    folder = trained("adapted", lora__rank=4, lora__targets="q,v,down", **texts)
    (own / "own.jinja").unlink()  # the run folder keeps it
    return folder


def test_a_run_folder_is_its_newest_checkpoint(full, evaluated, tiny_model, capsys):
    rows = evaluated(model__path=full)
    assert f"checkpoint of step 2 of {full}" in capsys.readouterr().out
    assert rows == evaluated(model__path=full / "export")
    assert rows != evaluated(model__path=tiny_model)


def test_a_run_folder_is_read_onto_any_mesh(full, evaluated):
    texts = [[row["text"] for row in evaluated(model__path=full, samples=0, **mesh)] for mesh in ({}, {"mesh__fsdp": 4})]
    assert texts[0] == texts[1]


def test_the_adapters_of_a_run_are_read_beside_its_model(adapted, evaluated, tiny_model):
    rows = evaluated(model__path=adapted, samples=0)
    assert rows == evaluated(model__path=adapted / "adapter", samples=0)
    assert rows != evaluated(model__path=tiny_model, samples=0)


def test_a_run_that_went_on_from_adapters_is_read_with_them(adapted, trained, evaluated):
    folder = trained("continued", model__path=adapted / "adapter")
    rows = evaluated(model__path=folder, samples=0)
    assert rows == evaluated(model__path=folder / "adapter", samples=0)
    assert rows != evaluated(model__path=adapted, samples=0)


def test_an_older_checkpoint_is_taken_when_the_newest_is_torn(full, evaluated, tmp_path, capsys):
    shutil.copytree(full, tmp_path / "torn")
    (tmp_path / "torn" / "checkpoints" / "2").rename(tmp_path / "torn" / "checkpoints" / "2.orbax-checkpoint-tmp")
    evaluated(model__path=tmp_path / "torn", samples=0)
    assert "checkpoint of step 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: shutil.rmtree(folder / "checkpoints" / "1") or shutil.rmtree(folder / "checkpoints" / "2"), "complete"),
        (lambda folder: (folder / "config.yaml").write_text("rollout: {nn: 3}"), "rollout.nn"),
        (lambda folder: shutil.rmtree(folder / "checkpoints"), "without checkpoints"),
    ],
    ids=["no complete checkpoint", "unknown key", "no checkpoints"],
)
def test_a_run_folder_that_cannot_be_read_is_refused_in_one_line(spoil, words, full, arguments, tmp_path, capsys):
    shutil.copytree(full, tmp_path / "spoilt")
    spoil(tmp_path / "spoilt")
    capsys.readouterr()
    argv, _ = arguments(model__path=tmp_path / "spoilt")
    assert evaluate.main(argv) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("pods_jax.evaluate: error: ")
    assert words in message
    assert message.count("\n") == 0


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("data.task", "gms8k", "did you mean 'gsm8k'? valid: arithmetic, gsm8k, math, "),
        ("data.answer_kind", "nmber", "did you mean 'number'? valid: exact, number, math, choice, equation, text"),
        ("verify.sources", "box", "did you mean 'boxed'? valid: answer, boxed, last_number"),
    ],
)
def test_an_unknown_name_is_refused_before_the_model_is_looked_for(key, name, words, capsys):
    assert evaluate.main([f"--{key}", name, "--model.path", "no/such/model"]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith(f"pods_jax.evaluate: error: {key}='{name}' is unknown; {words}")
    assert message.count("\n") == 0
