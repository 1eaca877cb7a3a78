import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer

from pods_jax import train
from pods_jax.assembly import opening
from pods_jax.assembly.parts import Programs, prompt_multiple
from pods_jax.assembly.policy import load_policy
from pods_jax.config.command_line import from_yaml
from pods_jax.config.entries import Config
from pods_jax.config.sections import ModelConfig
from pods_jax.data.tasks import load_splits
from pods_jax.devices.sharding import make_mesh
from pods_jax.run.checkpoint import Checkpoints
from pods_jax.run.log import RunLog
from pods_jax.update.learner import init_state
from pods_jax.update.optim import make_optimizer

STEPS = 6
P, N, M = 4, 6, 3
VARIETY = "own_rewards_of_a_user:variety"
NAMES = {
    "reward": ["mean", "std", f"{VARIETY}/mean", "tag_count/mean"],
    "selection": ["variance_all", "variance_kept", "no_signal_fraction"],
    "completions": ["mean_length", "truncated_fraction"],
    "policy": ["entropy", "clip_fraction", "grad_norm", "logp_gap", "learning_rate"],
    "time": ["rollout_seconds", "reward_seconds", "update_seconds"],
    "tokens": ["generated", "trained"],
}

# An own reward: how many kinds of characters a completion has. PACE slows it down, so that a run can be killed on its way.
OWN_REWARDS = """
import os, time

def variety(problem, completion):
    time.sleep(float(os.environ.get("PACE", "0")))
    return len(set(completion)) / 10

def constant(problem, completion):
    return 0.5

def fragile(problem, completion):
    if len(completion) % 2:
        raise RuntimeError("odd lengths are beyond me")
    return len(completion) / 10

# An own sink: what it is told and given, one line each.
class Noted:
    def __init__(self, run):
        self.file = (run.folder / "noted.txt").open("w")
        print(run.name, run.first_step, run.config["rollout"]["n"], file=self.file)

    def log(self, step, metrics, rollouts):
        print(step, len(rollouts), metrics.get("reward/mean"), file=self.file)

    def close(self):
        self.file.close()
"""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory, compiled_once):
    """A user's working directory with a module of own rewards."""
    folder, before = tmp_path_factory.mktemp("workshop"), Path.cwd()
    (folder / "own_rewards_of_a_user.py").write_text(OWN_REWARDS)
    os.chdir(folder)
    yield folder
    os.chdir(before)
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def arguments(workshop, tiny_model):
    """Builds a command line: a tiny run with what the test changes."""

    def build(name, **changes):
        options = {
            "run.dir": workshop / "runs",
            "run.name": name,
            "run.steps": STEPS,
            "run.checkpoint_every": 2,
            "model.path": tiny_model,
            "data.prompts_per_step": P,
            "data.train_problems": 40,
            "data.held_out_problems": 10,
            "rollout.n": N,
            "rollout.max_completion_length": 12,
            "selection.m": M,
            "optimizer.learning_rate": 0.01,
            "reward.functions": f"{VARIETY},tag_count",
            "mesh.fsdp": 1,
            "eval.every": 3,
            "eval.samples": 2,
            "eval.batch": 8,
            "log.texts_per_step": -1,
            "log.progress": "false",
        }
        options |= {key.replace("__", "."): value for key, value in changes.items()}
        return [text for key, value in options.items() for text in (f"--{key}", str(value))]

    return build


@pytest.fixture(scope="module")
def trained(arguments, workshop):
    """Trains with the tiny run's options; returns the run folder."""

    def call(name, **changes):
        assert train.main(arguments(name, **changes)) == 0
        return workshop / "runs" / name

    return call


