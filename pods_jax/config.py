"""The run's configuration: frozen dataclasses, checked on construction.

Field docstrings are the text of ``--help``. ``config.py`` checks types, signs and arithmetic across fields; names that belong
to a table (task, rule, loss, ...) are checked by that table's lookup, before anything is allocated. Algorithms never see these
records: entry points, ``loop.py`` and the ``make_*`` builders unpack them into plain numbers.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RunConfig:
    """The run folder, its length and its randomness."""

    name: str = "default"
    """Name of the run; its folder is <dir>/<name>."""
    dir: str = "runs"
    """Folder that holds all runs."""
    steps: int = 120
    """Optimiser steps of the run."""
    seed: int = 0
    """Seed from which every random key of the run is folded, together with the step number."""
    resume: bool = True
    """Continue from the newest complete checkpoint when the run folder exists; false refuses an existing folder."""
    checkpoint_every: int = 40
    """Steps between checkpoints; a checkpoint is always written at the end."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay on disk."""
    export: bool = True
    """Write the final policy as a Hugging Face folder under <run>/export."""


@dataclass(frozen=True)
class ModelConfig:
    """The policy to post-train."""

    path: str = "bundled"
    """Hugging Face folder with config.json, safetensors and tokenizer files; "bundled" is the tiny model shipped with the package."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and matrix products; logits and log-probabilities are float32 always."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which parameters are stored and optimised."""
    layers: Literal["auto", "scan", "unroll"] = "auto"
    """Layer loop: scan compiles fast (the choice on TPU and GPU), unroll runs fast on a CPU; auto picks by backend."""


@dataclass(frozen=True)
class DataConfig:
    """Which problems are asked, and how they become prompts."""

    task: str = "arithmetic"
    """Entry of the TASKS table."""
    path: str | None = None
    """Local file or folder of the task's data; the bundled task generates its own and needs none."""
    system_prompt: str | None = None
    """System message put before every problem; unset takes the task's own (the bundled task has none)."""
    prompts_per_step: int = 2
    """Prompts (groups) of one optimiser step, over all devices (P)."""
    train_problems: int = 20_000
    """Training problems to generate or load; 0 takes all that the source has."""
    held_out_problems: int = 256
    """Held-out problems for evaluation; 0 takes all that the source has."""
    max_prompt_length: int = 64
    """Longest prompt in tokens (L); longer ones are dropped at load time with a count."""
    over_long: Literal["drop", "error"] = "drop"
    """What to do with a prompt over max_prompt_length; prompts are never truncated."""
    seed: int = 0
    """Seed of problem generation and of the order in which problems are drawn."""


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are generated."""

    n: int = 32
    """Rollouts generated for each prompt (N)."""
    max_completion_length: int = 32
    """Longest completion in tokens (C), EOS included."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy (only sensible for evaluation)."""
    top_k: int = 0
    """Sample among the k most probable tokens; 0 is off."""
    top_p: float = 1.0
    """Sample among the most probable tokens whose probabilities sum to top_p; 1 is off."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable; 0 is off."""
    chunk: int = 256
    """Decoding runs in chunks of this many tokens; the cache grows by one chunk at a time, so no step attends over the whole maximum."""


@dataclass(frozen=True)
class SelectionConfig:
    """Which m of the n rollouts are trained."""

    rule: str = "max_variance"
    """Entry of the RULES table: max_variance (PODS), random, percentile, max_reward, all (plain GRPO)."""
    m: int = 8
    """Rollouts kept for each prompt (M); the rule "all" keeps n whatever m says."""
    ties: Literal["random", "index"] = "random"
    """How equal rewards are ordered: at random under the step's key, or by rollout index."""


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages."""

    over: Literal["kept", "all"] = "kept"
    """Mean and standard deviation over the kept rollouts (the paper's), or over all n."""
    eps: float = 1e-4
    """Added to the standard deviation."""


@dataclass(frozen=True)
class LossConfig:
    """The policy-gradient objective."""

    name: str = "grpo"
    """Entry of the LOSSES table."""
    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The probability ratio is clipped above at 1 + clip_high."""
    beta: float = 0.0
    """Weight of the KL penalty (k3 estimator) towards the initial policy; 0 computes no reference at all."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, a schedule and clipping."""

    learning_rate: float = 1.5e-4
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up; linear and cosine end at final_fraction of the peak at the last step."""
    final_fraction: float = 0.0
    """Learning rate at the last step as a fraction of the peak, for the linear and cosine schedules."""
    warmup_steps: int = 5
    """Steps of linear warm-up from 0."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    beta2: float = 0.99
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay; norms and biases are not decayed."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 is off."""


@dataclass(frozen=True)
class UpdateConfig:
    """How the optimiser step is cut to fit memory. No choice here changes the gradient."""

    epochs: int = 1
    """Optimiser steps taken on each batch of kept rollouts."""
    micro_batch: int = 0
    """Rollouts of one micro-batch over all devices; 0 trains the whole batch at once."""
    remat: Literal["none", "layer"] = "none"
    """Recompute each layer's activations in the backward pass to save memory."""
    logit_chunk: int = 4_194_304
    """Most logits (rows x time x vocabulary) computed at once on one device; the vocabulary-sized array never exists whole."""


@dataclass(frozen=True)
class RewardConfig:
    """What a completion earns."""

    functions: list[str] = field(default_factory=lambda: ["correct", "format", "tag_count"])
    """Entries of the REWARDS table, or module:function for an own one; on the command line separated by commas."""
    weights: list[float] | None = None
    """One weight per function; unset takes each function's own (correct 1.0, format 0.1, tag_count 0.025 a tag, own functions 1.0)."""


@dataclass(frozen=True)
class MeshConfig:
    """Devices: groups are spread over data x fsdp, parameters over fsdp x tensor."""

    data: int = 1
    """Replicas of the parameters."""
    fsdp: int = -1
    """Shards of parameters and optimiser state; -1 takes all devices that remain."""
    tensor: int = 1
    """Shards of heads, feed-forward and vocabulary."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out problems during training."""

    every: int = 20
    """Steps between evaluations; step 0 and the last step are always evaluated. 0 is never."""
    samples: int = 0
    """Completions sampled for each problem besides the greedy one, for mean accuracy; 0 is greedy alone."""
    batch: int = 64
    """Problems generated at once, over all devices."""


@dataclass(frozen=True)
class LogConfig:
    """What is written while the run goes on."""

    texts_per_step: int = 16
    """Completions whose text is kept in rollouts.jsonl at each step; every rollout's numbers are kept always. -1 keeps all."""
    progress: bool = True
    """Live progress line on the terminal."""
    tensorboard: bool = True
    """Write TensorBoard events into <run>/tensorboard."""


@dataclass(frozen=True)
class Config:
    """PODS: many rollouts for each prompt, the most informative few trained."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
