import copy
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pods_jax.devices.sharding import ROLLOUT_TABLE, make_mesh, named_sharding, replicate, to_global, to_local
from pods_jax.models.attention import decode_form
from pods_jax.models.decoder import Decoder
from pods_jax.models.logprob import token_logp
from pods_jax.models.spec import DecoderSpec
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.lanes import Lanes, default_lanes
from pods_jax.rollout.programs import MAX_EOS_IDS, eos_array, rollout_keys
from pods_jax.rollout.sampling import effective_temperature, sampling_params
from pods_jax.types import PromptBatch

P, N, L, C, V = 8, 3, 5, 13, 38
SPEC = DecoderSpec(vocab_size=V, width=16, layers=2, q_heads=4, kv_heads=2, head_size=6, feed_forward=12, qkv_bias=True)
NEVER = [V + 1]
RNG = np.random.default_rng(0)
PROMPTS = PromptBatch(jnp.asarray(RNG.integers(0, V, (P, L)), jnp.int32), jnp.asarray([5, 1, 3, 2, 5, 4, 1, 3], jnp.int32))
GREEDY: dict[str, Any] = {"temperature": 0.0}
WARM: dict[str, Any] = {"temperature": 1.0}


@cache
def graph_and_params(**options):
    """Structure of the decoder, and parameters under which some tokens are likely and none is certain."""
    rng = np.random.default_rng(1)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(SPEC, rngs=nnx.Rngs(0), **options)))

    def draw(path, leaf):
        center = 1.0 if path[-1].key.endswith("_norm") else 0.0
        return jnp.asarray(center + 0.4 * rng.normal(size=leaf.shape), jnp.float32)

    return graph, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(state))


def decoder_params():
    return graph_and_params()[1]


@cache
def make_engine(*, n=N, length=C, chunk=7, unroll=True, form="rows", shape=None, width=1, rungs=2, lanes=1):
    """Engine without an end of sequence; one for each set of compiled programs, shared by all tests."""
    graph, _ = graph_and_params(unroll=unroll, form=form)
    gather = jax.jit(lambda params: params, out_shardings=shardings(shape, ROLLOUT_TABLE)) if shape else lambda params: params
    return RolloutEngine(
        graph,
        rollouts=n,
        max_completion_length=length,
        chunk=chunk,
        eos_ids=NEVER,
        width=width,
        rungs=rungs,
        lanes=Lanes(lanes),
        prepare=gather,
    )


def shardings(shape, *table):
    state = nnx.state(nnx.eval_shape(lambda: Decoder(SPEC, rngs=nnx.Rngs(0))))

    def sharding(variable):
        return named_sharding(make_mesh(shape), variable.get_metadata()["axes"], *table)

    return nnx.to_pure_dict(jax.tree.map(sharding, state, is_leaf=lambda x: isinstance(x, nnx.Variable)))


def with_eos(engine, ids):
    """The same engine and compiled programs with other EOS ids."""
    other = copy.copy(engine)
    vars(other).pop("_eos", None)
    other.eos_ids = eos_array(ids)
    return other


def generate(engine, key=0, prompts=PROMPTS, params: Any = None, limit_PN: Any = None, **sampling: Any) -> Any:
    params = decoder_params() if params is None else params
    sampled = replicate(sampling_params(**(sampling or WARM)))
    return jax.device_get(engine(params, prompts, jax.random.key(key), sampled, limit_PN))


@pytest.fixture(scope="module")
def free():
    """Rollouts that nothing ends before the limit."""
    return generate(make_engine())


@pytest.fixture(scope="module")
def eos_ids(free):
    """A rollout's first token and another's last: completions of length 1, of full length, and unfinished ones."""
    return sorted({int(free.tokens_PNC[1, 2, 0]), int(free.tokens_PNC[0, 0, -1])})


def ended(rollouts, ids):
    """What rollouts without an end become when they end at the first of the ids: (tokens, logp, length, finished)."""
    is_end = np.isin(rollouts.tokens_PNC, ids)
    finished = is_end.any(axis=-1)
    length = np.where(finished, is_end.argmax(axis=-1) + 1, C)
    inside = np.arange(C) < length[..., None]
    return np.where(inside, rollouts.tokens_PNC, 0), np.where(inside, rollouts.logp_PNC, 0), length, finished


# --- what a rollout is


