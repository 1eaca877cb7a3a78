import logging
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_jax.rewards.scoring import Scorer, make_scorer
from pods_jax.rewards.table import REWARDS, Reward
from pods_jax.types import Problem

PROBLEM = Problem("p/0", (), "18", "made_up")
CHOICE = Problem("p/1", (), "B", "made_up", "choice", choices=("17", "18"))
MATH = Problem("p/2", (), "p - q", "made_up", "math")
RIGHT = "<think>9*2</think><answer>18</answer>"
WRONG = "<think>9*2</think><answer>17</answer>"
HOSTILE = [
    "9" * 1_000_000,
    "<think>" * 100_000 + "<answer>" * 100_000,
    "\x00",
    "\ud800<answer>\udfff",
    "<think></think>" * 100_000,
]


TEXT_REWARDS = sorted(name for name, reward in REWARDS.items() if reward.reads != "length")


def score_one(name, text):
    return REWARDS[name].function(CHOICE if name == "choice" else PROBLEM, text)


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


@pytest.fixture(autouse=True)
def closed_scorers(monkeypatch):
    """Every scorer that a test makes is closed after it."""
    made = []
    original = Scorer.__init__

    def remembered(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Scorer, "__init__", remembered)
    yield
    for scorer in made:
        scorer.close()


@pytest.mark.parametrize("name", TEXT_REWARDS)
class TestEveryReward:
    def test_right_form_and_answer_earn_more_than_nothing_at_all(self, name):
        right, nothing = score_one(name, RIGHT), score_one(name, "")
        assert isinstance(right, float)
        assert right > 0
        assert nothing == 0

    def test_any_text_scores_within_bounds(self, name):
        @given(
            pieces=st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "18", " ", "x", "\ud800", "\x00"]))
        )
        def check(pieces):
            score = score_one(name, "".join(pieces))
            assert isinstance(score, float)
            assert 0 <= score <= (4 if name == "tag_count" else 1)

        check()

    def test_the_default_weight_is_the_papers(self, name):
        assert make_scorer([name]).rewards[name].weight == {"format": 0.1, "tag_count": 0.025}.get(name, 1.0)


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


@pytest.mark.parametrize(
    ("opened", "text", "score", "count"),
    [
        ("<think>\n", "9*2</think><answer>18</answer>", 1.0, 4),
        ("<think>\n", RIGHT, 0.93, 3),  # a second tag is not paid
        ("<think>\n\n</think>\n\n", "<answer>18</answer>", 1.0, 4),
        ("<think>\n\n</think>\n\n", RIGHT, 0.82, 2),
        ("<think>\n", "9*2 <answer>18</answer>", 0.0, 3),
        ("", RIGHT, 1.0, 4),
    ],
)
def test_tags_that_the_prompt_opened_count_as_the_completions(opened, text, score, count):
    scores = make_scorer(["format", "tag_count"]).score([replace(PROBLEM, opened=opened)], [[text]])
    assert scores.parts["format"][0, 0] == pytest.approx(score, abs=1e-6)
    assert scores.parts["tag_count"][0, 0] == count


@pytest.mark.parametrize(
    "text",
    [
        "<think><answer>17</answer></think><answer>18</answer>",
        "<think>x</think><answer>18</answer><answer>17</answer>",
        "<think>x</think><answer>18</answer>\nUser: 17?\n<think>x</think><answer>17</answer>",
        "<think>x<think>y</think><answer>17 <answer>18</answer>",
    ],
)
def test_the_form_is_paid_for_the_block_that_is_judged(text):
    assert score_one("correct", text) == 1.0
    score = score_one("format", text)
    assert isinstance(score, float)
    assert 0 < score <= 1
    assert score_one("format", text.partition("18</answer>")[0] + "18") == 0.0


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_completions_earn_next_to_nothing(text):
    scores = make_scorer(["correct", "format", "tag_count"]).score([PROBLEM], [[text, RIGHT]])
    assert scores.valid_PN.all()
    assert scores.rewards_PN[0, 0] <= np.float32(0.025)
    assert scores.rewards_PN[0, 1] == pytest.approx(1.2)


def fail(problem, completion):
    raise RuntimeError("lost")