@pytest.fixture(scope="module")
def whole(trained):
    """The uninterrupted run, and how many programs had been compiled when each step was logged."""
    compiled, at_step, log_step = [], {}, RunLog.log_step

    def count(event, duration_secs, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    def logged(self, step, *args, **kwargs):
        at_step[step] = len(compiled)
        return log_step(self, step, *args, **kwargs)

    jax.monitoring.register_event_duration_secs_listener(count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "log_step", logged)
        folder = trained("whole", run__steps=12)
    return folder, at_step


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def timeless(row):
    return {name: value for name, value in row.items() if not name.startswith("time/") and name != "wall_seconds"}


def rollouts_until(folder, step):
    return b"".join(
        line for line in (folder / "rollouts.jsonl").read_bytes().splitlines(keepends=True) if json.loads(line)["step"] <= step
    )


def assert_same_run(folder, other, steps=STEPS):
    """Equal metrics but for the clock, and equal rollouts byte by byte, up to a step."""
    assert [timeless(row) for row in rows(folder)[: steps + 1]] == [timeless(row) for row in rows(other)[: steps + 1]]
    assert len(rows(folder)) >= steps + 1
    assert rollouts_until(folder, steps) == rollouts_until(other, steps)


# --- what a run leaves --------------------------------------------------------------------------------------------------------


def test_a_run_leaves_every_file_of_the_run_folder(whole, tiny_model):
    folder, _ = whole
    made = {"config.yaml", "metrics.jsonl", "rollouts.jsonl", "checkpoints", "export", "tensorboard", "report.html"}
    assert {path.name for path in folder.iterdir()} == made
    config = from_yaml(Config, (folder / "config.yaml").read_text())
    assert (config.rollout.n, config.selection.m, config.model.path) == (N, M, str(tiny_model))
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert sorted(int(path.name) for path in (folder / "checkpoints").iterdir()) == [10, 12]
    assert "<html" in (folder / "report.html").read_text()[:500]


def test_every_step_has_its_metrics(whole):
    log = rows(whole[0])
    assert [row["step"] for row in log] == list(range(13))
    for row in log[1:]:
        assert row.keys() > {f"{group}/{name}" for group, names in NAMES.items() for name in names}
        assert row["tokens/generated"] == pytest.approx(P * N * row["completions/mean_length"], rel=1e-5)
        assert row["policy/ratio_deviation"] < 1e-5
        assert row["selection/variance_kept"] > row["selection/variance_all"]
        assert row["update/taken"] == 1
        assert row["update/nonfinite"] == 0
    assert {row["step"] for row in log if "eval/accuracy" in row} == {0, 3, 6, 9, 12}
    assert all("eval/sampled_accuracy" in row for row in log if "eval/accuracy" in row)


def test_the_learning_rate_in_the_log_is_the_one_that_was_used(whole):
    rates = [row["policy/learning_rate"] for row in rows(whole[0])[1:]]
    assert rates == pytest.approx([0.002, 0.004, 0.006, 0.008, *[0.01] * 8])


def test_every_rollout_is_recorded_and_m_of_each_group_are_kept(whole):
    recorded = rows(whole[0], "rollouts.jsonl")
    assert len(recorded) == 12 * P * N
    for step in range(1, 13):
        of_step = [row for row in recorded if row["step"] == step]
        assert [(row["group"], row["index"]) for row in of_step] == [(p, n) for p in range(P) for n in range(N)]
        for p in range(P):
            assert sum(row["kept"] for row in of_step if row["group"] == p) == M
    row = recorded[0]
    assert row["total"] == pytest.approx(len(set(row["text"])) / 10 + 0.025 * row["parts"]["tag_count"], rel=1e-6)


def test_no_held_out_problem_is_ever_trained(whole):
    held_out = load_splits("arithmetic", train_problems=40, held_out_problems=10, seed=0).held_out
    questions = {problem.messages[-1]["content"] for problem in held_out}
    asked = {row["prompt"] for row in rows(whole[0], "rollouts.jsonl") if "prompt" in row}
    assert len(asked) > P
    assert not asked & questions
    assert not {row["prompt_id"] for row in rows(whole[0], "rollouts.jsonl")} & {problem.id for problem in held_out}


def test_nothing_compiles_after_warm_up(whole):
    _, compiled = whole
    assert compiled[1] > 0
    assert compiled[12] == compiled[3]


def test_the_export_is_a_hugging_face_folder_with_the_final_parameters(whole, tiny_model):
    folder = whole[0]
    assert AutoConfig.from_pretrained(folder / "export").model_type == "qwen2"
    assert len(AutoTokenizer.from_pretrained(folder / "export")) == 32
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    _, exported = load_policy(ModelConfig(path=str(folder / "export")), mesh)
    _, before = load_policy(ModelConfig(path=str(tiny_model)), mesh)
    assert all(np.any(a != b) for a, b in zip(jax.tree.leaves(exported), jax.tree.leaves(before), strict=True))
    config = from_yaml(Config, (folder / "config.yaml").read_text())
    with jax.set_mesh(mesh):
        checkpoints = Checkpoints(folder / "checkpoints", keep=2)
        state = checkpoints.restore(12, init_state(before, optimizer=make_optimizer(config.optimizer)))
        checkpoints.close()
    assert int(state.updates) == 12
    for ours, kept in zip(jax.tree.leaves(exported), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(ours, kept)


# --- continuing ---------------------------------------------------------------------------------------------------------------


def test_a_continued_run_equals_an_uninterrupted_one(whole, trained):
    trained("continued", run__steps=3)
    folder = trained("continued")
    assert_same_run(folder, whole[0])
    assert [row["step"] for row in rows(folder)] == list(range(STEPS + 1))


def test_a_finished_run_is_left_as_it_is(trained):
    folder = trained("finished", run__steps=2, eval__every=0)
    before = {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "rollouts.jsonl")}
    weights = load_file(folder / "export" / "model.safetensors")
    trained("finished", run__steps=2, eval__every=0)
    assert before == {name: (folder / name).read_bytes() for name in before}
    again = load_file(folder / "export" / "model.safetensors")
    assert all(np.array_equal(weights[name], again[name]) for name in weights)


def test_a_run_continues_on_another_mesh(whole, trained):
    trained("moved", run__steps=3)
    folder = trained("moved", mesh__fsdp=2, mesh__tensor=2, update__micro_batch=6, update__remat="layer")
    for row, expected in zip(rows(folder), rows(whole[0]), strict=False):
        row, expected = timeless(row), timeless(expected)
        assert row.keys() == expected.keys()
        gaps = {"policy/ratio_deviation", "policy/logp_gap", "policy/logp_gap_max"}
        for name in row.keys() - gaps:
            assert row[name] == pytest.approx(expected[name], rel=2e-5, abs=2e-6), (row["step"], name)
    assert len(rows(folder)) == STEPS + 1


def test_a_run_killed_at_any_moment_continues_as_if_it_had_not_been(whole, trained, arguments, workshop, compiled_once):
    folder, errors = workshop / "runs" / "killed", workshop / "killed.txt"
    environment = os.environ | {
        "PACE": "0.1",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_COMPILATION_CACHE_DIR": compiled_once,
        "PYTHONPATH": str(Path(train.__file__).parents[1]),
    }
    command = [sys.executable, "-m", "pods_jax.train", *arguments("killed", run__steps=12)]
    with errors.open("w") as out:
        process = subprocess.Popen(command, cwd=workshop, env=environment, stdout=out, stderr=out)
    deadline = time.monotonic() + 300
    while not (folder / "checkpoints" / "2").exists():
        assert process.poll() is None, errors.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(random.uniform(0, 1))
    assert process.poll() is None, "the run ended before it was killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "export").exists()
    trained("killed", run__steps=12)
    assert_same_run(folder, whole[0], steps=12)


def test_a_torn_checkpoint_is_passed_over(whole, trained, workshop):
    shutil.copytree(whole[0], workshop / "runs" / "torn", ignore=shutil.ignore_patterns("export", "report.html"))
    checkpoints = workshop / "runs" / "torn" / "checkpoints"
    (checkpoints / "12").rename(checkpoints / "12.orbax-checkpoint-tmp")
    folder = trained("torn", run__steps=12)
    assert_same_run(folder, whole[0], steps=12)


# --- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"selection.rule": "max_varience"}, ["'max_varience'", "max_variance", "percentile"]),
        ({"selection.ties": "first"}, ["selection.ties='first'", "random, index"]),
        ({"advantage.over": "kep"}, ["advantage.over='kep'", "mean 'kept'", "kept, all"]),
        (
            {"advantage.over": "os.path:join"},
            ["advantage.over: os.path:join takes", "expected (rewards_N, valid_N, index_M, eps=)"],
        ),
        ({"loss.name": "grpo", "loss.options": "entropy_bonus=1"}, ["loss.options='entropy_bonus=1'", "it has: none"]),
        ({"optimizer.schedule": "cosin"}, ["optimizer.schedule='cosin'", "mean 'cosine'"]),
        ({"data.task": "arithmetics"}, ["data.task='arithmetics'", "did you mean 'arithmetic'?", "gsm8k"]),
        ({"data.answer_kind": "nmber"}, ["data.answer_kind='nmber'", "did you mean 'number'?", "exact", "equation"]),
        ({"verify.sources": "answer,box"}, ["verify.sources='box'", "did you mean 'boxed'?", "answer", "last_number"]),
        ({"log.sinks": "tensorbord"}, ["log.sinks='tensorbord'", "mean 'tensorboard'", "wandb, trackio, jsonl"]),
        ({"loss.name": "gppo"}, ["'gppo'", "grpo", "dapo"]),
        ({"reward.functions": "corect"}, ["'corect'", "correct", "format"]),
        ({"reward.functions": "own_rewards_of_a_user:varieties"}, ["own_rewards_of_a_user", "varieties"]),
        ({"advantage.over": "most"}, ["advantage.over", "most", "kept, all"]),
        ({"selection.m": 7}, ["selection.m=7", "rollout.n=6"]),
        ({"model.path": "nowhere"}, ["model.path=nowhere"]),
        ({"mesh.fsdp": 3}, ["data.prompts_per_step=4", "mesh.fsdp=3"]),
        ({"mesh.data": 4, "mesh.fsdp": 4, "data.prompts_per_step": 16}, ["16 devices", "there are 8"]),
        ({"mesh.tensor": 4}, ["layers.k", "kv_heads", "2", "tensor=4"]),
        ({"update.micro_batch": 5}, ["update.micro_batch=5", "3 or 6"]),
        ({"rollout.max_completion_length": 60}, ["rollout.max_completion_length=60", "64 positions"]),
        ({"data.max_prompt_length": 3}, ["data.max_prompt_length=3"]),
    ],
    ids=lambda value: " ".join(f"{key}={of}" for key, of in value.items()) if isinstance(value, dict) else "",
)
def test_the_impossible_is_refused_before_anything_is_made(changes, words, arguments, workshop, capsys, monkeypatch):
    def never(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr("pods_jax.assembly.policy.load_params", never)
    try:
        code = train.main(arguments("refused", **{key.replace(".", "__"): value for key, value in changes.items()}))
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    message = capsys.readouterr().err.strip()
    assert message.count("\n") == 0
    assert all(word in message for word in words), message
    assert not (workshop / "runs" / "refused").exists()


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", {"intermediate_size": 48}, "misshapen: model.layers.0.mlp.gate_proj.weight"),
        ("config.json", {"rope_scaling": "linear"}, "config.json: rope_scaling='linear' must be an object"),
        ("config.json", {"layer_types": 5}, "config.json: layer_types=5 must be a list"),
        ("config.json", {"logits_scaling": 8.0}, "config.json: logits_scaling=8.0 may change the computation"),
        ("generation_config.json", [2], "generation_config.json holds a JSON list, expected an object"),
        ("model.safetensors.index.json", [], "holds both model.safetensors and model.safetensors.index.json"),
        ("adapter_config.json", [], "adapter_config.json holds a JSON list, expected an object"),
    ],
)
def test_a_model_folder_that_does_not_fit_is_refused_before_the_run_folder_is_made(
    file, change, words, arguments, workshop, tiny_model, tmp_path, capsys
):
    broken = tmp_path / "broken_model"
    shutil.copytree(tiny_model, broken)
    before = json.loads((broken / file).read_text()) if isinstance(change, dict) else None
    (broken / file).write_text(json.dumps(change if before is None else before | change))
    assert train.main(arguments("refused", model__path=broken)) == 2
    assert words in capsys.readouterr().err
    assert not (workshop / "runs" / "refused").exists()


