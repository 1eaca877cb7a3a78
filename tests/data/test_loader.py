import json
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pods_jax.data.loader import make_loader
from pods_jax.problem import Problem
from pods_jax.types import Prompt


def prompts(count):
    return [Prompt(Problem(str(i), (), "1", "made_up"), (i,)) for i in range(count)]


def ids(batches):
    return [[prompt.tokens[0] for prompt in batch] for batch in batches]


def flat(batches):
    return [i for batch in batches for i in batch]


@settings(max_examples=20, deadline=None)  # the shuffle of a tiny list costs as much as that of a large one
@given(count=st.sampled_from([1, 2, 101, 128, 210]), per_step=st.integers(1, 17), seed=st.integers(0, 2**32 - 1))
def test_every_prompt_comes_once_an_epoch_and_every_step_is_full(count, per_step, seed):
    per_step = min(per_step, count)
    steps = -(-3 * count // per_step)
    batches = ids(islice(make_loader(prompts(count), prompts_per_step=per_step, seed=seed), steps))
    assert {len(batch) for batch in batches} == {per_step}
    stream = flat(batches)
    for epoch in range(3):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_order_is_shuffled_anew_each_epoch_and_by_the_seed():
    first = flat(ids(islice(make_loader(prompts(50), prompts_per_step=5, seed=0), 20)))
    other = flat(ids(islice(make_loader(prompts(50), prompts_per_step=5, seed=1), 20)))
    orders = [first[:50], first[50:], other[:50], other[50:], list(range(50))]
    assert len({tuple(order) for order in orders}) == 5


@pytest.mark.parametrize("done", range(6))
def test_resuming_anywhere_continues_as_if_never_interrupted(done):
    # 101 prompts in steps of 29: about 3.5 steps an epoch, so positions fall inside epochs and across their ends.
    def loader():
        return make_loader(prompts(101), prompts_per_step=29, seed=5)

    uninterrupted = ids(islice(loader(), 8))
    stopped = loader()
    list(islice(stopped, done))
    state = json.loads(json.dumps(stopped.get_state()))
    resumed = loader()
    next(resumed)
    resumed.set_state(state)
    assert ids(islice(resumed, 8 - done)) == uninterrupted[done:]


def test_saving_the_position_does_not_disturb_it():
    plain = make_loader(prompts(101), prompts_per_step=29, seed=5)
    saving = make_loader(prompts(101), prompts_per_step=29, seed=5)
    for _ in range(8):
        saving.get_state()
        assert ids([next(plain)]) == ids([next(saving)])


def test_a_far_position_is_sought_without_reading_what_lies_before():
    class Counting(list):
        reads = 0

        def __getitem__(self, index):
            Counting.reads += 1
            return super().__getitem__(index)

    loader = make_loader(Counting(prompts(101)), prompts_per_step=29, seed=5)
    next(loader)
    one_step = Counting.reads
    state = loader.get_state()
    loader.set_state(dict.fromkeys(state, 10**9))
    next(loader)
    assert Counting.reads == 2 * one_step


@pytest.mark.parametrize("per_step", [1, 2, 6, 109])
def test_the_order_does_not_depend_on_how_many_prompts_a_step_takes(per_step):
    def stream(per_step):
        return flat(ids(islice(make_loader(prompts(109), prompts_per_step=per_step, seed=2), 218 // per_step)))

    assert stream(per_step) == stream(1)[: 218 // per_step * per_step]


@pytest.mark.parametrize(
    ("count", "per_step", "message"),
    [
        (3, 4, r"data\.prompts_per_step=4 is impossible with 3 training prompts"),
        (3, 0, r"data\.prompts_per_step=0 is impossible"),
    ],
)
def test_impossible_arithmetic_is_refused(count, per_step, message):
    with pytest.raises(ValueError, match=message):
        make_loader(prompts(count), prompts_per_step=per_step, seed=0)
