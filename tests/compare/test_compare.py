import json
import re
import shutil
from html.parser import HTMLParser
from types import SimpleNamespace

import plotly.graph_objects
import pytest

from pods_jax import train
from pods_jax.compare.__main__ import main
from pods_jax.compare.running import take_turns
from pods_jax.config.command_line import from_yaml
from pods_jax.config.entries import Config
from pods_jax.loop import Trainer
from pods_jax.update.learner import Learner

STEPS, ARMS, SEEDS = 6, ["pods", "grpo", "grpo_ga"], [0, 3]


@pytest.fixture(scope="module")
def arguments(tiny_model, tmp_path_factory, compiled_once):
    """Builds a command line: a tiny comparison in a folder of its own, with what the test changes."""

    def build(name, **changes):
        options = {
            "run.steps": STEPS,
            "run.checkpoint_every": 2,
            "model.path": tiny_model,
            "data.prompts_per_step": 2,
            "data.train_problems": 24,
            "data.held_out_problems": 6,
            "rollout.n": 4,
            "rollout.max_completion_length": 10,
            "selection.m": 2,
            "optimizer.learning_rate": 0.05,
            "reward.functions": "tag_count,format",
            "mesh.data": 1,
            "mesh.fsdp": 1,
            "eval.batch": 6,
            "compare.out": tmp_path_factory.getbasetemp() / name,
            "compare.arms": ",".join(ARMS),
            "compare.seeds": ",".join(map(str, SEEDS)),
            "compare.eval_every": 3,
        }
        options |= {key.replace("__", "."): value for key, value in changes.items()}
        return [text for key, value in options.items() if value is not None for text in (f"--{key}", str(value))]

    return build


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    """The uninterrupted comparison: its folder, the learners it made, and the order in which runs took their steps."""
    made, order, init, step = [], [], Learner.__init__, Trainer.step

    def counted(self, *args, **kwargs):
        made.append(self)
        init(self, *args, **kwargs)

    def watched(self):
        order.append((self.settings.config, self.done + 1))
        step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "__init__", counted)
        patch.setattr(Trainer, "step", watched)
        assert main(arguments("whole")) == 0
    names = {(config, step): from_yaml(Config, config).run for config, step in order}
    return tmp_path_factory.getbasetemp() / "whole", made, [(names[one].dir.rsplit("/")[-1], one[1]) for one in order]


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(folder):
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "wall_seconds"} for row in rows(folder)]


def runs_of(folder):
    return {f"{arm}/{seed}": folder / arm / f"seed{seed}" for arm in ARMS for seed in SEEDS}


# --- running ------------------------------------------------------------------------------------------------------------------


def test_every_arm_and_seed_is_a_run_folder_with_its_steps_and_evaluations(whole):
    for run in runs_of(whole[0]).values():
        log = rows(run)
        assert [row["step"] for row in log] == list(range(STEPS + 1))
        assert {row["step"] for row in log if "eval/accuracy" in row} == {0, 3, 6}
        assert all(row["time/step_seconds"] > 0 for row in log[1:])
        assert not (run / "export").exists()
        assert (run / "rollouts.jsonl").read_bytes() == b""
    read = from_yaml(Config, (whole[0] / "grpo_ga" / "seed3" / "config.yaml").read_text())
    assert (read.run.seed, read.selection.rule, read.update.micro_batch) == (3, "all", 4)


def test_arms_take_step_k_in_turns_and_each_comes_first_equally_often(whole):
    order = whole[2]
    assert [step for _, step in order] == 2 * [step for step in range(1, STEPS + 1) for _ in ARMS]
    blocks = [[arm for arm, _ in order[i : i + 3]] for i in range(0, len(order), 3)]
    assert all(sorted(block) == sorted(ARMS) for block in blocks)
    assert sorted(block[0] for block in blocks) == sorted(4 * ARMS)


