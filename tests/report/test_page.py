import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import plotly.graph_objects
import pytest
import yaml

from pods_jax.report.__main__ import main
from pods_jax.report.page import chosen_steps, write_report
from pods_jax.report.reasons import reasons
from pods_jax.run.log import RunLog
from pods_jax.run.rollouts import RolloutRecords

P, N, M = 2, 32, 8
CONFIG = {
    "run": {"name": "tally", "steps": 60, "seed": 0},
    "data": {"task": "arithmetic", "prompts_per_step": P},
    "rollout": {"n": N, "temperature": 1.0},
    "selection": {"rule": "max_variance", "m": M, "ties": "random"},
    "reward": {"functions": ["correct", "format", "tag_count"], "weights": None},
}


def max_variance(reward_N, random):
    order = random.permutation(N)
    order = order[np.argsort(-reward_N[order], kind="stable")]
    splits = [np.concatenate([order[:k], order[N - (M - k) :]]) for k in range(M + 1)]
    return max(splits, key=lambda index_M: reward_N[index_M].var())


def tally(random):
    """A problem, and its running totals."""
    operands, signs = random.integers(1, 9, 6), random.choice(["+", "-", "*"], 5)
    totals = [int(operands[0])]
    for sign, operand in zip(signs, operands[1:], strict=True):
        totals.append({"+": totals[-1] + operand, "-": totals[-1] - operand, "*": totals[-1] * operand}[sign] % 10)
    question = str(operands[0]) + "".join(f"{sign}{operand}" for sign, operand in zip(signs, operands[1:], strict=True)) + "="
    return question, totals


def completion(totals, right, random):
    shown = totals if right else [*totals[:3], *random.integers(0, 10, len(totals) - 3)]
    return f"<think>{' '.join(map(str, shown))}</think><answer>{''.join(map(str, shown[-3:]))}</answer>"


def one_step(step, random):
    skill = 0.3 + 0.6 * (1 - np.exp(-step / 20))
    correct_PN = (random.random((P, N)) < np.clip(skill + random.normal(0, 0.2, (P, 1)), 0, 1)).astype(np.float32)
    finished_PN = random.random((P, N)) > 0.1 * np.exp(-step / 15)
    format_PN = np.where(finished_PN, 1.0, random.random((P, N)).round(2)).astype(np.float32)
    correct_PN *= finished_PN
    parts = {"correct": correct_PN, "format": format_PN, "tag_count": finished_PN.astype(np.float32)}
    rewards_PN = correct_PN + np.float32(0.1) * format_PN + np.float32(0.1) * parts["tag_count"]
    problems = [tally(random) for _ in range(P)]
    index_PM = np.stack([max_variance(reward_N, random) for reward_N in rewards_PN])
    kept_PM = np.take_along_axis(rewards_PN, index_PM, 1)
    advantage_PM = (kept_PM - kept_PM.mean(1, keepdims=True)) / (kept_PM.std(1, ddof=1, keepdims=True) + 1e-4)
    texts_PN = [
        [completion(totals, right, random) for right in row] for (_, totals), row in zip(problems, correct_PN, strict=True)
    ]
    rollouts = RolloutRecords(
        prompt_id_P=[f"arithmetic/train/{random.integers(20_000)}" for _ in range(P)],
        prompt_P=[question for question, _ in problems],
        answer_P=["".join(map(str, totals[-3:])) for _, totals in problems],
        texts_PN=[[t if f else t[:20] for t, f in zip(*pair, strict=True)] for pair in zip(texts_PN, finished_PN, strict=True)],
        rewards_PN=rewards_PN,
        parts=parts,
        valid_PN=np.ones((P, N), bool),
        length_PN=np.where(finished_PN, random.integers(18, 24, (P, N)), 32),
        finished_PN=finished_PN,
        index_PM=index_PM,
        advantage_PM=advantage_PM,
    )
    metrics = {
        "reward/mean": rewards_PN.mean(),
        "reward/std": rewards_PN.std(),
        **{f"reward/{name}/mean": part_PN.mean() for name, part_PN in parts.items()},
        "selection/variance_all": rewards_PN.var(1).mean(),
        "selection/variance_kept": kept_PM.var(1).mean(),
        "selection/no_signal_fraction": (np.ptp(kept_PM, axis=1) == 0).mean(),
        "completions/mean_length": rollouts.length_PN.mean(),
        "completions/truncated_fraction": 1 - finished_PN.mean(),
        "policy/entropy": 0.9 * np.exp(-step / 30) + 0.05 * random.random(),
        "policy/clip_fraction": 0.02 * random.random(),
        "policy/grad_norm": 0.4 + 0.2 * random.random(),
        "policy/logp_gap": 1e-6 * random.random(),
        "time/rollout_seconds": 0.31 + 0.03 * random.random() + (7.5 if step == 1 else 0),
        "time/reward_seconds": 0.02,
        "time/update_seconds": 0.22 + 0.02 * random.random() + (9.0 if step == 1 else 0),
    }
    return metrics, rollouts