def test_a_mesh_that_leaves_a_host_without_work_is_refused(arguments, workshop, capsys, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert train.main(arguments("refused", mesh__fsdp=4)) == 2
    assert "a mesh of 4 devices leaves some hosts' idle: there are 8" in capsys.readouterr().err
    assert not (workshop / "runs" / "refused").exists()


def test_an_existing_run_is_refused_when_it_is_not_to_be_continued(whole, arguments, workshop, capsys):
    before = (whole[0] / "metrics.jsonl").read_bytes()
    assert train.main(arguments("whole", run__resume="false")) == 2
    assert "run.resume=false" in capsys.readouterr().err
    assert (whole[0] / "metrics.jsonl").read_bytes() == before


def test_other_settings_do_not_continue_a_run(whole, arguments, capsys):
    before = {path: path.read_bytes() for path in whole[0].iterdir() if path.is_file()}
    assert train.main(arguments("whole", optimizer__learning_rate=0.02, rollout__temperature=0.9)) == 2
    message = capsys.readouterr().err
    assert "optimizer.learning_rate" in message
    assert "rollout.temperature" in message
    assert before == {path: path.read_bytes() for path in before}


def test_programs_are_shared_by_runs_with_equal_settings_alone():
    programs, made = Programs(), iter("abc")

    def make(**numbers):
        return next(made)

    for (m, rule), expected in (((1, "x"), "a"), ((2, "x"), "b"), ((1, "x"), "a"), ((1, "y"), "c"), ((2, "x"), "b")):
        assert programs.get(make, m=m, rule=rule) == expected
    made = iter("de")
    assert programs.get(lambda **numbers: next(made), m=1, rule="x") == "d"


# --- what can happen on the way -----------------------------------------------------------------------------------------------


def test_without_signal_the_optimiser_rests(trained, tiny_model):
    folder = trained("silent", run__steps=2, eval__every=0, reward__functions="own_rewards_of_a_user:constant", loss__beta=0.1)
    for step, row in enumerate(rows(folder)[1:], start=1):
        assert row["selection/no_signal_fraction"] == 1
        assert row["update/taken"] == row["tokens/trained"] == 0
        assert row["policy/learning_rate"] == pytest.approx(0.002 * step)  # the schedule goes on
    before = load_file(tiny_model / "model.safetensors")
    after = load_file(folder / "export" / "model.safetensors")
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_reward_that_fails_costs_its_rollouts_and_not_the_run(trained, caplog):
    folder = trained("fragile", run__steps=2, eval__every=0, reward__functions="own_rewards_of_a_user:fragile")
    recorded = rows(folder, "rollouts.jsonl")
    for row in recorded:
        assert row["valid"] == (len(row["text"]) % 2 == 0)
        assert row["valid"] or not row["kept"]
    for metrics in rows(folder)[1:]:
        of_step = [row for row in recorded if row["step"] == metrics["step"]]
        share = np.mean([not row["valid"] for row in of_step])
        assert 0 < share < 1
        assert metrics["reward/invalid_fraction"] == pytest.approx(share, rel=1e-5)
        assert metrics["reward/unscored"] == share * len(of_step)
        assert metrics["update/taken"] == 1
    assert sum("fragile failed" in record.message for record in caplog.records) == 1


def test_several_epochs_a_reference_policy_and_an_own_sink(trained):
    changes = {"loss__beta": 0.1, "update__epochs": 3, "update__micro_batch": 6, "update__remat": "layer"}
    changes["log__sinks"] = "own_rewards_of_a_user:Noted"
    folder = trained("epochs", run__steps=2, eval__every=0, rollout__temperature=0.7, **changes)
    rewards = [row.get("reward/mean") for row in rows(folder)]
    steps = "".join(f"{step} {P * N if step else 0} {reward}\n" for step, reward in enumerate(rewards))
    assert (folder / "noted.txt").read_text() == f"epochs 0 {N}\n" + steps
    assert not (folder / "tensorboard").exists()
    for step, row in enumerate(rows(folder)[1:], start=1):
        assert row["update/taken"] == 3
        assert row["policy/kl"] > 0
        assert row["policy/logp_gap"] < 1e-5 < row["policy/ratio_deviation"]
        assert row["policy/learning_rate"] == pytest.approx(0.002 * step)
        kept = sum(r["length"] for r in rows(folder, "rollouts.jsonl") if r["step"] == step and r["kept"])
        assert row["tokens/trained"] == 3 * kept


@pytest.mark.parametrize(("limit", "multiple"), [(64, 16), (10, 10), (256, 64), (512, 128), (500, 128), (1, 1)])
def test_prompts_are_padded_to_few_lengths(limit, multiple):
    assert prompt_multiple(limit) == multiple
    assert len({-(-length // multiple) for length in range(1, limit + 1)}) <= 4


# --- compiled programs --------------------------------------------------------------------------------------------------------


def test_fifty_steps_of_varying_lengths_compile_no_more_than_was_said(arguments, workshop, monkeypatch, capsys):
    made, make_parts = [], opening.make_parts
    monkeypatch.setattr(opening, "make_parts", lambda *args: made.append(make_parts(*args)) or made[-1])
    sizes = {"tuning__rollout_rungs": 1, "tuning__cache_chunk": 6, "tuning__update_rungs": 2}
    assert train.main(arguments("fifty", run__steps=50, log__progress="true", run__export="false", **sizes)) == 0
    logged, said = rows(workshop / "runs" / "fifty"), capsys.readouterr().out
    parts = made[0][0]
    pattern = r"compiled at most, for each of (\d+) prompt lengths?: (\d+) programs of the rollout .*?, (\d+) of the update"
    [bound] = re.findall(pattern, " ".join(said.split()))
    lengths, rollouts, updates = map(int, bound)
    assert lengths * rollouts >= parts.engine.compiled_programs() > 3
    assert lengths * updates >= parts.learner.compiled_programs() > 1
    assert len({row["completions/mean_length"] for row in logged[1:]}) > 8
    assert all(row["update/padding_fraction"] < 1 for row in logged[1:])
    # A step compiles where it meets a size for the first time: fewer such steps than programs, and most steps compile nothing.
    compiling = sum(row["time/compile_seconds"] > 0 for row in logged[1:])
    assert compiling <= parts.engine.compiled_programs() + parts.learner.compiled_programs() + len(parts.engine.capacities)
    assert compiling < 25
    assert re.search(r"compiled \d+ programs in [\d.]+ s", said)
