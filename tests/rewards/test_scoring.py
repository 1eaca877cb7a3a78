import logging
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_jax.rewards.scoring import REWARDS, Reward, Scorer, make_scorer
from pods_jax.types import Problem

PROBLEM = Problem("p/0", (), "18", "made_up")
RIGHT = "<think>9*2</think><answer>18</answer>"
WRONG = "<think>9*2</think><answer>17</answer>"
HOSTILE = [
    "9" * 1_000_000,
    "<think>" * 100_000 + "<answer>" * 100_000,
    "\x00",
    "\ud800<answer>\udfff",
    "<think></think>" * 100_000,
]


def score_one(name, text):
    return REWARDS[name].function(PROBLEM, text)


def scorer_of(function, weight=1.0):
    return Scorer({"own:part": Reward(function, weight)})


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Writes a module into the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


@pytest.mark.parametrize("name", sorted(REWARDS))
class TestEveryReward:
    def test_right_form_and_answer_earn_more_than_nothing_at_all(self, name):
        right, nothing = score_one(name, RIGHT), score_one(name, "")
        assert right is not None
        assert right > 0
        assert nothing == 0

    def test_any_text_scores_within_bounds(self, name):
        @given(
            pieces=st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "18", " ", "x", "\ud800", "\x00"]))
        )
        def check(pieces):
            score = score_one(name, "".join(pieces))
            assert isinstance(score, float)
            assert 0 <= score <= {"correct": 1, "format": 1, "tag_count": 4}[name]

        check()

    def test_the_default_weight_is_the_papers(self, name):
        assert make_scorer([name]).rewards[name].weight == {"correct": 1.0, "format": 0.1, "tag_count": 0.025}[name]


def test_hand_worked_total():
    problems = [PROBLEM, Problem("p/1", (), "7", "made_up")]
    texts = [[RIGHT, WRONG, "18"], ["x<think></think><answer>7</answer>", "<answer>7</answer>", ""]]
    scores = make_scorer(["correct", "format", "tag_count"]).score(problems, texts)
    assert scores.rewards_PN.dtype == np.float32
    np.testing.assert_allclose(scores.rewards_PN, [[1.2, 0.2, 0.0], [1.199, 1.05, 0.0]], rtol=1e-6)
    assert scores.parts["correct"].tolist() == [[1, 0, 0], [1, 1, 0]]
    assert scores.parts["tag_count"].tolist() == [[4, 4, 0], [4, 2, 0]]
    assert scores.valid_PN.all()
    assert scores.unscored == {"correct": 0, "format": 0, "tag_count": 0}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (RIGHT, 1.0),
        ("\n<think>a\nb</think> \n <answer>18</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("ab <think>x</think>c<answer>18</answer>d", 0.96),
        ("<think>x</think><answer>18</answer><answer>18</answer>", 1 - 0.19),
        ("<think>x</think><answer>18</answer>" + "y" * 99, 0.01),
        ("<think>x</think><answer>18</answer>" + "y" * 101, 0.0),
        ("<answer>18</answer><think>x</think>", 0.0),
        ("<think>x<answer>18</answer></think>", 0.0),
        ("<think>x</think><answer>18", 0.0),
        ("x</think><answer>18</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_takes_a_hundredth_for_each_character_outside(text, score):
    assert score_one("format", text) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "count"),
    [(RIGHT, 4), ("<think>" + RIGHT, 3), (RIGHT + RIGHT, 0), ("</answer></think>", 2), ("think answer", 0)],
)
def test_tags_that_stand_exactly_once_are_counted(text, count):
    assert score_one("tag_count", text) == count


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_completions_earn_next_to_nothing(text):
    scores = make_scorer(["correct", "format", "tag_count"]).score([PROBLEM], [[text, RIGHT]])
    assert scores.valid_PN.all()
    assert scores.rewards_PN[0, 0] <= np.float32(0.025)
    assert scores.rewards_PN[0, 1] == pytest.approx(1.2)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf"), 10**400, 1e39, np.float32("nan")])
def test_a_score_that_is_no_finite_number_makes_the_rollout_invalid_and_is_counted(value):
    scores = scorer_of(lambda problem, completion: value if completion == "bad" else 0.5).score([PROBLEM], [["bad", "good"]])
    assert scores.valid_PN.tolist() == [[False, True]]
    assert scores.rewards_PN.tolist() == [[0.0, 0.5]]
    assert np.isnan(scores.parts["own:part"]).tolist() == [[True, False]]
    assert scores.unscored == {"own:part": 1}


@pytest.mark.parametrize("value", [True, 3, 0.5, np.float32(0.5), np.int64(3), np.bool_(True)])
def test_every_kind_of_number_is_a_score(value):
    assert scorer_of(lambda problem, completion: value).score([PROBLEM], [["x"]]).rewards_PN.tolist() == [[float(value)]]