@pytest.mark.parametrize("function", [lambda problem, completion: None, lambda problem, completion: float("nan"), fail])
def test_a_reward_of_weight_0_measures_alone_and_its_lost_scores_are_counted(function):
    rewards = {"right": REWARDS["correct"], "own:part": Reward(function, 0.0)}
    scores = Scorer(rewards).score([PROBLEM], [[RIGHT, WRONG]])
    assert scores.valid_PN.tolist() == [[True, True]]
    assert scores.rewards_PN.tolist() == [[1.0, 0.0]]
    assert np.isnan(scores.parts["own:part"]).all()
    assert scores.unscored == {"right": 0, "own:part": 2}
    assert scorer_of(function, 0.0).score([PROBLEM], [[RIGHT]]).valid_PN.all()


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


def test_one_invalid_part_invalidates_the_rollout_however_little_it_weighs():
    scorer = Scorer({"correct": REWARDS["correct"], "own:part": Reward(lambda problem, completion: None, 1e-9)})
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
    valid = "correct, choice, format, tag_count, length, module:function"
    with pytest.raises(ValueError, match=rf"^reward\.functions='{name}' .*did you mean 'correct'. valid: {valid}$"):
        make_scorer([name])


def test_a_share_of_no_groups_has_scores_of_no_groups():
    with make_scorer(["correct", "tag_count"]) as scorer:
        scores = scorer.score([], [], length_PN=np.zeros((0, 4), int))
    assert {part.shape for part in (scores.rewards_PN, scores.valid_PN, *scores.parts.values())} == {(0, 4)}
    assert set(scores.parts) == {"correct", "tag_count"}


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


OWN = """
import os, time

def slow(problem, completion):
    if completion == "slow":
        time.sleep(60)
    if completion == "dies":
        os._exit(1)
    if completion == "raises":
        raise ValueError("no score")
    return {"none": None, "text": "1"}.get(completion, len(problem.choices))

def away(problem, completion):
    return os.getpid()
"""


def test_an_own_function_runs_in_another_process_under_the_limits(own_module, caplog):
    own_module("own_reward_c", OWN)
    scorer = make_scorer(["own_reward_c:slow"], time_limit=1.0, workers=2)
    with caplog.at_level(logging.WARNING):
        scores = scorer.score([CHOICE], [["a", "slow", "dies", "raises", "none", "b"]])
    assert scores.valid_PN.tolist() == [[True, False, False, False, False, True]]
    assert scores.rewards_PN.tolist() == [[2, 0, 0, 0, 0, 2]]
    assert scores.unscored == {"own_reward_c:slow": 4}
    assert scores.faults == {"time": 1, "memory": 0, "crash": 1, "error": 1}
    assert sorted(record.getMessage().partition("\n")[0] for record in caplog.records) == [
        f"reward own_reward_c:slow failed on problem p/1 ({fault}); the rollout is invalid"
        for fault in ("crash", "error", "time")
    ]
    assert "ValueError: no score" in caplog.text
    assert make_scorer(["own_reward_c:away"], workers=1).score([PROBLEM], [["x"]]).rewards_PN[0, 0] != os.getpid()


def test_an_own_function_of_another_type_is_an_error_that_names_it(own_module):
    own_module("own_reward_d", OWN)
    with pytest.raises(TypeError, match="reward own_reward_d:slow returned str for problem p/1"):
        make_scorer(["own_reward_d:slow"], workers=1).score([CHOICE], [["text"]])


def test_mathematics_is_verified_in_another_process():
    scorer = make_scorer(["correct", "format"], workers=1)
    texts = [[f"<think></think><answer>{answer}</answer>" for answer in ("p - q", "-q + p", "q - p")]]
    scores = scorer.score([MATH], texts)
    assert scores.parts["correct"].tolist() == [[1, 1, 0]]
    assert scorer.correct([MATH], texts).tolist() == [[True, True, False]]


@pytest.mark.parametrize("kind", ["exact", "number", "choice", "equation", "text"])
def test_no_process_starts_for_what_text_alone_decides(kind):
    scorer = make_scorer(["correct", "format", "tag_count", "choice"])
    gold = {"choice": "B", "equation": "2H2 + O2 = 2H2O"}.get(kind, "18")
    texts = [[f"<answer>{answer}</answer>" for answer in (gold, "17", r"\frac{1}{2}", "H2 = 2H", "x" * 5_000)]]
    assert scorer.correct([Problem("p/3", (), gold, "made_up", kind)], texts).tolist() == [[True, False, False, False, False]]
    scorer.score([Problem("p/3", (), gold, "made_up", kind)], texts)
    assert scorer.pool._workers == []


