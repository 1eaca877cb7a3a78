"""The run's configuration: frozen dataclasses, checked on construction.

Field docstrings are the text of ``--help``, and annotations are the limits (``fields.py``). This file checks types, signs and
arithmetic across fields; names that belong to a table (task, rule, loss, ...) are checked by that table's lookup, before
anything is allocated. Algorithms never see these records: ``assembly`` unpacks them into plain numbers.
"""

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from pods_jax.config.fields import (
    Checked,
    ConfigError,
    Count,
    CountOrAll,
    CountOrRest,
    CountOrZero,
    Fraction,
    FractionBelowOne,
    NonNegative,
    Positive,
    PositiveFraction,
    Seed,
)


@dataclass(frozen=True)
class RunConfig(Checked, key="run"):
    """The run folder, its length and its randomness."""

    name: str = "default"
    """Name of the run; its folder is <dir>/<name>."""
    dir: str = "runs"
    """Folder that holds all runs."""
    steps: Count = 200
    """Steps of the run, each with a rollout, and an update wherever there is signal."""
    seed: Seed = 0
    """Seed from which every random key of the run is folded, together with the step number."""
    resume: bool = True
    """Continue from the newest complete checkpoint when the run folder exists; false refuses an existing folder."""
    checkpoint_every: Count = 40
    """Steps between checkpoints; a checkpoint is always written at the end."""
    keep_checkpoints: Count = 2
    """How many of the newest checkpoints stay on disk."""
    export: bool = True
    """Write the final policy as a Hugging Face folder under <run>/export."""
    compile_cache: str = "auto"
    """Where compiled programs are kept for the next start: a folder or address that all hosts share; auto is what
    JAX_COMPILATION_CACHE_DIR says, or else pods_jax/compiled in the user's cache folder on a single host; off keeps none."""

    def __post_init__(self):
        super().__post_init__()
        if PurePath(self.name).name in ("", ".."):
            raise ConfigError(f"run.name={self.name!r} names no folder under run.dir")


@dataclass(frozen=True)
class ModelConfig(Checked, key="model"):
    """The policy to post-train."""

    path: str = "bundled"
    """Hugging Face folder (config, safetensors, tokenizer), PEFT folder, or Hub id; "bundled" and "bundled-scarce" are the
    package's tiny models, which solve a third and a tenth of their task."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model; unset takes the newest."""
    tokenizer: str | None = None
    """Folder or Hub id whose tokenizer and chat template are used, and exported, in place of the model's own."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and matrix products; logits and log-probabilities are float32 always."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the exported weights, and of the base next to adapters. What is trained is float32 always, moments too: in
    bfloat16 most updates would round to nothing."""


@dataclass(frozen=True)
class LoraConfig(Checked, key="lora"):
    """Low-rank adapters: train these alone, beside a frozen model."""

    rank: CountOrZero = 0
    """Rank of the adapters; 0 trains every parameter instead."""
    alpha: Positive | None = None
    """The adapters' output is scaled by alpha / rank; unset is alpha = rank."""
    targets: list[str] = field(default_factory=lambda: ["q", "k", "v", "o", "gate", "up", "down"])
    """Projections that carry an adapter; on the command line separated by commas."""