def test_rollouts_run_to_the_limit_without_an_end(free):
    assert free.tokens_PNC.shape == free.logp_PNC.shape == (P, N, C)
    assert (free.tokens_PNC.dtype, free.logp_PNC.dtype, free.length_PN.dtype) == (np.int32, np.float32, np.int32)
    np.testing.assert_array_equal(free.length_PN, np.full((P, N), C))
    assert not free.finished_PN.any()
    assert (free.tokens_PNC < V).all()
    assert (free.logp_PNC < 0).all()


def test_the_first_of_several_eos_ids_ends_a_completion_and_belongs_to_it(free, eos_ids):
    rollouts = generate(with_eos(make_engine(rungs=0), eos_ids))
    tokens, logp, length, finished = ended(free, eos_ids)
    assert 1 in length
    assert C in length[finished]
    assert C in length[~finished]
    np.testing.assert_array_equal(rollouts.length_PN, length)
    np.testing.assert_array_equal(rollouts.finished_PN, finished)
    np.testing.assert_array_equal(rollouts.tokens_PNC, tokens)
    np.testing.assert_array_equal(rollouts.logp_PNC, logp)


def recorded(engine):
    """The engine, and the list that its calls of decode programs append ``(capacity, filled)`` to."""
    other, calls = copy.copy(engine), []

    def record(capacity, decode, *args):
        state = decode(*args)
        calls.append((capacity, int(state.filled)))
        return state

    other.decode = {capacity: partial(record, capacity, decode) for capacity, decode in engine.decode.items()}
    return other, calls


@pytest.mark.parametrize("position", [0, 3, 9])
def test_decoding_stops_as_soon_as_every_rollout_has_ended(position):
    free = generate(make_engine(), **GREEDY)
    ids = sorted({int(token) for token in free.tokens_PNC[:, :, position].flat})
    longest = int(ended(free, ids)[2].max())
    engine, calls = recorded(with_eos(make_engine(rungs=0), ids))
    rollouts = generate(engine, **GREEDY)
    assert rollouts.finished_PN.all()
    assert rollouts.length_PN.max() == longest <= position + 1
    assert calls == ([(7, longest)] if longest <= 7 else [(7, 7), (13, longest)])


def test_chunks_fill_their_caches_and_the_last_one_ends_at_the_limit():
    engine, calls = recorded(make_engine())
    generate(engine)
    assert calls == [(7, 7), (13, 13)]


# --- what the model says


@cache
def learner():
    """Log-probabilities of tokens by the update's forward."""
    graph, params = graph_and_params(unroll=False)

    @jax.jit
    def score(params, tokens, temperature):
        decoder = nnx.merge(graph, params)
        hidden = decoder.group_hidden(PROMPTS.tokens_PL, PROMPTS.length_P, tokens)
        divisor = effective_temperature(temperature)
        return token_logp(hidden, decoder.head_DV(), tokens, temperature=divisor, logit_chunk=4 * P * N * V)[0]

    return lambda tokens, temperature: np.asarray(score(params, tokens, np.float32(temperature)))


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9}, GREEDY],
    ids=["1.0", "0.7", "truncated", "greedy"],
)
def test_logp_is_the_learners_token_by_token(sampling, eos_ids):
    rollouts = generate(with_eos(make_engine(), eos_ids), key=3, **sampling)
    inside = np.arange(C) < rollouts.length_PN[..., None]
    expected = learner()(rollouts.tokens_PNC, sampling["temperature"])
    np.testing.assert_allclose(rollouts.logp_PNC[inside], expected[inside], atol=1e-4)
    assert (rollouts.logp_PNC[~inside] == 0).all()


def test_greedy_is_the_argmax_of_the_full_forward_repeated():
    rollouts = generate(make_engine(), **GREEDY)
    graph, params = graph_and_params(unroll=False)
    forward = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))
    rows = np.zeros((P, L + C), np.int32)
    rows[:, :L] = PROMPTS.tokens_PL
    length = np.asarray(PROMPTS.length_P)
    for t in range(C):
        logits = np.asarray(forward(params, rows))
        following = logits[np.arange(P), length + t - 1].argmax(axis=-1)
        np.testing.assert_array_equal(rollouts.tokens_PNC[:, :, t], np.repeat(following[:, None], N, axis=1))
        rows[np.arange(P), length + t] = following


# --- what does not change a rollout


