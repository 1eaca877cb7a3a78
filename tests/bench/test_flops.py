"""XLA's own count of the programs of a step: the prompt costs once per group, and the formulas say how much."""

from dataclasses import replace

import pytest

from pods_jax.bench.flops import Lengths, prefill_formula, rollout_count, update_count, update_formula
from pods_jax.models.spec import DecoderSpec

SPEC = DecoderSpec(vocab_size=512, width=256, layers=2, q_heads=4, kv_heads=2, head_size=64, feed_forward=1024, qkv_bias=True)
GENERATED = Lengths(groups=2, rollouts=6, prompt=96, completion=40)
KEPT = Lengths(groups=2, rollouts=5, prompt=96, completion=40)


@pytest.fixture(scope="module")
def rollout():
    return rollout_count(SPEC, GENERATED)


@pytest.mark.parametrize("form", ["group", "copied"])
def test_the_update_costs_what_the_formula_says(form):
    lengths = KEPT if form == "group" else KEPT.copied()
    formula = update_formula(SPEC, lengths)
    assert formula < update_count(SPEC, lengths) < 1.03 * formula


@pytest.mark.parametrize("prompt", [32, 192])
def test_sharing_the_prompt_saves_what_the_formula_says(prompt):
    lengths = replace(KEPT, prompt=prompt)
    counted = update_count(SPEC, lengths) / update_count(SPEC, lengths.copied())
    assert counted == pytest.approx(update_formula(SPEC, lengths) / update_formula(SPEC, lengths.copied()), rel=0.01)


def test_one_more_kept_rollout_costs_its_completion_alone():
    more = replace(KEPT, rollouts=KEPT.rollouts + 1)
    formula = update_formula(SPEC, more) - update_formula(SPEC, KEPT)
    assert update_count(SPEC, more) - update_count(SPEC, KEPT) == pytest.approx(formula, rel=0.03)


def test_the_prefill_costs_what_the_formula_says(rollout):
    formula = prefill_formula(SPEC, GENERATED)
    assert formula < rollout.prefill_flops < 1.03 * formula


def test_twice_the_rollouts_need_no_more_prefill_than_their_first_draw(rollout):
    twice = rollout_count(SPEC, replace(GENERATED, rollouts=2 * GENERATED.rollouts))
    drawn = GENERATED.groups * GENERATED.rollouts * SPEC.vocab_size
    assert 0 < twice.prefill_flops - rollout.prefill_flops < 50 * drawn < 0.001 * rollout.prefill_flops
    assert twice.decode_flops == pytest.approx(2 * rollout.decode_flops, rel=0.01)


def test_twice_the_prompts_need_twice_the_prefill(rollout):
    twice = rollout_count(SPEC, replace(GENERATED, groups=2 * GENERATED.groups))
    assert twice.prefill_flops == pytest.approx(2 * rollout.prefill_flops, rel=1e-3)


def test_the_cache_holds_each_prompt_once(rollout):
    tokens = GENERATED.groups * (GENERATED.prompt + GENERATED.rollouts * GENERATED.completion)
    assert rollout.cache_bytes == 4 * 2 * SPEC.layers * tokens * SPEC.kv_heads * SPEC.head_size
    copied = rollout_count(SPEC, GENERATED.copied())
    assert copied.cache_bytes - rollout.cache_bytes == 4 * 2 * SPEC.layers * 2 * (6 - 1) * 96 * SPEC.kv_heads * SPEC.head_size