def write_run(folder, steps, *, every=10, change=lambda rollouts: rollouts, config=CONFIG):
    random = np.random.default_rng(0)
    clock = 2.0
    with RunLog(folder, total_steps=60, texts_per_step=48, progress=False) as log:
        if every:
            log.log_step(0, {"eval/accuracy": 0.375}, wall_seconds=clock)
        for step in range(1, steps + 1):
            metrics, rollouts = one_step(step, random)
            clock += sum(value for name, value in metrics.items() if name.startswith("time/")) + 0.05
            if every and step % every == 0:
                clock += 0.4
                metrics["eval/accuracy"] = 0.375 + 0.5 * (1 - np.exp(-step / 20))
            log.log_step(step, metrics, wall_seconds=clock, rollouts=change(rollouts))
    if config:
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder


def page_of(folder):
    """The page without plotly's own source."""
    page = write_report(folder).read_text(encoding="utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    return page.replace(max(scripts, key=len), "")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "tally", 60)


@pytest.fixture(scope="module")
def page(run):
    return page_of(run)


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


def drawn(page):
    """The charts as the page's own script reads them."""
    source = page[page.index("const charts = [") :]
    return json.loads(re.sub(r",\]$", "]", source[len("const charts = ") : source.index(";\n")]))


def test_page_loads_nothing_from_anywhere(run):
    page = write_report(run).read_text(encoding="utf-8")
    tags = Tags(page).found
    assert not [
        (tag, attrs) for tag, attrs in tags if {"src", "href", "srcset", "action"} & attrs.keys() or tag in {"link", "iframe"}
    ]
    assert not re.search(r"url\(|@import", page[: page.index("</style>")])
    assert page.count("default-src 'none'") == 1
    assert page.count("plotly.js v") == 1


def test_every_tag_of_the_page_is_closed(page):
    assert Tags(page).open == []


def test_headline_shows_accuracy_before_and_after_and_the_counts(page):
    for text in ("37.5% → 85.0%", "at step 60", "of 60 planned", "960", "of 3,840 generated"):
        assert text in page


def test_every_chart_has_data_that_plotly_accepts_on_both_axes(page):
    charts = drawn(page)
    assert len(charts) == len(re.findall('class="plot"', page)) == 12
    for chart in charts:
        plotly.graph_objects.Figure(data=chart["traces"], layout=chart["layout"])
        for trace in chart["traces"]:
            assert len(trace["y"]) == len(trace["meta"]["step"]) == len(trace["meta"]["wall"]) > 0
            assert all(a < b for a, b in pairwise(trace["meta"]["wall"]))


def test_time_split_adds_up_to_the_wall_clock_and_the_axis_is_cut_above_compilation(run, page):
    traces = {trace["name"]: trace["y"] for chart in drawn(page) for trace in chart["traces"] if trace["type"] == "bar"}
    assert list(traces) == ["rollout", "reward", "update", "other"]
    assert sum(map(sum, traces.values())) == pytest.approx(
        json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["wall_seconds"] - 2.0
    )
    assert "The axis is cut: step 1 took" in page


def test_steps_shown_are_the_first_the_last_and_some_between(page):
    assert re.findall(r'data-step="(\d+)"', page) == ["1", "13", "25", "36", "48", "60"]


@pytest.mark.parametrize(("count", "chosen"), [(0, []), (1, [1]), (3, [1, 2, 3]), (4, [1, 3, 4]), (9, [1, 5, 9])])
def test_chosen_steps_keep_both_ends(count, chosen):
    assert chosen_steps(range(1, count + 1), 3) == chosen


def test_rollouts_are_sorted_by_reward_with_the_kept_marked(page):
    first = page[page.index('data-step="1"') : page.index('data-step="13"')]
    group = first[: first.index("</article>")]
    ranks = [int(rank) for rank in re.findall(r'<td class="n">(\d+)</td><td class="why">', group)]
    assert len(ranks) == N
    assert ranks == sorted(ranks)
    assert group.count('<tr class="kept">') == group.count('<i class="kept"') == M
    assert "by max_variance" in group
    assert "not recorded" not in group
    assert first.count("not recorded") == N - 16


def test_completion_prompt_and_name_of_a_reward_cannot_inject_markup(tmp_path):
    attack = "</td></script><script>alert(1)</script><img src=x onerror=alert(1)>"

    def poison(rollouts):
        return RolloutRecords(
            **vars(rollouts)
            | {
                "texts_PN": [[attack] * N] * P,
                "prompt_P": [attack] * P,
                "answer_P": [attack] * P,
                "prompt_id_P": [attack] * P,
                "parts": {attack: rollouts.rewards_PN},
            }
        )

    folder = write_run(tmp_path / "run", 2, change=poison, config={"run": {"name": attack}, attack: {attack: attack}})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "wall_seconds": 30.0, f"reward/{attack}/mean": 1.0}) + "\n")
    page = page_of(folder)
    tags = [tag for tag, _ in Tags(page).found]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert "&lt;script&gt;alert(1)" in page
    assert drawn(page)[2]["traces"][0]["name"] == attack