@pytest.mark.parametrize("sampling", [WARM, {"temperature": 0.8, "top_p": 0.8}, GREEDY], ids=["plain", "top_p", "greedy"])
def test_chunks_change_no_token(sampling, eos_ids):
    chunked, whole = (generate(with_eos(make_engine(chunk=chunk), eos_ids), **sampling) for chunk in (7, 64))
    np.testing.assert_array_equal(chunked.tokens_PNC, whole.tokens_PNC)
    np.testing.assert_array_equal(chunked.length_PN, whole.length_PN)
    np.testing.assert_array_equal(chunked.finished_PN, whole.finished_PN)
    np.testing.assert_allclose(chunked.logp_PNC, whole.logp_PNC, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2])
def test_a_first_cache_of_one_token_changes_no_token(length, free):
    """The prefill has filled it: there is nothing to decode before it grows."""
    short = generate(make_engine(chunk=1, length=length))
    np.testing.assert_array_equal(short.tokens_PNC, free.tokens_PNC[..., :length])
    assert (short.length_PN == length).all()


@pytest.mark.parametrize("form", ["dots", "stacked_rows"])
def test_scanned_layers_and_other_decode_forms_change_no_token(form, free):
    other = generate(make_engine(chunk=8, unroll=False, form=form))
    np.testing.assert_array_equal(other.tokens_PNC, free.tokens_PNC)
    np.testing.assert_allclose(other.logp_PNC, free.logp_PNC, atol=1e-5)


def test_more_rollouts_leave_the_first_ones_as_they_were(free):
    more = generate(make_engine(n=5, chunk=64))
    np.testing.assert_array_equal(more.tokens_PNC[:, :N], free.tokens_PNC)


def test_a_rollout_depends_on_its_own_prompt_and_place_alone(free):
    tokens = jnp.asarray(PROMPTS.tokens_PL).at[3:].set((PROMPTS.tokens_PL[3:] + 5) % V)
    others = PromptBatch(tokens, PROMPTS.length_P.at[3:].set(4))
    rollouts = generate(make_engine(), prompts=others)
    np.testing.assert_array_equal(rollouts.tokens_PNC[:3], free.tokens_PNC[:3])
    assert (rollouts.tokens_PNC[3:] != free.tokens_PNC[3:]).any(axis=(1, 2)).all()


def test_what_stands_in_a_prompts_padding_changes_nothing(free):
    padding = jnp.arange(L)[None] >= PROMPTS.length_P[:, None]
    garbage = jnp.where(padding, (PROMPTS.tokens_PL + 9) % V, PROMPTS.tokens_PL)
    rollouts = generate(make_engine(), prompts=replace(PROMPTS, tokens_PL=garbage))
    np.testing.assert_array_equal(rollouts.tokens_PNC, free.tokens_PNC)
    np.testing.assert_array_equal(rollouts.logp_PNC, free.logp_PNC)


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 2)], ids=str)
def test_a_mesh_changes_no_token(shape, free):
    mesh = make_mesh(shape)
    with jax.set_mesh(mesh):
        params = jax.device_put(decoder_params(), shardings(shape))
        rollouts = make_engine(chunk=64, shape=shape)(
            params, to_global(mesh, PROMPTS), jax.random.key(0), sampling_params(**WARM)
        )
    assert rollouts.tokens_PNC.sharding.is_equivalent_to(named_sharding(mesh, ("prompts",)), 3)
    np.testing.assert_array_equal(rollouts.tokens_PNC, free.tokens_PNC)
    np.testing.assert_allclose(rollouts.logp_PNC, free.logp_PNC, atol=1e-5)


# --- rows that go on alone


LIMITS = np.random.default_rng(7).integers(1, C + 1, (P, N)).astype(np.int32)


def cut(rollouts, limits):
    """What rollouts without an end become when each is cut at its limit: (tokens, logp)."""
    inside = np.arange(C) < limits[..., None]
    return np.where(inside, rollouts.tokens_PNC, 0), np.where(inside, rollouts.logp_PNC, 0)


