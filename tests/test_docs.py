"""The pages say what is there: each example of docs/EXTENDING.md is run and used, and each named file exists."""

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pods_jax.algorithm.advantages import ADVANTAGES, find_advantage, normalise
from pods_jax.algorithm.losses import LOSSES, Numbers, evaluate_loss, find_loss
from pods_jax.algorithm.selection import RULES, find_rule, select
from pods_jax.assets.tokenizer import write_tokenizer
from pods_jax.config.sections import OptimizerConfig
from pods_jax.data.prompts import load_tokenizer
from pods_jax.data.rows import Source
from pods_jax.data.tasks import TASKS, load_splits
from pods_jax.devices.sharding import make_mesh
from pods_jax.evaluator import Evaluator
from pods_jax.lookup import import_own
from pods_jax.models.families import FAMILIES, spec_from_config
from pods_jax.models.weight_table import array_shapes
from pods_jax.rewards.answers import KINDS
from pods_jax.rewards.extraction import SOURCES
from pods_jax.rewards.scoring import make_scorer
from pods_jax.rewards.table import REWARDS, Reward, find_reward
from pods_jax.rewards.workers import Job
from pods_jax.rollout.engine import Engine
from pods_jax.rollout.sampling import sampling_params
from pods_jax.run.sinks import SINKS, RunFacts, check_sinks
from pods_jax.types import Group, Problem, Prompt
from pods_jax.update.optim import SCHEDULES, make_schedule

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/EXTENDING.md").read_text()
BLOCKS = {text.split("\n", 1)[0].removeprefix("# "): text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}
TABLES = (RULES, ADVANTAGES, LOSSES, REWARDS, KINDS, SOURCES, TASKS, FAMILIES, SCHEDULES, SINKS)
PROBLEM = Problem("a/1", ({"role": "user", "content": "Which digits?"},), "3, 4", "a", answer_kind="set")
GROUPS = Group(
    rewards_N=jnp.asarray([[0.0, 1.0, 1.0, jnp.nan], [3.0, 1.0, 2.0, 0.0]]),
    valid_N=jnp.asarray([[True, True, True, False], [True] * 4]),
    length_N=jnp.asarray([[1, 900, 10, 1], [2500, 1, 100, 1]]),
)


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    """The page's modules in the working directory; the tables are as before afterwards."""
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = [dict(table) for table in TABLES]
    yield tmp_path
    for table, entries in zip(TABLES, before, strict=True):
        table.clear()  # one by one, so that the order of the table stays too
        table.update(entries)  # type: ignore[arg-type]
    for name in BLOCKS:
        sys.modules.pop(name.removesuffix(".py"), None)


def use_rule(name):
    rule = find_rule("my_rules:best_for_its_length", ["tokens=500"])
    kept = select(GROUPS, jax.random.key(0), rule=rule, m=3)
    np.testing.assert_array_equal(kept, [[2, 0, 1], [2, 1, 3]])


def use_ranked_rule(name):
    kept = select(GROUPS, jax.random.key(0), rule=find_rule("my_ranked_rules:worst_first"), m=2, ties="index")
    np.testing.assert_array_equal(kept, [[0, 1], [3, 1]])


def use_advantage(name):
    centred = find_advantage("my_advantages:centred")
    index = jnp.asarray([[1, 0, -1], [0, 1, 3]])
    advantages, signal = normalise(GROUPS.rewards_N, GROUPS.valid_N, index, advantage=centred, eps=1e-4)
    np.testing.assert_allclose(advantages, [[0.5, -0.5, 0], [5 / 3, -1 / 3, -4 / 3]], rtol=1e-6)
    assert signal.all()


