import json
import sys

import pytest

from pods_jax.rewards.answers import judge
from pods_jax.rewards.scoring import make_scorer
from pods_jax.types import Problem

FAKE = """
class DataSet:
    def __init__(self, wanted):
        self.wanted = wanted

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.01 if answer == self.wanted else 0.0

def create_dataset(name, seed, size, wanted):
    assert name == "made_up"
    return DataSet(wanted)
"""


@pytest.fixture
def gym(tmp_path, monkeypatch):
    (tmp_path / "reasoning_gym.py").write_text(FAKE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def test_the_data_sets_own_scorer_scores_in_a_worker(gym):
    extra = json.dumps({"dataset": "made_up", "options": {"wanted": "almost"}, "entry": {"answer": "yes"}})
    problem = Problem("p/0", (), "yes", "reasoning_gym:made_up", "reasoning_gym", extra=extra)
    texts = [[f"<answer>{answer}</answer>" for answer in ("yes", "almost", "no")] + ["yes"]]
    with make_scorer(["correct"], workers=1) as scorer:
        scores = scorer.score([problem], texts)
        assert scorer.correct([problem], texts).tolist() == [[True, False, False, False]]
    assert scores.parts["correct"][0].tolist() == pytest.approx([1, 0.01, 0, 0])
    assert judge(problem, "yes") is False
