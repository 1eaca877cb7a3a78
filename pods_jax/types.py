"""Records that pass between the parts of a step, and the legend of axis letters.

Axis letters, used as suffixes of array names and in jaxtyping annotations:

    P  prompts of the step (one prompt = one group)     D  model width
    N  rollouts generated for each prompt               F  feed-forward width
    M  rollouts kept of the N                           Q  query heads
    L  prompt tokens, padded on the right               K  key-value heads
    C  completion tokens, padded on the right           H  size of one head
    V  vocabulary                                       G  query heads per key-value head (Q / K)

Nothing is flattened to a batch with copied prompts: every array of a step keeps its group structure, and every mask comes
from a length, never from comparing a token with a padding id. Positions are ``0 .. length-1`` for a prompt and
``length + t`` for token ``t`` of a completion.
"""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Bool, Float, Int

from pods_jax.problem import Problem


@dataclass(frozen=True)
class Prompt:
    """A problem with its prompt tokens: chat template applied, exactly one BOS where the model uses one (host only)."""

    problem: Problem
    tokens: tuple[int, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptBatch:
    """The prompts of one step, padded on the right."""

    tokens_PL: Int[Array, "P L"]
    length_P: Int[Array, "P"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollouts:
    """What the rollout engine generated.

    ``logp_PNC`` is the log-probability of each sampled token under the temperature-scaled policy, 0 beyond the length.
    ``length_PN`` counts completion tokens including the EOS token; ``finished_PN`` is false for a completion cut at the limit.
    ``decoded_rows`` counts the rows that decoding computed, one a token, those of padding and of ended rollouts included; the
    first token of a rollout comes from its prompt and is not among them. ``entropy_PN`` is the mean entropy at a rollout's
    tokens in nats, from an engine that records it.
    """

    tokens_PNC: Int[Array, "P N C"]
    logp_PNC: Float[Array, "P N C"]
    length_PN: Int[Array, "P N"]
    finished_PN: Bool[Array, "P N"]
    decoded_rows: Float[Array, ""]
    entropy_PN: Float[Array, "P N"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Group:
    """What a selection rule sees of one prompt's rollouts; the record of a whole step has a leading axis of groups.

    Attributes:
        rewards_N: Total rewards, in any unit.
        valid_N: False for a rollout without a score. Rules see it false where the reward is not finite, too.
        parts: Each reward's own unweighted score by name; NaN where it could not score.
        length_N: Completion tokens, the EOS token included.
        finished_N: False for a completion cut at the limit.
        logp_N: Mean log-probability of the completion's tokens, in nats.
        entropy_N: Mean entropy at the completion's tokens, in nats; None where the engine does not record it.
    """

    rewards_N: Float[Array, "N"]
    valid_N: Bool[Array, "N"]
    parts: dict[str, Float[Array, "N"]] = field(default_factory=dict)
    length_N: Int[Array, "N"] | None = None
    finished_N: Bool[Array, "N"] | None = None
    logp_N: Float[Array, "N"] | None = None
    entropy_N: Float[Array, "N"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeptBatch:
    """The update's input: every prompt once for its group, the kept rollouts, and one weight for each of them.

    ``index_PM`` says which of its group's rollouts a slot holds; -1 is an empty slot (fewer valid rollouts than m).
    ``weight_PM`` is 1 for a rollout that is trained, and 0 for an empty slot or a group without signal. ``logp_old_PMC`` is
    what the rollout engine recorded.
    """

    prompt_PL: Int[Array, "P L"]
    prompt_length_P: Int[Array, "P"]
    tokens_PMC: Int[Array, "P M C"]
    length_PM: Int[Array, "P M"]
    logp_old_PMC: Float[Array, "P M C"]
    advantage_PM: Float[Array, "P M"]
    weight_PM: Float[Array, "P M"]
    index_PM: Int[Array, "P M"]