def use_loss(name):
    old = jnp.asarray([[[-1.0, -2.0], [-3.0, -9.0]]])
    logp, length = old + jnp.log(jnp.asarray([[[0.5, 4.0], [1.0, 7.0]]])), jnp.asarray([[2, 1]])
    loss, weight = find_loss("my_losses:capped_over_tokens", ["cap=3"]), jnp.ones((1, 2))

    def value(logp_PMC):
        return evaluate_loss(
            loss,
            Numbers(),
            logp_PMC=logp_PMC,
            logp_old_PMC=old,
            entropy_PMC=jnp.zeros((1, 2, 2)),
            advantage_PM=jnp.asarray([[1.0, -1.0]]),
            length_PM=length,
            weight_PM=weight,
            normaliser=loss.averaging.normaliser(length, weight),
        )

    (_, sums), gradient = jax.value_and_grad(value, has_aux=True)(logp)
    np.testing.assert_allclose(gradient, [[[-0.5 / 3, -3 / 3], [1 / 3, 0]]], rtol=1e-6)
    assert (sums["policy/capped_fraction"], sums["tokens/trained"]) == (1, 3)


def use_reward(name):
    short = import_own("my_rewards:short", "reward.functions")
    REWARDS["short"] = Reward(short, weight=0.5)
    with make_scorer(["short"]) as scorer:
        scores = scorer.score([PROBLEM], [["3", "3" * 200]])
    np.testing.assert_array_equal(scores.rewards_PN, [[0.5, 0]])
    assert short(Problem("a/2", ({"role": "user", "content": "Prove it."},), "x", "a"), "3") is None
    assert find_reward("my_rewards:short").function(PROBLEM, "3") == Job("my_rewards:short", (PROBLEM, "3"))


def use_kind(name):
    importlib.import_module(name)
    with make_scorer(["correct"]) as scorer:
        texts = ["<answer>4,3</answer>", "<answer>3</answer>", "3, 4"]
        np.testing.assert_array_equal(scorer.correct([PROBLEM], [texts]), [[True, False, False]])
    assert KINDS["set"](Problem("a/2", (), " , ", "a"), "3") is None


def use_source(name):
    importlib.import_module(name)
    with make_scorer(["correct"], sources=["hashes", "answer"]) as scorer:
        texts = ["It is #### 3, 4", "<answer>3, 4</answer> #### 5", "3, 4"]
        problem = Problem("a/2", PROBLEM.messages, "3, 4", "a")
        np.testing.assert_array_equal(scorer.correct([problem], [texts]), [[True, True, False]])