@pytest.mark.parametrize(("width", "most"), [(1, 0.75), (2, 0.8), (3, 0.95)])
def test_a_batch_that_shrinks_changes_no_token(width, most, free):
    form = "dots" if width == 2 else "rows"
    engine = make_engine(form=form, unroll=form == "rows", width=width)
    rollouts = generate(engine, limit_PN=jnp.asarray(LIMITS))
    tokens, logp = cut(free, LIMITS)
    np.testing.assert_array_equal(rollouts.tokens_PNC, tokens)
    np.testing.assert_array_equal(rollouts.length_PN, LIMITS)
    assert not rollouts.finished_PN.any()
    np.testing.assert_allclose(rollouts.logp_PNC, logp, atol=1e-5)
    assert (LIMITS - 1).sum() <= rollouts.decoded_rows < most * P * N * (LIMITS.max() - 1)


def test_a_batch_that_may_not_shrink_decodes_every_row_to_the_end(eos_ids, free):
    rollouts = generate(make_engine(rungs=0), limit_PN=jnp.asarray(LIMITS))
    assert rollouts.decoded_rows == P * N * (C - 1)
    np.testing.assert_array_equal(rollouts.tokens_PNC, cut(free, LIMITS)[0])


def test_rows_that_end_by_themselves_leave_the_batch(free):
    often = np.argsort(np.bincount(free.tokens_PNC.ravel()))[-6:].tolist()
    rollouts = generate(with_eos(make_engine(), often))
    tokens, _, _, finished = ended(free, often)
    np.testing.assert_array_equal(rollouts.tokens_PNC, tokens)
    np.testing.assert_array_equal(rollouts.finished_PN, finished)
    assert rollouts.decoded_rows < P * N * (C - 1)


@pytest.mark.parametrize(("shape", "form"), [((2, 2, 2), "rows"), ((1, 4, 2), "dots")], ids=str)
def test_shards_shrink_alike_and_no_row_changes_its_shard(shape, form, free):
    mesh, limits = make_mesh(shape), LIMITS.copy()
    limits[0] = C  # the first shard's rows go on longest
    with jax.set_mesh(mesh):
        params = jax.device_put(decoder_params(), shardings(shape))
        engine = make_engine(form=form, unroll=form == "rows", shape=shape)
        batch, limit_PN = to_global(mesh, (PROMPTS, limits))
        rollouts = engine(params, batch, jax.random.key(0), sampling_params(**WARM), limit_PN)
        texts, _ = compiled(engine, params, batch, "shrink", "bring home")
    np.testing.assert_array_equal(rollouts.tokens_PNC, cut(free, limits)[0])
    assert rollouts.tokens_PNC.sharding.is_equivalent_to(named_sharding(mesh, ("prompts",)), 3)
    assert rollouts.decoded_rows < P * N * (C - 1)
    for text in texts.values():
        assert not re.search(r"all-gather|all-to-all|collective-permute", text)


def compiled(engine, params, batch, *starts):
    """The text of the compiled programs whose names start so, and the caches that each leaves in place, by name."""
    texts, caches = {}, {}

    def visit(call):
        if call.name.startswith(starts):
            texts[call.name], caches[call.name] = str(call.lower().compile().as_text()), call.caches
        return call.results()

    engine.visit_programs(visit, params, batch, sampling_params(**WARM))
    assert len(texts) == len(starts)
    return texts, caches


# --- lanes


@pytest.mark.parametrize("sampling", [WARM, {"temperature": 0.8, "top_p": 0.8}, GREEDY], ids=["plain", "top_p", "greedy"])
@pytest.mark.parametrize("lanes", [2, 4, 7])
def test_lanes_change_no_token(lanes, sampling, eos_ids):
    alone, beside = (generate(with_eos(make_engine(lanes=count), eos_ids), **sampling) for count in (1, lanes))
    np.testing.assert_array_equal(beside.tokens_PNC, alone.tokens_PNC)
    np.testing.assert_array_equal(beside.length_PN, alone.length_PN)
    np.testing.assert_array_equal(beside.finished_PN, alone.finished_PN)
    np.testing.assert_allclose(beside.logp_PNC, alone.logp_PNC, atol=1e-5)


def test_each_lane_shrinks_by_itself_and_its_rows_are_counted(free):
    engine = make_engine(lanes=4)
    rollouts = generate(engine, limit_PN=jnp.asarray(LIMITS))
    parts = np.split(np.arange(P), 4)
    batches = [PromptBatch(PROMPTS.tokens_PL[part], PROMPTS.length_P[part]) for part in parts]
    limits = [jnp.asarray(LIMITS[part]) for part in parts]
    each = [generate(make_engine(), prompts=batch, limit_PN=limit) for batch, limit in zip(batches, limits, strict=True)]
    np.testing.assert_array_equal(rollouts.tokens_PNC, cut(free, LIMITS)[0])
    np.testing.assert_array_equal(rollouts.length_PN, LIMITS)
    assert rollouts.decoded_rows == sum(part.decoded_rows for part in each) < P * N * (C - 1)


