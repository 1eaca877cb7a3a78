import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pods_jax.assets.tokenizer import write_tokenizer
from pods_jax.data.prompts import load_tokenizer
from pods_jax.devices.sharding import make_mesh
from pods_jax.evaluator import Evaluator, Verdicts, accuracy_metrics
from pods_jax.rollout.sampling import sampling_params
from pods_jax.types import Problem, Prompt, Rollouts


class Echo:
    """An engine whose completion n of a prompt is the prompt's first n + 1 tokens, the odd ones cut at the limit."""

    def __init__(self, rollouts):
        self.rollouts, self.calls = rollouts, []

    def __call__(self, params, prompts, key, sampling):
        self.calls.append((params, prompts, jax.random.key_data(key).tolist(), float(sampling.temperature)))
        count, steps = prompts.tokens_PL.shape
        length_PN = jnp.broadcast_to(1 + jnp.arange(self.rollouts)[None], (count, self.rollouts))
        return Rollouts(
            tokens_PNC=jnp.broadcast_to(prompts.tokens_PL[:, None], (count, self.rollouts, steps)),
            logp_PNC=jnp.zeros((count, self.rollouts, steps)),
            length_PN=length_PN,
            finished_PN=length_PN % 2 == 1,
            decoded_rows=jnp.float32(0),
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture
def evaluator(tokenizer):
    """Problems "11", "22", … whose answer is one digit for the even ones and two for the odd ones."""

    def build(count=7, rollouts=2, batch=4):
        texts = [str(i % 10) * 2 for i in range(count)]
        problems = [Problem(f"p/{i}", ({"role": "user", "content": t},), t[: 1 + i % 2], "t") for i, t in enumerate(texts)]
        prompts = [
            Prompt(p, tuple(tokenizer(t, add_special_tokens=False)["input_ids"])) for p, t in zip(problems, texts, strict=True)
        ]
        return Evaluator(
            name="eval/accuracy",
            engine=Echo(rollouts),  # type: ignore[arg-type]
            sampling=sampling_params(temperature=0.5),
            prompts=prompts,
            batch=batch,
            mesh=make_mesh((2, 2, 2)),
            tokenizer=tokenizer,
            judge=lambda problems, texts: np.array(
                [[text == p.answer for text in row] for p, row in zip(problems, texts, strict=True)]
            ),
            key=jax.random.key(3),
        )

    return build


def test_every_problem_is_judged_once_in_order_and_fillers_are_not(evaluator):
    judged = evaluator()
    verdicts = list(judged.verdicts("params"))
    assert [len(v.problems) for v in verdicts] == [4, 3]
    assert [p.id for v in verdicts for p in v.problems] == [f"p/{i}" for i in range(7)]
    assert [t for v in verdicts for t in v.texts] == [[str(i), str(i) * 2] for i in range(7)]
    for v in verdicts:
        right = [[len(p.answer) == 1, len(p.answer) == 2] for p in v.problems]
        np.testing.assert_array_equal(v.correct_EN, right)
        np.testing.assert_array_equal(v.finished_EN, [[True, False]] * len(v.problems))


def test_all_batches_have_one_shape_and_keys_of_their_own(evaluator):
    judged = evaluator()
    list(judged.verdicts("params"))
    shapes = {call[1].tokens_PL.shape for call in judged.engine.calls}
    assert shapes == {(4, 2)}
    assert judged.engine.calls[0][2] != judged.engine.calls[1][2]
    assert {call[0] for call in judged.engine.calls} == {"params"}


def test_each_evaluation_draws_the_same_numbers(evaluator):
    judged = evaluator()
    first, second = judged("params"), judged("params")
    assert first == second
    keys = [call[2] for call in judged.engine.calls]
    assert keys[:2] == keys[2:]


def test_accuracy_is_the_mean_over_problems(evaluator):
    accuracy = evaluator(count=7)("params")
    assert accuracy["eval/accuracy"] == 0.5
    assert accuracy["eval/accuracy_standard_error"] == 0
    assert accuracy["eval/accuracy_truncated_fraction"] == 0.5
    greedy = evaluator(count=7, rollouts=1)("params")
    assert greedy["eval/accuracy"] == pytest.approx(4 / 7)
    share = np.array([1, 0, 1, 0, 1, 0, 1])
    assert greedy["eval/accuracy_standard_error"] == pytest.approx(share.std(ddof=1) / np.sqrt(7))
    assert greedy["eval/accuracy_truncated_fraction"] == 0


def test_the_standard_error_counts_problems_and_not_completions():
    correct = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    parts = [Verdicts([], [], correct[:1], correct[:1]), Verdicts([], [], correct[1:], ~correct[1:])]
    accuracy = accuracy_metrics("eval/accuracy", parts)
    assert accuracy["eval/accuracy"] == pytest.approx((0.75 + 0 + 1) / 3)
    assert accuracy["eval/accuracy_standard_error"] == pytest.approx(np.std([0.75, 0, 1], ddof=1) / np.sqrt(3))
    assert accuracy["eval/accuracy_truncated_fraction"] == pytest.approx((0.25 + 0 + 1) / 3)


def test_one_problem_has_no_standard_error():
    one = Verdicts([], [], np.array([[True]]), np.array([[True]]))
    assert accuracy_metrics("a", [one])["a_standard_error"] == 0