def use_task(name):
    module = importlib.import_module(name)
    rows = [{"numbers": "3 and 4", "total": 7}, {"numbers": 5, "total": 5}]
    for split in ("train", "test"):
        rows[0]["numbers"] = f"{split} 3 and 4"
        Path(f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = load_splits("sums", train_problems=0, held_out_problems=0, seed=0, source=Source(path="."))
    assert [(p.id, p.answer, p.answer_kind) for p in splits.train] == [("sums/train/0", "7", "number")]
    assert splits.train[0].messages[0]["content"] == "What is the sum of train 3 and 4?"
    assert "1 rows unparsable (sums/train/1: column 'numbers' holds '5', not text)" in str(splits.reports[0])
    assert TASKS["sums"].system_prompt == module.THINK_ANSWER_PROMPT


def use_script(name):
    module = importlib.import_module(name)
    assert "sums" in TASKS
    with pytest.raises(SystemExit) as ended:
        module.train.main(["--data.task", "sums", "--print_config"])
    assert ended.value.code == 0
    assert module.train.main(["--data.task", "sums", "--data.path", "absent"]) == 2


def use_family(name):
    importlib.import_module(name)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 32, "intermediate_size": 24, "max_position_embeddings": 64}
    config = {"architectures": ["NormedLlamaForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e4, **sizes}
    assert array_shapes(spec_from_config(config))["layers", "q_norm"] == (2, 4)
    assert spec_from_config(config | {"architectures": None, "model_type": "normed_llama"}).qk_norm


def use_schedule(name):
    importlib.import_module(name)
    config = OptimizerConfig(schedule="inverse_root", learning_rate=2.0, warmup_steps=2, final_fraction=0.25)
    schedule = jax.jit(make_schedule(config, 100))
    rates = [float(jnp.asarray(schedule(jnp.int32(step)))) for step in (0, 1, 2, 5, 90)]
    assert rates == pytest.approx([1, 2, 2, 1, 0.5])


def use_engine(name):
    write_tokenizer(Path("tokenizer"))
    tokenizer = load_tokenizer("tokenizer")
    problems = [Problem(f"a/{i}", ({"role": "user", "content": "?"},), text, "a") for i, text in enumerate(("12", "34"))]
    tokens = [[tokenizer(text, add_special_tokens=False)["input_ids"] for text in row] for row in (("12", "21"), ("34", "34"))]
    recorded: Engine = importlib.import_module(name).Recorded(jnp.asarray(tokens), jnp.full((2, 2), 2))
    evaluator = Evaluator(
        name="eval/accuracy",
        engine=recorded,
        sampling=sampling_params(temperature=1.0),
        prompts=[Prompt(problem, (3, 4, 5)) for problem in problems],
        batch=2,
        mesh=make_mesh((1, 1, 1), jax.devices()[:1]),
        tokenizer=tokenizer,
        judge=lambda problems, texts: np.array(
            [[text == p.answer for text in row] for p, row in zip(problems, texts, strict=True)]
        ),
        key=jax.random.key(0),
    )
    assert evaluator(None)["eval/accuracy"] == 0.75
    assert recorded.padded_length(1) == 2
    assert recorded.foretell(2, 3).completion_lengths == (2,)
    assert recorded.compiled_programs() == 0
    for method, asked in inspect.getmembers(Engine, inspect.isfunction):
        if method in ("__call__", "padded_length", "foretell", "compiled_programs"):
            given = inspect.signature(getattr(type(recorded), method)).parameters
            assert list(given) == list(inspect.signature(asked).parameters)


def use_sink(name):
    found = check_sinks(["my_sinks:Lines"])
    sink = found["my_sinks:Lines"](RunFacts(folder=Path(), name="a", config={}, first_step=0))
    sink.log(0, {"eval/accuracy": 0.25, "wall_seconds": 0.0}, [])
    sink.log(1, {"reward/mean": 0.5, "wall_seconds": 1.0}, [])
    sink.close()
    assert Path("accuracy.txt").read_text() == "0 0.25\n"


USES = {
    "my_train.py": use_script,
    "my_rules.py": use_rule,
    "my_ranked_rules.py": use_ranked_rule,
    "my_advantages.py": use_advantage,
    "my_losses.py": use_loss,
    "my_rewards.py": use_reward,
    "my_kinds.py": use_kind,
    "my_sources.py": use_source,
    "my_tasks.py": use_task,
    "my_families.py": use_family,
    "my_schedules.py": use_schedule,
    "my_engines.py": use_engine,
    "my_sinks.py": use_sink,
}


def test_every_example_of_the_page_is_used_here():
    assert list(BLOCKS) == list(USES)
    assert len(BLOCKS) == PAGE.count("```python")


@pytest.mark.parametrize("block", USES)
def test_an_example_of_the_page_works(block):
    USES[block](block.removesuffix(".py"))


def test_the_page_lists_each_table_where_it_stands():
    listed = re.findall(r"`([A-Z]+)` in `(pods_jax/\S+)\.py`", PAGE)
    tables = [getattr(importlib.import_module(file.replace("/", ".")), table) for table, file in listed]
    assert {id(table) for table in TABLES} <= {id(table) for table in tables}


@pytest.mark.parametrize("page", ["README.md", "EXPERIMENTS.md", "docs/EXTENDING.md"])
def test_every_file_that_a_page_names_exists(page):
    text = (ROOT / page).read_text()
    named = re.findall(r"\b(?:pods_jax|tests|configs|docs|launch)/[\w./-]*\w", text)
    linked = [(ROOT / page).parent / link for link in re.findall(r"\]\(([^):#]+)\)", text)]
    absent = [str(path) for path in [*(ROOT / name for name in named), *linked] if not path.exists()]
    assert named
    assert absent == []