def test_lanes_that_meet_a_new_program_together_compile_it_once(free):
    engine = RolloutEngine(
        graph_and_params(unroll=True, form="rows")[0],
        rollouts=N,
        max_completion_length=C,
        chunk=7,
        eos_ids=NEVER,
        rungs=1,
        lanes=Lanes(4),
    )
    with compilations() as compiled:
        rollouts = [generate(engine, limit_PN=jnp.asarray(limits)) for limits in (np.full((P, N), C, np.int32), LIMITS)]
    np.testing.assert_array_equal(rollouts[0].tokens_PNC, free.tokens_PNC)
    assert len(compiled) >= engine.compiled_programs() > 5
    assert engine.compiled_programs() <= engine.foretell(P, L).programs
    with compilations() as compiled:
        generate(engine, key=5, limit_PN=jnp.asarray(LIMITS))
    assert compiled == []


def test_a_lane_that_fails_fails_the_call():
    engine = copy.copy(make_engine(lanes=2))

    def refuse(*_):
        raise RuntimeError("no memory for the decode loop")

    engine.decode = dict.fromkeys(engine.capacities, refuse)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no memory"):
        generate(engine)


@pytest.mark.parametrize(
    ("most", "rows", "prompts", "lanes"), [(1, 1, 8, 1), (4, 1, 8, 4), (4, 1, 6, 3), (2, 1, 7, 1), (4, 6, 4, 2), (4, 13, 4, 1)]
)
def test_as_many_lanes_as_share_the_prompts_evenly_and_are_filled(most, rows, prompts, lanes):
    engine = copy.copy(make_engine())
    engine.lanes = Lanes(most, rows)
    assert engine.lanes_of(prompts) == lanes