def test_a_run_of_one_step_without_evaluation_or_config_gives_a_page(tmp_path):
    page = page_of(write_run(tmp_path / "young", 1, every=0, config=None))
    assert "<h1>young</h1>" in page
    assert "Held-out accuracy" not in page
    assert "no config.yaml" in page
    assert '<tr class="kept">' in page


def test_a_run_that_has_only_evaluated_the_start_gives_a_page(tmp_path):
    page = page_of(write_run(tmp_path / "new", 0))
    assert "37.5% → 37.5%" in page
    assert "No rollouts are recorded" in page


def test_torn_last_lines_are_left_out(tmp_path):
    folder = write_run(tmp_path / "torn", 3)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-9])
    page = page_of(folder)
    assert re.findall(r'data-step="(\d+)"', page) == ["1", "2"]


def test_metrics_that_were_not_finite_leave_gaps(tmp_path):
    folder = tmp_path / "gaps"
    with RunLog(folder, total_steps=3, progress=False) as log:
        for step in (1, 2, 3):
            value = float("nan") if step == 2 else 0.5
            log.log_step(step, {"reward/mean": value, "policy/kl": float("nan")}, wall_seconds=step)
    charts = drawn(page_of(folder))
    assert [trace["meta"]["step"] for chart in charts for trace in chart["traces"]] == [[1, 3]]


def test_a_group_without_signal_says_so(tmp_path):
    def flat(rollouts):
        return RolloutRecords(**vars(rollouts) | {"rewards_PN": np.ones((P, N)), "advantage_PM": np.zeros((P, M))})

    page = page_of(write_run(tmp_path / "flat", 1, change=flat))
    assert page.count("No signal: the kept rewards are all equal") == P
    assert "all rewards are equal: no choice has variance" in page


