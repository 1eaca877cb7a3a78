"""Places of data that tests read where it is there: PODS_DATA (real data sets) and PODS_SMOLLM2 (a real tokenizer)."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def place(variable, default):
    folder = Path(os.environ.get(variable) or ROOT / default)
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; {variable} names another")
    return folder


@pytest.fixture
def real_data():
    return place("PODS_DATA", "../shared/data")


@pytest.fixture
def smollm2():
    return place("PODS_SMOLLM2", ".cache/smollm2")