def test_lanes_are_for_one_cpu_device_and_a_model_of_some_size(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert default_lanes(1, "cpu", SPEC).most == 6
    assert SPEC.matrix_weights * 2 * default_lanes(1, "cpu", SPEC).rows >= 6e6
    for devices, platform, spec in [
        (2, "cpu", SPEC),
        (1, "tpu", SPEC),
        (1, "gpu", SPEC),
        (1, "cpu", replace(SPEC, layers=10**5)),
    ]:
        assert default_lanes(devices, platform, spec) == Lanes()


# --- what does


def test_the_same_key_repeats_a_step_and_another_does_not(free):
    np.testing.assert_array_equal(generate(make_engine()).tokens_PNC, free.tokens_PNC)
    other = generate(make_engine(), key=1)
    assert (other.tokens_PNC != free.tokens_PNC).any(axis=-1).all()


def test_rollouts_of_a_group_differ_and_so_do_groups_of_equal_prompts():
    same = PromptBatch(jnp.tile(PROMPTS.tokens_PL[:1], (P, 1)), jnp.full(P, 5, jnp.int32))
    rollouts = generate(make_engine(), prompts=same)
    assert len({row.tobytes() for row in rollouts.tokens_PNC.reshape(P * N, C)}) == P * N


def test_every_position_of_every_rollout_draws_anew():
    flat = jax.tree.map(jnp.zeros_like, decoder_params())  # all tokens equally likely, whatever came before
    tokens = generate(make_engine(), params=flat).tokens_PNC
    others = [np.roll(tokens, 1, axis)[(slice(None),) * axis + (slice(1, None),)] for axis in range(3)]
    repeats = [(np.delete(tokens, 0, axis) == other).mean() for axis, other in enumerate(others)]
    assert max(repeats) < 3 / V
    assert len(np.unique(tokens)) > 0.9 * V


def test_every_rollout_has_its_own_key():
    keys = np.asarray(jax.random.key_data(rollout_keys(jax.random.key(0), 7, 11)))
    assert len({key.tobytes() for key in keys.reshape(77, -1)}) == 77


# --- compiled programs


@contextmanager
def compilations():
    """Counts the backend compilations of whatever runs inside."""
    names = []

    def listen(event: str, duration_secs: float, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_recompiles_over_steps_sampling_parameters_eos_ids_lengths_and_parameters(eos_ids):
    engine = make_engine(chunk=8, rungs=0)
    generate(engine)
    moved = jax.tree.map(lambda p: 1.1 * p, decoder_params())
    shorter = replace(PROMPTS, length_P=jnp.asarray([1, 2, 3, 4, 5, 1, 2, 3], jnp.int32))
    programs = engine.compiled_programs()
    assert programs == 1 + 2 + 1
    with compilations() as compiled:
        for step in range(3):
            generate(engine, key=step)
        generate(engine, **GREEDY)
        generate(engine, temperature=0.3)
        generate(engine, temperature=1, top_k=5, top_p=0.9, min_p=0.1)
        generate(with_eos(engine, eos_ids))
        generate(with_eos(engine, [1, 2, 3, 4, 5]))
        generate(engine, prompts=shorter, params=moved)
    assert compiled == []
    assert engine.compiled_programs() == programs


def test_each_size_is_compiled_once_and_their_number_is_bounded():
    engine, rng = make_engine(width=2, rungs=1), np.random.default_rng(3)
    limits = [jnp.asarray(rng.integers(1, C + 1, (P, N)), jnp.int32) for _ in range(3)]
    for limit_PN in limits:
        generate(engine, limit_PN=limit_PN)
    assert engine.compiled_programs() <= engine.foretell(P, L).programs
    with compilations() as compiled:
        for step in range(50):
            generate(engine, key=step, limit_PN=limits[step % 3])
    assert compiled == []


def test_the_count_of_compilations_sees_one():
    with compilations() as compiled:
        jax.jit(lambda x: 3 * x + P)(jnp.float32(1.0)).block_until_ready()
    assert compiled


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_engine_asks_for_no_transfer_that_its_caller_did_not_make(lanes, free):
    engine, params, key, sampling = (
        make_engine(lanes=lanes),
        decoder_params(),
        jax.random.key(0),
        replicate(sampling_params(**WARM)),
    )
    with jax.transfer_guard_host_to_device("disallow"), jax.transfer_guard_device_to_host("disallow"):
        rollouts = to_local(engine(params, PROMPTS, key, sampling))
    np.testing.assert_array_equal(rollouts.tokens_PNC, free.tokens_PNC)


@pytest.mark.parametrize("unroll", [False, True])
def test_no_cache_is_copied_at_a_token(unroll):
    engine = make_engine(unroll=unroll, form=decode_form("cpu", unroll))
    texts, caches = compiled(engine, decoder_params(), PROMPTS, "decode 7")
    [text], [(cache, _)] = texts.values(), caches.values()
    shapes = {",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(cache)}
    assert all(f"f32[{shape}]" in text for shape in shapes)
    assert not [line for shape in shapes for line in re.findall(rf"f32\[{shape}\]\S* copy\(.*", text)]


# --- sizes and ids


@pytest.mark.parametrize(
    ("chunk", "length", "capacities"),
    [(5, 13, [5, 9, 13]), (5, 10, [5, 10]), (64, 13, [13]), (1, 3, [1, 2, 3]), (13, 13, [13]), (32, 40, [40])],
)
def test_caches_grow_in_equal_steps_up_to_the_limit(chunk, length, capacities):
    graph, _ = graph_and_params()
    engine = RolloutEngine(graph, rollouts=2, max_completion_length=length, chunk=chunk, eos_ids=[0])
    assert engine.capacities == capacities
    for tokens in range(1, length + 1):
        assert engine.padded_length(tokens) == min(capacity for capacity in capacities if capacity >= tokens)


def test_eos_ids_have_a_fixed_shape_whatever_their_number():
    assert eos_array([3]).tolist() == [3] + [-1] * (MAX_EOS_IDS - 1)
    assert eos_array([9, 2, 5]).tolist()[:3] == [2, 5, 9]
    assert eos_array(range(MAX_EOS_IDS)).dtype == np.int32


@pytest.mark.parametrize("ids", [[], [-1], [3, -2], list(range(MAX_EOS_IDS + 1))], ids=str)
def test_impossible_eos_ids_are_refused_with_the_limit(ids):
    with pytest.raises(ValueError, match=f"between 1 and {MAX_EOS_IDS} non-negative ids"):
        eos_array(ids)