def test_unscored_rollouts_come_last_with_their_reason(tmp_path):
    def unscored(rollouts):
        valid_PN = np.ones((P, N), bool)
        valid_PN[:, 0] = False
        return RolloutRecords(
            **vars(rollouts) | {"valid_PN": valid_PN, "index_PM": np.array([[1, 2, -1]] * P), "advantage_PM": np.zeros((P, 3))}
        )

    page = page_of(write_run(tmp_path / "unscored", 1, change=unscored))
    group = page[: page.index("</article>")]
    assert re.findall(r'<td class="why">(.*?)</td>', group)[-1] == "dropped: no score"
    assert "31 scored, 2 kept" in group


def group(totals, kept):
    ranks = [
        1 + sum(other is not None and other > total for other in totals) if total is not None else None for total in totals
    ]
    rows = zip(totals, ranks, strict=True)
    return [
        {"total": total, "rank": rank, "valid": total is not None, "kept": i in kept} for i, (total, rank) in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("rule", "totals", "kept", "said"),
    [
        (
            "max_variance",
            [1.0, 0.9, 0.5, 0.2, 0.1, None],
            {0, 1, 4},
            [
                "kept: rank 1 of 5, among the 2 highest",
                "kept: rank 2 of 5, among the 2 highest",
                "dropped: rank 3 of 5, in the middle",
                "dropped: rank 4 of 5, in the middle",
                "kept: rank 5 of 5, the lowest",
                "dropped: no score",
            ],
        ),
        (
            "max_variance",
            [1, 1, 0, 0, 0],
            {0, 3},
            [
                "kept: rank 1 of 5 (shared by 2), the highest",
                "dropped: rank 1 of 5 (shared by 2), equal to kept ones, not drawn",
                "dropped: rank 3 of 5 (shared by 3), equal to kept ones, not drawn",
                "kept: rank 3 of 5 (shared by 3), the lowest",
                "dropped: rank 3 of 5 (shared by 3), equal to kept ones, not drawn",
            ],
        ),
        (
            "max_variance",
            [1, 0],
            {0, 1},
            ["kept: rank 1 of 2, all scored rollouts are needed", "kept: rank 2 of 2, all scored rollouts are needed"],
        ),
        (
            "max_variance",
            [1, 1],
            {0},
            [
                "kept: rank 1 of 2 (shared by 2), all rewards are equal: no choice has variance",
                "dropped: rank 1 of 2 (shared by 2), all rewards are equal: no choice has variance",
            ],
        ),
        ("random", [1, 0], {1}, ["dropped: rank 1 of 2, not drawn", "kept: rank 2 of 2, drawn at random"]),
        (
            "percentile",
            [3, 2, 1],
            {0, 2},
            [
                "kept: rank 1 of 3, one of 2 evenly spaced ranks",
                "dropped: rank 2 of 3, between the sampled ranks",
                "kept: rank 3 of 3, one of 2 evenly spaced ranks",
            ],
        ),
        (
            "max_reward",
            [3, 2, 2, 1],
            {0, 1},
            [
                "kept: rank 1 of 4, among the 2 highest",
                "kept: rank 2 of 4 (shared by 2), among the 2 highest",
                "dropped: rank 2 of 4 (shared by 2), equal to the last kept, not drawn",
                "dropped: rank 4 of 4, below the kept",
            ],
        ),
        ("all", [1, None], {0}, ["kept: rank 1 of 1, every scored rollout is kept", "dropped: no score"]),
        ("own", [1, 0], {0}, ["kept: rank 1 of 2", "dropped: rank 2 of 2"]),
        ("max_variance", [None, None], set(), ["dropped: no score", "dropped: no score"]),
    ],
)
def test_the_reason_names_the_rule_s_own_ground(rule, totals, kept, said):
    assert reasons(group(totals, kept), rule) == said


def test_missing_and_empty_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"not a run folder: it has no metrics\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0')
    with pytest.raises(ValueError, match="no step has been logged"):
        write_report(tmp_path)


def test_command_line_writes_where_asked_and_explains_what_is_missing(tmp_path, capsys):
    folder = write_run(tmp_path / "run", 1)
    main([str(folder), "--out", str(tmp_path / "page.html")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1_000_000
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "absent")])
    assert "absent does not exist" in capsys.readouterr().err
