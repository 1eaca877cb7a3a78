"""SmolLM2-135M-Instruct, a pretrained model, against transformers: ``make real-model`` fetches it and runs these tests."""

import os
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pods_jax.algorithm.losses import LOSSES, Numbers, evaluate_loss
from pods_jax.assembly.policy import load_policy
from pods_jax.config.sections import ModelConfig
from pods_jax.data.prompts import build_prompts, eos_ids, load_tokenizer, pad_prompts
from pods_jax.devices.sharding import make_mesh
from pods_jax.models.hf_weights import export_folder
from pods_jax.rollout.engine import RolloutEngine
from pods_jax.rollout.sampling import sampling_params
from pods_jax.types import Problem, PromptBatch

FOLDER = Path(os.environ.get("SMOLLM2", Path(__file__).parents[2] / ".cache" / "smollm2"))
NEW_TOKENS = 64
QUESTIONS = (
    "What is 3 x 4?",
    "Write two sentences about the sea, and end with a question.",
    "A farmer has 12 sheep. He sells 5 of them, buys 9 more, and then gives a third of all his sheep to his daughter, who "
    "already has 7 sheep of her own. How many sheep does each of them have now? Explain every step.",
)

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} is not there: make real-model fetches it"),
]


@pytest.fixture(scope="module", autouse=True)
def mesh():
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(scope="module")
def policy(mesh):
    return load_policy(ModelConfig(path=str(FOLDER)), mesh)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    problems = [Problem(str(i), ({"role": "user", "content": text},), "", "math") for i, text in enumerate(QUESTIONS)]
    return build_prompts(problems, tokenizer, max_length=256, over_long="error", system_prompt=None)[0]


@pytest.fixture(scope="module")
def batch(prompts):
    return PromptBatch(*map(jnp.asarray, pad_prompts(prompts, multiple=16)))


@pytest.fixture(scope="module")
def greedy(policy, tokenizer, batch):
    """The engine's greedy completions of the three prompts, in one padded batch."""
    engine = RolloutEngine(
        policy[0].graph, rollouts=1, max_completion_length=NEW_TOKENS, chunk=32, eos_ids=eos_ids(tokenizer, FOLDER)
    )
    return jax.device_get(engine(policy[1], batch, jax.random.key(0), sampling_params(temperature=0.0)))


@pytest.fixture(scope="module")
def hf():
    """Transformers with torch, its warnings about its own dependencies silenced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch", reason="torch is not installed: there is nothing to compare with")
        import transformers
        from transformers import AutoModelForCausalLM  # noqa: F401 (a lazy import that happens here, under the filter)
    transformers.utils.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="module")
def theirs(hf):
    return hf.AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32").eval()


def torch_logits(model, tokens):
    import torch  # pyright: ignore[reportMissingImports]

    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def logits_of(policy, batch, tokens_PMC):
    """Logits at every prompt position, and those that predict every completion token."""

    @jax.jit
    def run(params, batch, tokens_PMC):
        decoder = nnx.merge(policy[0].graph, params)
        hidden_PMCD = decoder.group_hidden(batch.tokens_PL, batch.length_P, tokens_PMC)
        return decoder(batch.tokens_PL), decoder.logits(hidden_PMCD)

    return jax.device_get(run(policy[1], batch, jnp.asarray(tokens_PMC)))


def test_each_prompt_has_exactly_one_bos_in_front(prompts, tokenizer):
    assert len({len(prompt.tokens) for prompt in prompts}) == 3
    for prompt in prompts:
        text = tokenizer.apply_chat_template(list(prompt.problem.messages), add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(prompt.tokens) == text
        assert prompt.tokens[0] == tokenizer.bos_token_id != prompt.tokens[1]


def test_logits_of_a_padded_group_batch_equal_transformers(policy, prompts, batch, greedy, theirs):
    # Each group: the prompt's own completion, and another prompt's.
    tokens_PMC, end_PM = (np.concatenate([x, np.roll(x, 1, axis=0)], axis=1) for x in (greedy.tokens_PNC, greedy.length_PN))
    prompt_PLV, own_PMCV = logits_of(policy, batch, tokens_PMC)
    for p, prompt in enumerate(prompts):
        length = len(prompt.tokens)
        for m in range(2):
            end = end_PM[p, m]
            expected = torch_logits(theirs, [*prompt.tokens, *tokens_PMC[p, m, :end].tolist()])
            assert np.abs(own_PMCV[p, m, :end] - expected[length - 1 : -1]).max() < 1e-3
            assert np.abs(prompt_PLV[p, :length] - expected[:length]).max() < 1e-3


def test_greedy_generation_equals_transformers_token_by_token(prompts, greedy, theirs, tokenizer):
    import torch  # pyright: ignore[reportMissingImports]

    assert greedy.length_PN.max() == NEW_TOKENS
    for p, prompt in enumerate(prompts):
        asked = torch.tensor([prompt.tokens])
        whole = theirs.generate(
            asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
        )
        ours = greedy.tokens_PNC[p, 0, : greedy.length_PN[p, 0]].tolist()
        assert ours == whole[0, len(prompt.tokens) :].tolist(), tokenizer.decode(ours)


def test_the_end_token_is_kept_and_trained_though_it_is_the_padding_token(greedy, tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    ended_P = greedy.finished_PN[:, 0]
    assert ended_P.any()
    tokens_PC, length_P = greedy.tokens_PNC[:, 0], greedy.length_PN[:, 0]
    assert (np.take_along_axis(tokens_PC, length_P[:, None] - 1, axis=1)[ended_P] == tokenizer.eos_token_id).all()
    loss, one_PM = LOSSES["grpo"], jnp.ones(greedy.length_PN.shape)

    def value(logp):
        return evaluate_loss(
            loss,
            Numbers(),
            logp_PMC=logp,
            logp_old_PMC=greedy.logp_PNC,
            entropy_PMC=jnp.zeros_like(logp),
            advantage_PM=one_PM,
            length_PM=greedy.length_PN,
            weight_PM=one_PM,
            normaliser=loss.averaging.normaliser(greedy.length_PN, one_PM),
        )[0]

    gradient = np.asarray(jax.grad(value)(jnp.asarray(greedy.logp_PNC)))
    np.testing.assert_array_equal(gradient != 0, np.arange(NEW_TOKENS)[None, None] < greedy.length_PN[..., None])


def test_transformers_loads_the_export_with_the_same_logits(hf, theirs, policy, prompts, tmp_path):
    export_folder(policy[1], policy[0].spec, FOLDER, tmp_path / "export", dtype=jnp.float32)
    model, faults = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="float32", output_loading_info=True)
    assert not any(faults.values()), faults
    for prompt in prompts:
        np.testing.assert_array_equal(torch_logits(model.eval(), prompt.tokens), torch_logits(theirs, prompt.tokens))
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "export")(QUESTIONS[0]) == load_tokenizer(FOLDER)(QUESTIONS[0])