def test_a_run_of_more_steps_takes_them_when_the_others_have_ended():
    order = []

    class Run:
        def __init__(self, name, steps, done):
            self.name, self.done, self.accuracy = name, done, None
            self.settings = SimpleNamespace(steps=steps, eval_every=0)

        def begin(self):
            order.append((self.name, "begin"))

        def step(self):
            self.done += 1
            order.append((self.name, self.done))

    take_turns({"a": Run("a", 5, 1), "b": Run("b", 3, 0)}, say=lambda text: None)  # type: ignore[arg-type]
    assert order[:2] == [("a", "begin"), ("b", "begin")]
    assert sorted(order[3:5], key=str) == [("a", 2), ("b", 2)]
    assert order[2] == ("b", 1)
    assert sorted(order[5:7], key=str) == [("a", 3), ("b", 3)]
    assert order[7:] == [("a", 4), ("a", 5)]


def test_arms_and_seeds_with_equal_updates_share_one_learner(whole):
    assert len(whole[1]) == 1


def test_arms_of_a_seed_start_alike_and_see_the_same_prompts(whole):
    for seed in SEEDS:
        logs = [timeless(whole[0] / arm / f"seed{seed}") for arm in ARMS]
        assert all(log[0] == logs[0][0] for log in logs)
    pods, ga = (timeless(whole[0] / arm / "seed0")[1] for arm in ("pods", "grpo_ga"))
    same = ("reward/mean", "tokens/generated", "completions/mean_length")
    assert [pods[name] for name in same] == [ga[name] for name in same]
    assert ga["tokens/trained"] > pods["tokens/trained"]
    assert timeless(whole[0] / "pods" / "seed0") != timeless(whole[0] / "pods" / "seed3")


def test_an_arms_run_equals_a_training_run_of_its_own(whole, tmp_path):
    """Neither shared programs nor other arms' steps in between change a number."""
    run = whole[0] / "grpo" / "seed3"
    assert train.main(["--config", str(run / "config.yaml"), "--run.dir", str(tmp_path), "--run.name", "alone"]) == 0
    assert timeless(tmp_path / "alone") == timeless(run)


@pytest.mark.parametrize("killed_after", [1, 16])
def test_a_comparison_that_was_killed_continues_as_if_it_had_not_been(killed_after, whole, arguments, monkeypatch, tmp_path):
    taken, step = [], Trainer.step

    def killed(self):
        if len(taken) == killed_after:
            raise KeyboardInterrupt
        taken.append(None)
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            main(arguments("unused", compare__out=tmp_path))
    assert main(arguments("unused", compare__out=tmp_path)) == 0
    for name, run in runs_of(tmp_path).items():
        assert timeless(run) == timeless(runs_of(whole[0])[name]), name


def test_one_run_after_another_gives_the_same_runs(whole, arguments, tmp_path):
    changes = {"compare__interleave": "run", "compare__seeds": 3}
    assert main(arguments("unused", compare__out=tmp_path, **changes)) == 0
    for arm in ARMS:
        assert timeless(tmp_path / arm / "seed3") == timeless(whole[0] / arm / "seed3")


def test_a_finished_comparison_trains_nothing_and_writes_its_page_again(whole, arguments, monkeypatch):
    monkeypatch.setattr("pods_jax.assembly.opening.load_policy", pytest.fail)
    page = whole[0] / "compare.html"
    before = page.read_text()
    page.unlink()
    assert main(arguments("whole")) == 0
    assert page.read_text() == before


def test_other_settings_do_not_continue_a_comparison(whole, arguments, capsys):
    assert main(arguments("whole", optimizer__learning_rate=0.01)) == 2
    assert "optimizer.learning_rate" in capsys.readouterr().err


def test_runs_that_are_further_on_wait_for_the_others():
    order = []

    class Run:
        settings = SimpleNamespace(steps=4, eval_every=2)
        accuracy = None

        def __init__(self, name, done):
            self.name, self.done = name, done

        def begin(self):
            order.append((self.name, "begin"))

        def step(self):
            self.done += 1
            order.append((self.name, self.done))

    take_turns({"a": Run("a", 1), "b": Run("b", 3)}, say=lambda text: None)  # type: ignore[dict-item]
    assert order == [("a", "begin"), ("b", "begin"), ("a", 2), ("a", 3), ("a", 4), ("b", 4)]