@dataclass(frozen=True)
class DataConfig(Checked, key="data"):
    """Which problems are asked, and how they become prompts."""

    task: str = "arithmetic"
    """Entry of the TASKS table (arithmetic, gsm8k, math, sciknoweval_chemistry, amc23, jsonl), or reasoning_gym:<data set>."""
    path: str | None = None
    """Local file or folder (JSON lines, JSON, Parquet), or id of a Hub data set; unset takes the task's own on the Hub."""
    held_out_path: str | None = None
    """As path, for the held-out problems alone; unset takes those of path: its test split, or one question in eight."""
    subset: str | None = None
    """Subset (configuration) of the Hub data set, or folder of that name in path; unset takes the task's own."""
    revision: str | None = None
    """Branch, tag or commit of the Hub data set; unset takes the newest."""
    train_split: str | None = None
    """Name of the training split; unset takes the task's own, mostly "train"."""
    held_out_split: str | None = None
    """Name of the held-out split; unset takes the task's own, mostly "test"."""
    question_column: str = "question"
    """Column of the question, for the task jsonl."""
    answer_column: str = "answer"
    """Column of the gold answer, for the task jsonl."""
    solution_column: str | None = None
    """Column of a worked solution to show in worked examples, for the task jsonl."""
    choices_column: str | None = None
    """Column of the options, for multiple choice in the task jsonl: a list of texts, or lists named text and label."""
    answer_kind: str = "math"
    """How answers are compared with the gold answer, for the task jsonl: math, number, choice, equation, text or exact;
    choices_column makes it choice."""
    options: list[str] = field(default_factory=list)
    """Settings of a reasoning_gym data set, or times_share=0.4 of the arithmetic task (its share of multiplications), each
    key=value; on the command line separated by commas."""
    chat_template: str | None = None
    """File of a chat template (Jinja) to use, and to export, in place of the tokenizer's own."""
    template_options: list[str] = field(default_factory=list)
    """Variables of the chat template, each name=value (enable_thinking=false of Qwen3), exported with it; on the command line
    separated by commas."""
    few_shot: CountOrZero = 0
    """Worked examples put before every problem, taken out of the training problems."""
    system_prompt: str | None = None
    """System message put before every problem; unset takes the task's own (the bundled task has none)."""
    prompts_per_step: Count = 4
    """Prompts (groups) of one optimiser step, over all devices (P)."""
    train_problems: CountOrZero = 20_000
    """Training problems to generate, or the most to load; 0 takes all that the source has."""
    held_out_problems: CountOrZero = 256
    """Held-out problems to generate, or the most to load; 0 takes all that the source has."""
    max_prompt_length: Count = 64
    """Longest prompt in tokens (L); longer ones are dropped at load time with a count."""
    over_long: Literal["drop", "error"] = "drop"
    """What to do with a prompt over max_prompt_length; prompts are never truncated."""
    seed: Seed = 0
    """Seed of problem generation and of the order in which problems are drawn."""


@dataclass(frozen=True)
class RolloutConfig(Checked, key="rollout"):
    """How completions are generated."""

    n: Count = 32
    """Rollouts generated for each prompt (N)."""
    max_completion_length: Count = 40
    """Longest completion in tokens (C), EOS included."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 is greedy (only sensible for evaluation)."""
    top_k: CountOrZero = 0
    """Sample among the k most probable tokens; 0 is off."""
    top_p: PositiveFraction = 1.0
    """Sample among the most probable tokens whose probabilities sum to top_p; 1 is off."""
    min_p: FractionBelowOne = 0.0
    """Drop tokens less probable than min_p times the most probable; 0 is off."""

    @property
    def greedy_by(self) -> str:
        """The setting that makes every rollout of a prompt the same, or an empty string."""
        if self.temperature == 0:
            return "rollout.temperature=0"
        return "rollout.top_k=1" if self.top_k == 1 else ""


@dataclass(frozen=True)
class SelectionConfig(Checked, key="selection"):
    """Which m of the n rollouts are trained."""

    rule: str = "max_variance"
    """Entry of the RULES table: max_variance (PODS), random, percentile, max_reward, all (plain GRPO); or module:function."""
    options: list[str] = field(default_factory=list)
    """Numbers of an own rule, each name=number; on the command line separated by commas."""
    m: Count = 8
    """Rollouts kept for each prompt (M); the rule "all" keeps n whatever m says."""
    ties: str = "random"
    """Entry of the TIES table: how equal rewards are ordered, random (under the step's key) or index (of the rollout)."""


