import dataclasses
import importlib.util
import json

import jax
import pytest

from pods_jax.bench.compiled import DoesNotCompileError, Program, copied_bytes, gathered_bytes, loop_results
from pods_jax.bench.tpu_check import Sizes, compile_step, main, report
from pods_jax.devices.sharding import make_mesh, named_sharding
from pods_jax.models.spec import DecoderSpec

SPEC = DecoderSpec(vocab_size=64, width=32, layers=1, q_heads=4, kv_heads=2, head_size=8, feed_forward=48, qkv_bias=True)
SIZES = Sizes(prompts=4, n=3, m=2, prompt_length=5, completion_length=7, chunk=4, micro_batch=2)
GOOD = Program("decode 8", 1.0, 3.0, 2.0, 1.5, 1.5, 0.0, 0.0)

HLO = """\
HloModule jit__decode_chunk

%layer (p: bf16[4,8]) -> bf16[4,8] {
  %all-gather.1 = bf16[1024,1024]{1,0:T(8,128)(2,1)} all-gather(%p), dimensions={0}
  ROOT %copy.1 = bf16[2,3,16,1,8]{4,2,1,0,3} copy(%c)
}

%token (p: bf16[4,8]) -> bf16[4,8] {
  %all-gather.2 = f32[4,64,2]{1,0,2} all-gather(%q), dimensions={2}
  %start = (f32[8,65536]{1,0}, f32[16,65536]{1,0}) all-gather-start(%r), dimensions={0}
  %copy.2 = bf16[5,2,3,16,1,8]{5,4,3,2,1,0} copy(%c)
  %copy.3 = f32[2,3,99]{2,1,0} copy(%logits)
}

ENTRY %main (p: bf16[4,8]) -> bf16[4,8] {
  %all-gather.9 = bf16[4096,4096]{1,0} all-gather(%p), dimensions={0}
  ROOT %copy.9 = bf16[5,2,3,16,1,8]{5,4,3,2,1,0} copy(%c)
}
"""


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((1, 2, 2), jax.devices()[:4])


@pytest.fixture(scope="module")
def step(mesh):
    programs = []
    compile_step(mesh, SPEC, SIZES, programs.append, param_dtype="float32", compute_dtype="float32")
    return programs


def finding(*programs):
    """A step that has these programs."""
    return lambda found: [found(program) for program in programs]


def test_the_step_is_compiled_from_weights_to_update(step):
    names = [program.name for program in step]
    moved = ["shrink to 6", "decode 6 rows", "bring home"]
    assert names == ["weights", "prefill", "decode 4", "grow 7", "decode 7", *moved, "select", "update"]


def test_every_state_is_donated(step):
    state = {program.name: program for program in step if program.state_gib > 0}
    assert set(state) == {"decode 4", "decode 7", "decode 6 rows", "update"}
    assert all(program.donated_gib >= program.state_gib for program in state.values())


def test_the_update_holds_a_quarter_of_all_moments_on_each_of_four_devices(step):
    count = 64 * 32 + (32 * 4 * 8 * 2 + 32 * 2 * 8 * 2 + 3 * 32 * 48)
    small = 32 + 2 * 32 + 4 * 8 + 2 * 2 * 8
    held = next(program.state_gib for program in step if program.name == "update") * 2**30
    assert 3 * 4 * count / 4 < held <= 3 * 4 * (count / 4 + small)


def test_results_are_read_outside_the_entry_computation_alone():
    assert sorted(loop_results(HLO, "copy")) == [((2, 3, 16, 1, 8), 1536), ((2, 3, 99), 2376), ((5, 2, 3, 16, 1, 8), 7680)]


def test_only_large_gathers_count():
    assert gathered_bytes(HLO) == 1024 * 1024 * 2 + 16 * 65536 * 4


def test_copies_of_caches_and_of_one_layers_cache_count(mesh):
    cache = jax.ShapeDtypeStruct(
        (5, 4, 3, 16, 2, 8), "bfloat16", sharding=named_sharding(mesh, (None, "prompts", None, None, "kv_heads"))
    )
    assert copied_bytes(HLO, (cache,)) == 1536 + 7680


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"held_gib": 13.0}, "needs 16.00 GiB of 15.75 GiB"),
        ({"donated_gib": 1.0}, "takes over 1.000 GiB of a state of 1.500 GiB"),
        ({"gathered_gib": 0.25}, "gathers 0.250 GiB"),
        ({"copied_gib": 0.5}, "copies 0.500 GiB"),
    ],
)
def test_each_fault_is_named_and_fails_the_check(change, words, capsys):
    bad = dataclasses.replace(GOOD, **change)
    assert report(finding(GOOD, bad), limit_gib=15.75, about={}) == 1
    output = capsys.readouterr()
    assert words in output.err
    assert len(json.loads(output.out.splitlines()[-1])["faults"]) == 1


def test_a_good_step_passes_and_ends_with_one_json_line(capsys):
    assert report(finding(GOOD), limit_gib=15.75, about={"topology": "v5e:2x2"}) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["topology"] == "v5e:2x2"
    assert line["faults"] == []
    assert line["programs"] == [dataclasses.asdict(GOOD)]


def test_a_program_that_does_not_compile_fails_the_check_and_keeps_the_figures_before_it(capsys):
    def step(found):
        found(GOOD)
        raise DoesNotCompileError("update does not compile: RESOURCE_EXHAUSTED")

    assert report(step, limit_gib=15.75, about={}) == 1
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["faults"] == ["update does not compile: RESOURCE_EXHAUSTED"]
    assert [program["name"] for program in line["programs"]] == ["decode 8"]


def test_without_libtpu_the_check_says_how_to_get_it(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "libtpu" else found(name, *rest))
    assert main([]) == 2
    assert "libtpu is not installed" in capsys.readouterr().err


def test_an_unknown_topology_is_refused_with_the_known_ones(capsys):
    assert main(["--topology", "v9:2x2"]) == 2
    assert "v5e" in capsys.readouterr().err