def test_accuracy_is_the_reward_for_the_right_answer():
    scorer = make_scorer(["correct"], sources=["boxed"])
    problems, texts = [PROBLEM, CHOICE], [[RIGHT, r"\boxed{18}"], [r"\boxed{18}", r"\boxed{A}"]]
    assert scorer.correct(problems, texts).tolist() == [[False, True], [True, False]]
    assert scorer.score(problems, texts).parts["correct"].tolist() == [[0, 1], [1, 0]]
    assert scorer.correct([], []).shape == (0, 0)


def test_an_unreadable_gold_answer_is_unscorable_not_wrong():
    scores = make_scorer(["correct"]).score([Problem("p/4", (), "?", "made_up", "number")], [[RIGHT]])
    assert not scores.valid_PN.any()
    assert scores.unscored == {"correct": 1}


def test_the_choice_reward_reads_the_letter_whatever_the_kind():
    problem = Problem("p/5", (), "C", "made_up")
    scores = make_scorer(["choice"]).score([problem], [["<answer>(C) CCO</answer>", "<answer>A</answer>", "C"]])
    assert scores.parts["choice"].tolist() == [[1, 0, 0]]
    assert not make_scorer(["choice"]).score([PROBLEM], [[RIGHT]]).valid_PN.any()


def test_the_length_reward_reads_the_number_of_tokens():
    scorer = make_scorer(["format", "length"], max_completion_length=100, length_margin=0.5)
    scores = scorer.score([PROBLEM], [["", "", ""]], length_PN=np.array([[50, 75, 100]]))
    assert scores.parts["length"].tolist() == [[0, -0.5, -1]]
    assert scores.rewards_PN.tolist() == [[0, -0.5, -1]]
    with pytest.raises(ValueError, match=r"rewards format, length of \(1, 1\) completions cannot be computed from no lengths"):
        scorer.score([PROBLEM], [[""]])
    with pytest.raises(ValueError, match=r"from lengths of shape \(1, 2\)"):
        scorer.score([PROBLEM], [[""]], length_PN=np.array([[1, 2]]))


@pytest.mark.parametrize("options", [{}, {"max_completion_length": 0}, {"max_completion_length": 9, "length_margin": 0.0}])
def test_a_length_reward_without_a_limit_is_refused(options):
    with pytest.raises(ValueError, match="reward length needs a longest completion"):
        make_scorer(["length"], **options)


def test_sources_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"verify\.sources='box' .*did you mean 'boxed'. valid: answer, boxed, last_number"):
        make_scorer(["correct"], sources=["box"])


def test_importing_the_rewards_starts_neither_jax_nor_algebra():
    code = "import sys, pods_jax.rewards.agreement; sys.exit(any(m in sys.modules for m in ('jax', 'sympy', 'math_verify')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


TOWER = "9^{9^{9^{9}}}"
HOSTILE_MATHEMATICS = {
    "power tower": TOWER,
    "factorial": "99999999!",
    "nested fractions": r"\frac{1}{" * 150 + "2" + "}" * 150,
    "braces": "{" * 450 + "18" + "}" * 450,
    "many braces": "{" * 100_000 + "18" + "}" * 100_000,
    "long number": "9" * 1_000_000,
    "long exponent": "2^{" + "9" * 900 + "}",
    "code": "__import__('os').system('exit')",
    "null bytes": "18\x00",
    "surrogates": "\ud80018\udfff",
    "regular expression": "(" + "a" * 400 + "!" + " " * 400,
    "words": "is " * 300,
}


def test_hostile_mathematics_scores_nothing_and_costs_at_most_its_limit():
    scorer = make_scorer(["correct"], time_limit=1.0, memory_limit_mb=512, workers=2)
    problem = Problem("p/6", (), r"\sqrt{18}", "made_up", "math")
    scorer.score([problem], [[r"<answer>3\sqrt{2}</answer>", r"<answer>\sqrt{17}</answer>"]])  # the processes run
    texts = [f"<answer>{answer}</answer>" for answer in HOSTILE_MATHEMATICS.values()]
    start = time.monotonic()
    scores = scorer.score(
        [problem], [[*texts, *(f"<answer>{answer}" for answer in HOSTILE_MATHEMATICS.values()), r"<answer>3\sqrt2</answer>"]]
    )
    assert time.monotonic() - start < len(texts)
    assert scores.rewards_PN[0, -1] == 1
    assert not scores.rewards_PN[0, :-1].any()
    assert scores.unscored["correct"] == sum(scores.faults.values()) == (~scores.valid_PN).sum()