# --- what it says -------------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found, self.open = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in {"meta", "input", "link", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page_of(folder):
    """The page without plotly's own source, and its charts."""
    page = (folder / "compare.html").read_text()
    page = page.replace(max(re.findall(r"<script>(.*?)</script>", page, re.DOTALL), key=len), "")
    source = page[page.index("const charts = ") + len("const charts = ") :]
    return page, json.loads(re.sub(r",\]$", "]", source[: source.index(";\n")]))


def test_the_page_is_one_file_that_loads_nothing(whole):
    page = (whole[0] / "compare.html").read_text()
    assert page.count("plotly.js v") == 1
    assert page.count("default-src 'none'") == 1
    tags = Tags(page_of(whole[0])[0])
    assert tags.open == []
    assert not [attrs for tag, attrs in tags.found if {"src", "href"} & attrs.keys() or tag in {"link", "iframe"}]


def test_the_page_draws_every_arm_with_its_band_on_three_clocks(whole):
    page, (accuracy, cost) = page_of(whole[0])
    for chart in (accuracy, cost):
        plotly.graph_objects.Figure(data=chart["traces"], layout=chart["layout"])
    lines = [trace for trace in accuracy["traces"] if "fill" not in trace and trace.get("showlegend", True)]
    assert [trace["name"] for trace in lines] == ARMS
    assert len(accuracy["traces"]) == 3 * len(ARMS)
    for trace in accuracy["traces"]:
        assert {clock: len(x) for clock, x in trace["meta"].items()} == {"wall": 3, "cpu": 3, "step": 3}
        assert trace["meta"]["step"] == [0, 3, 6]
        assert trace["meta"]["wall"][0] == 0 < trace["meta"]["wall"][1] < trace["meta"]["wall"][2]
    assert re.findall(r'name="axis" value="(\w+)"', page) == ["wall", "cpu", "step"]
    assert [trace["name"] for trace in cost["traces"]] == ["rollout", "reward", "update", "rest"]
    assert all(trace["x"] == ARMS and min(trace["y"]) >= 0 for trace in cost["traces"])


def test_the_page_says_what_was_compared_and_how(whole):
    page, _ = page_of(whole[0])
    for text in (
        "micro-batches of 4 rollouts",
        "seeds 0,3",
        "in turns, step by step",
        "GRPO on all n with gradient accumulation, as published",
        "Time to 99% of each baseline",
        "On the way: seconds of each baseline over those of pods",
        "Seconds a step",
        "pods sooner than grpo_ga",
    ):
        assert text in page, text
    assert page.count("<table>") == 5


def test_imports_alone_are_compared_with_the_first_of_them(whole, arguments, tmp_path, capsys):
    folders = ",".join(str(whole[0] / arm) for arm in ("grpo", "pods"))
    argv = ["--compare.arms", "none", "--compare.imports", folders, "--compare.out", str(tmp_path)]
    assert main(argv) == 0
    assert "against grpo" in capsys.readouterr().out
    page, (accuracy, _) = page_of(tmp_path)
    assert {trace["name"] for trace in accuracy["traces"]} == {"grpo", "pods"}
    assert "grpo sooner than pods" in page


def test_imports_stand_beside_own_arms_and_must_have_other_names(whole, arguments, tmp_path, capsys):
    shutil.copytree(whole[0] / "grpo", tmp_path / "elsewhere")
    assert main(arguments("whole", compare__imports=tmp_path / "elsewhere")) == 0
    _, (accuracy, _) = page_of(whole[0])
    assert {trace["name"] for trace in accuracy["traces"]} == {*ARMS, "elsewhere"}
    assert main(arguments("whole", compare__imports=whole[0] / "grpo")) == 2
    assert "compare.imports brings an arm grpo" in capsys.readouterr().err
    assert main(arguments("whole")) == 0


def test_a_sweep_compares_at_a_common_level(arguments, tmp_path):
    changes = {"compare__arms": None, "compare__seeds": 0, "sweep__n": "4,6", "run__steps": 3}
    assert main(arguments("unused", compare__out=tmp_path, **changes)) == 0
    page, _ = page_of(tmp_path)
    assert "Time to a common level" in page
    assert "sooner than" not in page
    assert {folder.name for folder in tmp_path.iterdir() if folder.is_dir()} == {"n=4", "n=6"}
