import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from pods_jax.rewards.workers import MOST_WORKERS, Job, Outcome, WorkerPool, outcome_of

SOURCE = """
import os, signal, subprocess, sys, time

def value(number):
    return number

def after(seconds, number):
    time.sleep(seconds)
    return number

def spin(number):
    while True:
        pass

def stuck_in_c(digits):
    return len(str(9 ** (9 ** digits)))

def alarm_proof(number):
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    spin(number)

def eats(mebibytes):
    return len(bytearray(mebibytes * 2**20))

def dies(status):
    os._exit(status)

def crashes(number):
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)

def leaves(number):
    sys.exit(number)

def deep(number):
    return deep(number) + 1

def fails(text):
    raise ValueError(f"cannot score {text}")

def imported(name):
    return name in sys.modules

def process(number):
    return os.getpid()

def prints(number):
    print("x" * 100_000)
    return number

def child(number):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid

def waits_for_child(number):
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])

calls = 0

def counted(number):
    global calls
    calls += 1
    return calls
"""


WARM = """
import time

warm = False

def warm_up():
    global warm
    time.sleep(1.2)
    warm = True

def is_warm():
    return warm
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "worker_jobs.py").write_text(SOURCE)
    (folder / "warm_jobs.py").write_text(WARM)
    (folder / "broken_jobs.py").write_text("1 / 0\n")
    sys.path.append(str(folder))
    yield lambda name, *args: Job(f"worker_jobs:{name}", args)
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def pool(target):
    with closing(WorkerPool(time_limit=1.0, memory_limit_mb=256, workers=2)) as pool:
        yield pool


def alive(process):
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    status = Path(f"/proc/{int(process)}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_ended(process):
    deadline = time.monotonic() + 10
    while alive(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_outcomes_come_in_the_order_of_the_jobs_whatever_order_they_end_in(pool, target):
    jobs = [target("after", 0.3 if number == 0 else 0, number) for number in range(20)]
    assert [outcome.value for outcome in pool.run(jobs)] == list(range(20))
    assert pool.run([]) == []


@pytest.mark.parametrize(
    ("name", "argument", "fault"),
    [
        ("spin", 0, "time"),
        ("stuck_in_c", 12, "time"),
        ("alarm_proof", 0, "time"),
        ("waits_for_child", 0, "time"),
        ("eats", 4_096, "memory"),
        ("dies", 0, "crash"),
        ("dies", 3, "crash"),
        ("crashes", 0, "crash"),
        ("leaves", 0, "crash"),
        ("deep", 0, "error"),
        ("fails", "this", "error"),
    ],
)
def test_a_job_that_fails_costs_its_own_value_and_no_other(pool, target, name, argument, fault):
    jobs = [target("value", number) for number in range(6)]
    jobs.insert(3, target(name, argument))
    pool.run([target("value", 0), target("value", 1)])  # the processes run: the time is the jobs' own
    start = time.monotonic()
    outcomes = pool.run(jobs)
    assert [outcome.value for outcome in outcomes] == [0, 1, 2, None, 3, 4, 5]
    assert [outcome.fault for outcome in outcomes] == [None, None, None, fault, None, None, None]
    assert time.monotonic() - start < 15  # a second for the limit, the rest for a new process on a busy machine
    assert pool.run([target("value", 7)])[0].value == 7


def test_the_traceback_of_an_error_is_kept(pool, target):
    [outcome] = pool.run([target("fails", "this one")])
    assert "ValueError: cannot score this one" in outcome.detail


def test_several_late_jobs_are_ended_side_by_side(pool, target):
    outcomes = pool.run([target("spin", number) for number in range(4)])
    assert [outcome.fault for outcome in outcomes] == ["time"] * 4


def test_processes_stay_between_runs_and_equal_jobs_run_once(target):
    with closing(WorkerPool(workers=1)) as pool:
        assert [outcome.value for outcome in pool.run([target("counted", 1)] * 5)] == [1] * 5
        assert pool.run([target("counted", 2)])[0].value == 2


def test_a_process_that_dies_between_runs_is_replaced(target):
    with closing(WorkerPool(workers=1)) as pool:
        process = pool.run([target("process", 0)])[0].value
        assert process is not None
        os.killpg(int(process), 9)
        wait_until_ended(process)
        outcome = pool.run([target("process", 1)])[0]
        assert outcome.fault is None
        assert outcome.value != process


def test_close_ends_the_processes_and_a_later_run_starts_new_ones(target):
    pool = WorkerPool(workers=1)
    process = pool.run([target("process", 0)])[0].value
    assert process is not None
    assert alive(process)
    pool.close()
    assert not alive(process)
    assert pool.run([target("value", 3)])[0].value == 3
    pool.close()


def test_a_forgotten_pool_ends_its_processes(target):
    pool = WorkerPool(workers=1)
    process = pool.run([target("process", 0)])[0].value
    assert process is not None
    del pool
    assert not alive(process)


def test_what_a_late_job_has_started_ends_with_it(target):
    with closing(WorkerPool(time_limit=1.0, workers=1)) as pool:
        child = pool.run([target("child", 0)])[0].value
        assert child is not None
        assert alive(child)
        pool.run([target("spin", 0)])
        wait_until_ended(child)


def test_workers_import_neither_jax_nor_the_main_module(pool, target):
    names = ["jax", "jaxlib", "torch", "transformers", "pytest"]
    assert [outcome.value for outcome in pool.run([target("imported", name) for name in names])] == [0.0] * len(names)


def test_a_module_warms_up_before_its_first_job_and_outside_the_limit(pool, target):
    assert pool.run([Job("warm_jobs:is_warm", ())]) == [Outcome(1.0)]


def test_nothing_starts_before_the_first_job():
    pool = WorkerPool()
    assert pool._workers == []
    assert 1 <= pool._size <= MOST_WORKERS


def test_what_a_job_prints_does_not_reach_standard_output(pool, target, capfd):
    assert pool.run([target("prints", 5)])[0].value == 5
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", ["broken_jobs:f", "no_such_module:f", "worker_jobs:no_such_function"])
def test_a_target_that_cannot_be_imported_is_an_error_that_names_it(target, name):
    with closing(WorkerPool(workers=1)) as pool, pytest.raises(RuntimeError, match=f"cannot import {name}"):
        pool.run([Job(name, (1,)), target("value", 1)])


def test_text_of_any_kind_and_size_arrives_unchanged(pool):
    texts = ["\x00", "\ud800", "\udfff\ud800", "a" * 2_000_000, "", "é\u2028"]
    assert [outcome.value for outcome in pool.run([Job("builtins:len", (text,)) for text in texts])] == list(map(len, texts))


def test_a_worker_ends_when_its_trainer_is_killed(target):
    code = (
        "import sys, time; sys.path[:] = eval(sys.argv[1])\n"
        "from pods_jax.rewards.workers import Job, WorkerPool\n"
        "pool = WorkerPool(workers=1)\n"
        "print(int(pool.run([Job('worker_jobs:process', (0,))])[0].value), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, repr([os.getcwd(), *sys.path])], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        trainer.kill()
    wait_until_ended(worker)


@pytest.mark.parametrize("limits", [{"time_limit": 0}, {"memory_limit_mb": 0}, {"workers": -1}])
def test_limits_out_of_range_are_refused(limits):
    with pytest.raises(ValueError, match=f"{next(iter(limits))}={next(iter(limits.values()))}"):
        WorkerPool(**limits)


@pytest.mark.parametrize(("score", "value"), [(None, None), (True, 1.0), (3, 3.0), (0.5, 0.5)])
def test_numbers_and_none_are_scores(score, value):
    assert outcome_of(score) == Outcome(value)


def test_other_types_are_no_scores():
    assert outcome_of("1") == Outcome(detail="str", wrong_type=True)