@pytest.mark.parametrize("value", ["1", [1.0], [1.0, 0.0], np.ones(1), 1j])
def test_a_score_of_another_type_is_an_error_that_names_the_reward(value):
    with pytest.raises(TypeError, match=rf"reward own:part returned {type(value).__name__} for problem p/0"):
        scorer_of(lambda problem, completion: value).score([PROBLEM], [["x"]])


def test_a_failing_function_costs_its_rollouts_and_logs_one_traceback(caplog):
    def fails(problem, completion):
        return 1 / (len(completion) - 3)

    scorer = scorer_of(fails)
    with caplog.at_level(logging.WARNING):
        first = scorer.score([PROBLEM], [["abc", "abcd", "xyz"]])
        second = scorer.score([PROBLEM], [["abc"]])
    assert first.valid_PN.tolist() == [[False, True, False]]
    assert first.unscored == {"own:part": 2}
    assert second.valid_PN.tolist() == [[False]]
    [record] = caplog.records
    assert "own:part" in record.message
    assert "ZeroDivisionError" in caplog.text


def test_one_invalid_part_invalidates_the_rollout_even_at_weight_zero():
    scorer = Scorer({"correct": REWARDS["correct"], "own:part": Reward(lambda problem, completion: None, 0.0)})
    scores = scorer.score([PROBLEM], [[RIGHT]])
    assert not scores.valid_PN.any()
    assert scores.parts["correct"].tolist() == [[1.0]]


def test_weights_are_those_configured():
    scores = make_scorer(["correct", "tag_count"], [2.0, -1.0]).score([PROBLEM], [[RIGHT]])
    assert scores.rewards_PN.tolist() == [[-2.0]]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0], []])
def test_another_number_of_weights_is_refused(weights):
    with pytest.raises(ValueError, match=rf"reward\.weights=.* has {len(weights)} values; reward\.functions has 2"):
        make_scorer(["correct", "format"], weights)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(weight):
    with pytest.raises(ValueError, match=r"reward\.weights=.* must be finite"):
        make_scorer(["correct"], [weight])


@pytest.mark.parametrize("functions", [[], ["correct", "correct"]])
def test_no_reward_and_a_repeated_reward_are_refused(functions):
    with pytest.raises(ValueError, match=r"reward\.functions=.* at least one reward, and each once"):
        make_scorer(functions)


@pytest.mark.parametrize("name", ["corect", "correct:", ":correct"])
def test_an_unknown_name_is_refused_with_the_nearest_and_all_names(name):
    with pytest.raises(ValueError, match=r"did you mean 'correct'. valid: correct, format, tag_count, or module:function"):
        make_scorer([name])


@pytest.mark.parametrize(("problems", "texts"), [(1, [["a"], ["b"]]), (2, [["a"], ["b", "c"]]), (1, [])])
def test_groups_that_do_not_fit_the_problems_are_refused(problems, texts):
    with pytest.raises(ValueError, match=f"{problems} problems with groups of"):
        make_scorer(["correct"]).score([PROBLEM] * problems, texts)


def test_an_own_function_is_found_in_the_working_directory(own_module):
    own_module(
        "own_reward_a", "def short(problem, completion):\n    return -len(completion) if problem.answer == '18' else None\n"
    )
    scores = make_scorer(["correct", "own_reward_a:short"]).score([PROBLEM], [[RIGHT, "abc"]])
    assert scores.parts["own_reward_a:short"].tolist() == [[-len(RIGHT), -3]]
    assert scores.rewards_PN.tolist() == [[1 - len(RIGHT), -3]]


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        (None, "f", "module 'own_reward_b' cannot be imported .ModuleNotFoundError"),
        (
            "import no_such_module",
            "f",
            "module 'own_reward_b' cannot be imported .ModuleNotFoundError: No module named 'no_such_mod",
        ),
        ("1 / 0", "f", "module 'own_reward_b' cannot be imported .ZeroDivisionError"),
        ("def g(problem, completion): return 1", "f", "module 'own_reward_b' has no function 'f'"),
        ("f = 3", "f", "module 'own_reward_b' has something that is no function named 'f'"),
        ("def f(completion): return 1", "f", "own_reward_b:f takes .completion.; expected .problem, completion"),
    ],
)
def test_an_own_function_that_cannot_be_used_is_refused_by_name(own_module, source, function, message):
    if source is not None:
        own_module("own_reward_b", source)
    with pytest.raises(ValueError, match=r"reward\.functions: " + message):
        make_scorer([f"own_reward_b:{function}"])
