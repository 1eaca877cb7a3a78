"""A run log, steps to log in it, and its files read back."""

import json
import struct
from dataclasses import replace

import numpy as np
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from pods_jax.run.log import RunLog
from pods_jax.run.rollouts import RolloutRecords

P, N, M = 3, 5, 2


def records(seed=0, **changes):
    random = np.random.default_rng(seed)
    correct_PN = random.integers(0, 2, (P, N)).astype(np.float32)
    made = RolloutRecords(
        prompt_id_P=[f"train/{p}" for p in range(P)],
        prompt_P=[f"question {p}" for p in range(P)],
        answer_P=[str(p) for p in range(P)],
        texts_PN=[[f"text {p} {n}" for n in range(N)] for p in range(P)],
        rewards_PN=correct_PN + np.float32(0.1),
        parts={"correct": correct_PN, "format": np.full((P, N), 0.1, np.float32)},
        valid_PN=np.ones((P, N), bool),
        length_PN=random.integers(1, 9, (P, N)),
        finished_PN=np.ones((P, N), bool),
        index_PM=np.stack([random.permutation(N)[:M] for _ in range(P)]),
        advantage_PM=random.normal(size=(P, M)).astype(np.float32),
    )
    return replace(made, **changes)


def open_log(folder, **options):
    return RunLog(folder, **{"total_steps": 6, "progress": False, "texts_per_step": -1} | options)


def log_steps(log, steps):
    for step in steps:
        log.log_step(step, {"reward/mean": step / 8}, wall_seconds=2.0 * step, rollouts=records(step) if step else None)


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def events_of(path):
    data, at = path.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield Event.FromString(data[at + 12 : at + 12 + size])
        at += size + 16
