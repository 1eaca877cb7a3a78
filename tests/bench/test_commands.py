"""Every benchmark runs on a toy, and its last line is one JSON object with the promised keys."""

import json
from dataclasses import replace

import pytest

from pods_jax.bench.__main__ import COMMANDS, main
from pods_jax.config.command_line import leaf_kinds

SHAPE = "--shape.vocab_size 64 --shape.width 16 --shape.layers 1 --shape.head_size 8 --shape.feed_forward 32"
TOY = f"{SHAPE} --prompts 2 --prompt_length 5 --completion_length 6 --repeats 2"
ARGUMENTS = {
    "rollout": f"{TOY} --n 3 --chunk 4",
    "step": f"{TOY} --n 4 --m 2 --chunk 4",
    "update": f"{TOY} --m 3",
    "tradeoff": f"{TOY} --n 2,4 --m 1,2 --step_n 4 --step_m 2 --completion_length 3 --temperature 0.7",
    "flops": "--prompts 2 --n 4 --m 2 --prompt_length 16 --completion_length 8 --shape.layers 1",
    "selector": "--prompts 1,3 --n 8 --repeats 2 --rules max_variance,random",
    "load": "--size_gb 0.02",
}
KEYS = {
    "rollout": {"tokens_per_second", "tokens_per_cpu_second", "cpu_seconds", "compile_seconds", "floor_fraction"},
    "step": {"pods", "grpo", "cpu_seconds", "grpo_over_pods_cpu"},
    "update": {"tokens_per_second", "cpu_seconds", "compile_seconds", "temporary_bytes", "flops", "floor_fraction"},
    "tradeoff": {
        "curves",
        "asymmetry_marginal",
        "iso_cost",
        "saved_fraction",
        "same_time_without",
        "verdict",
        "by_cpu_seconds",
    },
    "flops": {"prefill_flops", "update_flops", "cache_bytes", "decode_flops_a_token"},
    "selector": {"cases", "agree"},
    "load": {"ratio", "peak_bytes", "parameter_bytes", "cpu_seconds"},
}


@pytest.fixture
def last_line(capsys, monkeypatch, keys_read):
    """Runs a command, of which it must read every option and no other key; returns its last line."""

    def call(command, arguments):
        options, run = COMMANDS[command].options, COMMANDS[command].run
        read = set()

        def watched(given):
            nonlocal read
            read = keys_read()
            return run(given)

        monkeypatch.setitem(COMMANDS, command, replace(COMMANDS[command], run=watched))
        assert main([command, *arguments.split()]) == 0
        assert set(leaf_kinds(options)) - read == set()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return call


def test_every_command_is_tried():
    assert set(ARGUMENTS) == set(KEYS) == set(COMMANDS)


def test_rollout(last_line):
    result = last_line("rollout", ARGUMENTS["rollout"])
    assert result.keys() >= KEYS["rollout"]
    assert result["bench"] == "rollout"
    assert result["compiled_programs"] == 4  # prefill, two cache sizes, one growth: nothing compiles between the repeats
    assert result["tokens_per_second"] == pytest.approx(2 * 3 * 6 / result["seconds"], rel=1e-4)
    assert result["floor_fraction"] == pytest.approx(result["floor_seconds"] / result["seconds"], rel=1e-4)


def test_step(last_line):
    result = last_line("step", ARGUMENTS["step"])
    assert result.keys() >= KEYS["step"]
    for name in ("pods", "grpo"):
        assert list(result[name]["parts"]) == ["rollout", "reward", "selection", "update", "host"]
        assert result[name]["cpu_seconds"] > 0
    assert result["grpo"]["flops"] > result["pods"]["flops"]


def test_update(last_line):
    result = last_line("update", ARGUMENTS["update"])
    assert result.keys() >= KEYS["update"]
    assert result["updates_taken"] == 3  # the warm-up and two measured ones: every update moved
    assert result["flops"] < result["flops_concatenated"]


def test_selector(last_line):
    result = last_line("selector", ARGUMENTS["selector"])
    assert result.keys() >= KEYS["selector"]
    assert len(result["cases"]) == 2 * 2 * 1
    by_rule = {case["rule"]: case for case in result["cases"]}
    on_device = {"ours", "pairs", "joined", "argsort"}
    assert by_rule["max_variance"]["microseconds"].keys() == on_device | {"top_k", "NumPy", "loop"}
    assert by_rule["random"]["microseconds"].keys() == on_device
    assert all(time > 0 for case in result["cases"] for time in case["microseconds"].values())


def test_tradeoff(last_line):
    result = last_line("tradeoff", ARGUMENTS["tradeoff"])
    assert result.keys() >= KEYS["tradeoff"]
    assert result["curves"]["rollout"]["sizes"] == [2, 4]
    assert result["curves"]["update"]["sizes"] == [1, 2]
    assert [pair["m"] for pair in result["iso_cost"]] == [1, 2]
    assert result["iso_cost"][1]["n"] >= 4
    assert result["verdict"].startswith("Down-sampling")


def test_flops(last_line):
    result = last_line("flops", ARGUMENTS["flops"])
    assert result.keys() >= KEYS["flops"]
    assert result["prefill_flops"]["ratio"] == pytest.approx(1 / 4, rel=0.02)


def test_an_update_in_micro_batches(last_line):
    result = last_line("update", f"{TOY} --m 4 --update.micro_batch 2 --update.remat true")
    assert result["updates_taken"] == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_option(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{key} " in text for key in leaf_kinds(COMMANDS[command].options))


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("rollouts", "valid names are rollout, step, update, tradeoff, flops, selector"),
        ("rollout --model.path nowhere", "nowhere"),
        ("rollout --completion_length 1", "at least 2"),
        ("rollout --shape.q_heads 3", "shape.q_heads=3"),
        (
            "step --model.param_dtype bfloat16",
            "model.param_dtype=bfloat16 is not how a model is trained: parameters are float32",
        ),
        ("rollout --model.path bundled --shape.width 64", "shape.* is for model.path=random; model.path=bundled has its own"),
        ("step --n 4 --m 5", "m=5"),
        ("step --rule best", "max_variance"),
        ("update --m 4 --update.micro_batch 3", "possible are 1, 2, 4, 8, 16"),
        ("selector --rules best", "max_variance"),
        ("tradeoff --n 4", "n=4 must be at least two sizes"),
        ("tradeoff --m 4,2", "m=4,2 must be"),
        ("tradeoff --step_n 4 --step_m 5", "step_m=5"),
        ("tradeoff --update.micro_batch 3", "possible are"),
        ("flops --n 4 --m 5", "m=5"),
    ],
)
def test_the_impossible_is_refused_in_one_line(capsys, arguments, message):
    try:
        code = main(arguments.split())
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
