import json

import pytest

from pods_jax.rewards.agreement import main

ROWS = [
    ("gsm8k", "18", "<answer>$18</answer>", True),
    ("gsm8k", "18", "it is 18", True),
    ("gsm8k", "5", "<answer>-5</answer>", True),
    ("gsm8k", "5", "<answer>-5</answer>", True),
    ("math500", r"\left( 3, \frac{\pi}{2} \right)", "<answer>(3, π/2)</answer>", False),
]


@pytest.fixture
def graded(tmp_path):
    keys = ("dataset", "answer", "completion", "authors_correct")
    path = tmp_path / "graded.jsonl"
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in ROWS))
    return str(path)


def test_agreement_and_disagreements_by_answer(graded, capsys):
    assert main([graded, "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "gsm8k          2 of 4 agree (50.0%)" in out
    assert "math500        0 of 1 agree (0.0%)" in out
    assert "   2  ours wrong, theirs right  gsm8k  gold 5  answer: -5" in out
    assert r"   1  ours right, theirs wrong  math500" in out
    assert "0 could not be judged" in out


def test_sources_and_data_sets_can_be_chosen(graded, capsys):
    assert main([graded, "--workers", "1", "--sources", "answer", "--datasets", "gsm8k"]) == 0
    out = capsys.readouterr().out
    assert "gsm8k          1 of 4 agree (25.0%)" in out
    assert "no answer: " in out
    assert "math500" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sources", "box"], "--sources='box' is unknown; did you mean 'boxed'? valid: answer, boxed, last_number"),
        (["--datasets", "gsm"], "--datasets='gsm' is unknown; did you mean 'gsm8k'? valid: gsm8k, amc23, math500"),
    ],
)
def test_unknown_names_are_refused(graded, capsys, options, message):
    assert main([graded, *options]) == 2
    assert message in capsys.readouterr().err