@dataclass(frozen=True)
class AdvantageConfig(Checked, key="advantage"):
    """How rewards become advantages."""

    over: str = "kept"
    """Entry of the ADVANTAGES table: mean and standard deviation over the kept rollouts (the paper's), or over all n; or
    module:function."""
    options: list[str] = field(default_factory=list)
    """Numbers of an own advantage, each name=number; on the command line separated by commas."""
    eps: NonNegative = 1e-4
    """Added to the standard deviation."""


@dataclass(frozen=True)
class LossConfig(Checked, key="loss"):
    """The policy-gradient objective."""

    name: str = "grpo"
    """Entry of the LOSSES table: grpo (mean over each sequence, then over sequences), dapo (mean over all tokens), grpo_entropy
    (grpo with an entropy bonus); or module:function."""
    options: list[str] = field(default_factory=list)
    """Numbers of the loss's own, each name=number (entropy_bonus=0.01 of grpo_entropy); on the command line separated by
    commas."""
    clip_low: Fraction = 0.2
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegative = 0.2
    """The probability ratio is clipped above at 1 + clip_high."""
    beta: NonNegative = 0.0
    """Weight of the KL penalty (k3 estimator) towards the initial policy; 0 computes no reference at all."""


@dataclass(frozen=True)
class OptimizerConfig(Checked, key="optimizer"):
    """AdamW with warm-up, a schedule and clipping."""

    learning_rate: Positive = 2e-4
    """Peak learning rate."""
    schedule: str = "constant"
    """Entry of the SCHEDULES table: constant, linear or cosine after warm-up. Linear and cosine reach final_fraction of the
    peak as the run's steps end, whatever update.epochs is."""
    final_fraction: Fraction = 0.0
    """Where the linear and cosine schedules end, as a fraction of the peak."""
    warmup_steps: CountOrZero = 5
    """Steps of the run with linear warm-up; the first already has 1/warmup_steps of the peak."""
    beta1: FractionBelowOne = 0.9
    """Adam's decay of the first moment."""
    beta2: FractionBelowOne = 0.99
    """Adam's decay of the second moment."""
    eps: Positive = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay; norms and biases are not decayed."""
    clip_norm: NonNegative = 1.0
    """Largest global gradient norm; 0 is off."""


@dataclass(frozen=True)
class UpdateConfig(Checked, key="update"):
    """What an optimiser step trains, and how it is cut to fit memory; how it is cut never changes the gradient."""

    epochs: Count = 1
    """Optimiser steps taken on each batch of kept rollouts."""
    skip_no_signal: bool = True
    """Leave groups whose kept rewards are all equal out of the update, which shrinks, and out of the loss's mean. False trains
    them too, with advantage 0, as GRPO was published."""
    micro_batch: CountOrZero = 0
    """Rollouts of one micro-batch over all devices; 0 trains the whole batch at once."""
    remat: Literal["none", "layer"] = "none"
    """Recompute each layer's activations in the backward pass to save memory."""


@dataclass(frozen=True)
class TuningConfig(Checked, key="tuning"):
    """What suits the machine, and changes nothing of what is learned but rounding; unset and 0 choose by themselves."""

    layers: Literal["auto", "scan", "unroll"] = "auto"
    """Layer loop: scan compiles fast (the choice on TPU and GPU), unroll runs fast on a CPU; auto picks by backend."""
    cache_chunk: CountOrZero = 0
    """Tokens by which the rollout's cache grows; 0 takes what suits the backend (32 on a CPU, else 256)."""
    rollout_rungs: CountOrZero | None = None
    """Sizes from one half to the next to which the batch shrinks once rollouts have ended, each a set of compiled programs; 0
    decodes every row to the end. Unset chooses 0 to 3: more, the longer generating takes next to compiling."""
    lanes: CountOrZero = 0
    """Parts of the prompts that a single device generates side by side, each on a thread of its own; 0 takes one for each core
    of a CPU where the model is small enough for that to pay, and 1 elsewhere."""
    update_rungs: CountOrZero | None = None
    """Sizes from one half to the next that an update has once completions are packed without padding and groups without signal
    are left out, each a compiled program; 0 trains one size, with all padding. Unset chooses 0 to 3, as rollout_rungs does."""
    logit_chunk: Count = 4_194_304
    """Most logits (rows x time x vocabulary) computed at once on one device; the vocabulary-sized array never exists whole."""


