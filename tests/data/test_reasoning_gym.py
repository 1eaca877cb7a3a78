import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pods_jax.config.command_line import from_yaml
from pods_jax.config.entries import Config
from pods_jax.data import reasoning_gym
from pods_jax.data.rows import Source
from pods_jax.data.tasks import find_task, load_splits

NAME = "reasoning_gym:sums"
CONFIG = Path(__file__).parents[2] / "configs" / "smollm2_cpu.yaml"


class Sums:
    """Stands in for a data set of the package: entry ``i`` depends on the seed and ``i`` alone."""

    def __init__(self, seed, size, largest=1000, metadata=None):
        if largest < 1:
            raise AssertionError("largest must be at least 1")
        self.seed, self.size, self.largest, self.metadata = seed, size, largest, metadata

    def __getitem__(self, index):
        rng = random.Random(self.seed + index)
        a, b = rng.randint(1, self.largest), rng.randint(1, self.largest)
        return {"question": f"{a} + {b} = ", "answer": str(a + b), "metadata": {"sum": a + b, "kind": self.metadata}}

    def score_answer(self, answer, entry):
        return float(answer == str(entry["metadata"]["sum"]) and not isinstance(entry["metadata"]["kind"], list))


@pytest.fixture
def package(monkeypatch):
    def create_dataset(name, seed, size, **options):
        assert name == "sums"
        return Sums(seed, size, **options)

    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create_dataset))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", SimpleNamespace(DATASETS={"sums": None, "anagrams": None}))
    reasoning_gym._package.cache_clear()
    yield create_dataset
    reasoning_gym._package.cache_clear()


def load(train=40, held_out=20, seed=3, **settings):
    source = Source(options=tuple(settings.pop("options", ())), **settings.pop("place", {}))
    return load_splits(NAME, train_problems=train, held_out_problems=held_out, seed=seed, source=source, **settings)


def test_problems_are_distinct_disjoint_and_the_same_for_a_seed(package):
    splits = load()
    questions = [p.messages[0]["content"] for p in splits.train + splits.held_out]
    assert (len(splits.train), len(splits.held_out), len(set(questions))) == (40, 20, 60)
    assert splits == load()
    assert splits.train[:9] == load(train=9).train
    assert {p.task for p in splits.train} == {NAME}
    assert splits.train != load(seed=4).train


def test_a_problem_carries_all_that_the_packages_scorer_needs(package):
    problem = load(options=["largest=50"]).train[0]
    extra = json.loads(problem.extra)
    assert (problem.answer_kind, extra["dataset"], extra["options"]) == ("reasoning_gym", "sums", {"largest": 50})
    scorer = package(extra["dataset"], seed=0, size=1, **extra["options"]).score_answer
    assert (scorer(problem.answer, extra["entry"]), scorer("no", extra["entry"])) == (1.0, 0.0)


def test_worked_examples_are_the_first_of_the_generator_in_training_and_evaluation(package):
    training, evaluation = load(few_shot=2), load(few_shot=2, evaluation=True)
    assert training.examples == evaluation.examples == load().train[:2]
    assert training.train[:38] == load().train[2:]
    assert len(training.train) == 40
    assert not evaluation.train
    assert training.held_out == evaluation.held_out


def test_a_generator_with_few_questions_yields_what_it_has(package):
    splits = load(train=500, options=["largest=4"])
    assert len(splits.train) + len(splits.held_out) == 10  # of 16, which but for the order are 10


def test_a_held_out_question_is_not_in_training_in_another_order_either(package):
    splits = load(train=500, held_out=100, options=["largest=20"])
    train, held_out = ({p.messages[0]["content"] for p in part} for part in (splits.train, splits.held_out))
    assert len(train) + len(held_out) == 210
    assert len(held_out) > 10
    swapped = {" + ".join(reversed(question.removesuffix(" =").split(" + "))) + " =" for question in held_out}
    assert not train & (held_out | swapped)


def test_entries_that_do_not_survive_json_are_reported(package, monkeypatch):
    monkeypatch.setattr(Sums.__init__, "__defaults__", (1000, ("a", "tuple")))
    with pytest.raises(ValueError, match=r"no held_out problem; of 20 unparsable rows the first is .* does not survive JSON"):
        load()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": ["largest=0"]}, "refuses data.options={'largest': 0} for 'sums': largest must be"),
        ({"options": ["colour=red"]}, "refuses data.options={'colour': 'red'}"),
        ({"options": ["largest"]}, "'largest'; each must be key=value"),
        ({"options": ["largest=1", "largest=2"]}, "'largest=2'; each must be key=value, and each key once"),
        ({"train": 0}, "0 train problems asked of reasoning_gym:sums"),
        ({"place": {"path": "x"}}, r"data\.path='x': .* generates its problems and reads no file"),
    ],
)
def test_impossible_settings_are_refused_by_name(package, settings, message):
    with pytest.raises(ValueError, match=message):
        load(**settings)


def test_an_unknown_data_set_is_refused_with_the_valid_names(package):
    with pytest.raises(ValueError, match=r"data\.task='reasoning_gym:sms'.*did you mean 'sums'. valid: anagrams, sums"):
        find_task("reasoning_gym:sms")


def test_a_missing_package_is_told_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning_gym._package.cache_clear()
    with pytest.raises(ValueError, match=r"pip install 'pods_jax\[reasoning-gym\]'"):
        find_task(NAME)


@pytest.mark.parametrize("name", ["chain_sum", "basic_arithmetic", "rush_hour"])
def test_the_real_package_generates_and_scores(name):
    package = pytest.importorskip("reasoning_gym")
    splits = load_splits(f"reasoning_gym:{name}", train_problems=12, held_out_problems=4, seed=0)
    assert (len(splits.train), len(splits.held_out)) == (12, 4)
    for problem in splits.train:
        extra = json.loads(problem.extra)
        scorer = package.create_dataset(extra["dataset"], size=1, **extra["options"]).score_answer
        assert scorer("surely wrong", extra["entry"]) < 0.1
        assert not problem.answer or scorer(problem.answer, extra["entry"]) == 1.0


def test_the_sums_of_the_real_model_are_many_and_no_held_out_one_is_trained_on_in_either_order():
    pytest.importorskip("reasoning_gym")
    data = from_yaml(Config, CONFIG.read_text(), source=str(CONFIG)).data
    splits = load_splits(
        data.task,
        train_problems=data.train_problems,
        held_out_problems=data.held_out_problems,
        seed=data.seed,
        source=Source(options=tuple(data.options)),
        few_shot=data.few_shot,
    )
    assert (len(splits.train), len(splits.held_out)) == (1000, 128)

    def pairs(problems):
        return {frozenset(re.findall("[0-9]+", p.messages[0]["content"])) for p in problems}

    assert len(pairs(splits.held_out)) == 128
    assert not pairs(splits.held_out) & pairs(splits.train + splits.examples)