@dataclass(frozen=True)
class RewardConfig(Checked, key="reward"):
    """What a completion earns."""

    functions: list[str] = field(default_factory=lambda: ["correct", "format", "tag_count"])
    """Entries of the REWARDS table, or module:function for an own one; on the command line separated by commas."""
    weights: list[float] | None = None
    """One weight per function; unset takes each function's own (correct 1, format 0.1, tag_count 0.025 a tag, any other 1)."""
    length_margin: PositiveFraction = 0.2
    """Share of rollout.max_completion_length, at its end, over which the reward "length" falls from 0 to -1."""

    def __post_init__(self):
        super().__post_init__()
        names, weights = self.functions, self.weights
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"reward.functions={','.join(names)} must name at least one function, and none twice")
        if weights is not None and len(weights) != len(names):
            raise ConfigError(f"reward.weights has {len(weights)} numbers for the {len(names)} of reward.functions")


@dataclass(frozen=True)
class VerifyConfig(Checked, key="verify"):
    """How answers are found and verified, for rewards and for evaluation."""

    sources: list[str] = field(default_factory=lambda: ["answer", "boxed"])
    """Where an answer may stand. The first of answer (<answer>...</answer>), boxed and last_number that is there decides."""
    time_limit: Positive = 5.0
    """Seconds of wall-clock time to verify one answer, or for one call of an own reward; a late one is invalid and counted."""
    memory_limit_mb: Count = 1024
    """MiB of memory for the same."""
    workers: CountOrZero = 0
    """Processes that verify; 0 takes one for each CPU core, at most 8. None starts before an answer needs one."""

    def __post_init__(self):
        super().__post_init__()
        if not self.sources or len(set(self.sources)) < len(self.sources):
            raise ConfigError(f"verify.sources={','.join(self.sources)} must name at least one source, and none twice")


@dataclass(frozen=True)
class MeshConfig(Checked, key="mesh"):
    """Devices: groups are spread over data x fsdp, parameters over fsdp x tensor."""

    data: Count = 1
    """Replicas of the parameters."""
    fsdp: CountOrRest = -1
    """Shards of parameters and optimiser state; -1 takes all devices that remain."""
    tensor: Count = 1
    """Shards of heads, feed-forward and vocabulary."""
    distributed: bool = False
    """Join the other hosts at start (jax.distributed; TPU pods, SLURM and Open MPI are recognised by themselves)."""


@dataclass(frozen=True)
class EvalConfig(Checked, key="eval"):
    """Evaluation on held-out problems during training."""

    every: CountOrZero = 20
    """Steps between evaluations; step 0 and the last step are always evaluated. 0 is never."""
    samples: CountOrZero = 0
    """Completions sampled for each problem besides the greedy one, for mean accuracy; 0 is greedy alone."""
    batch: Count = 64
    """Problems generated at once, over all devices."""


@dataclass(frozen=True)
class LogConfig(Checked, key="log"):
    """What is written while the run goes on."""

    texts_per_step: CountOrAll = 128
    """Completions whose text is kept in rollouts.jsonl at each step; every rollout's numbers are kept always. -1 keeps all."""
    progress: bool = True
    """Live progress line on the terminal."""
    sinks: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Where metrics go besides the run's files, which are always written: entries of the SINKS table (tensorboard, wandb,
    trackio), or module:function; on the command line separated by commas. jsonl alone is the files and nothing else."""
