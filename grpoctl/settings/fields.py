"""Every setting, declared once: flags, YAML keys, environment variables, JSON schema and docs are rendered from here.

Imports neither torch nor pyarrow. What can't change a result is in `runtime.py` and stays outside every fingerprint.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from grpoctl.settings.engines import ForwardEngineName, SamplingEngineName, TrainingEngineName


class Flag(str):
    """A command-line flag, as metadata of the field that it sets."""

    __slots__ = ()


class Gate:
    """Marks a limit that only decides whether a result is accepted; it stays outside the fingerprint, as `runtime` does."""


GATE: Final = Gate()


class Section(BaseModel):
    """Base of all settings: frozen, strict, unknown keys refused, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def defining(section: Section) -> dict[str, Any]:
    """Return the settings of a section that define a result: all but its gates."""
    gates = {
        name for name, field in type(section).model_fields.items() if any(isinstance(m, Gate) for m in field.metadata)
    }
    return section.model_dump(mode="json", exclude=gates)


Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Words = Annotated[tuple[str, ...], Field(strict=False)]
Numbers = Annotated[tuple[int, ...], Field(strict=False)]

Dtype = Literal["float32", "bfloat16"]


class PromptsConfig(Section):
    """Where prompts come from and how a row becomes token ids."""

    path: Annotated[str, Flag("--prompts")] = "builtin:addition"
    """Parquet, JSONL, JSON, CSV or Arrow file, folder or glob on any fsspec URL; `builtin:addition` is the shipped task."""
    split: str | None = None
    """Which of the splits of a folder is read (train, test, validation …); one that holds several is never read as one."""
    format: Annotated[Literal["auto", "trl", "verl", "openrlhf"], Flag("--format")] = "auto"
    """Whose column names the file has: trl and verl call the prompt `prompt`, openrlhf `input`; auto looks and says."""
    column: Annotated[str | None, Flag("--prompt-column")] = None
    """Column with the prompt (by default the format's): text, a message list, or one as JSON; dots reach into structs."""
    id_column: str | None = None
    """Column with a unique id; by default sha256(file)[:8]:row."""
    limit: Annotated[int | None, Field(ge=1), Flag("--limit")] = None
    """Use only the first rows of the file."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto` applies the tokenizer's chat template to message lists and leaves text alone; `always` wraps text as one
    user message."""
    overlong: Literal["error", "skip", "truncate_left"] = "error"
    """What happens to a prompt that leaves no room for a completion in the model's context."""
    cap_to_context: bool = False
    """Allow fewer than max_new_tokens where prompt + max_new_tokens exceeds the context."""
    allow_empty: bool = False
    """Accept empty or whitespace prompts."""


class RolloutConfig(Section):
    """Sampling: how many completions, from which distribution."""

    engine: Annotated[SamplingEngineName, Flag("--engine")] = "hf"
    """Sampler: `hf` is transformers' generate, `vllm` runs in the stage's own process, `server` asks those of --server."""
    group_size: Annotated[int, Field(ge=1), Flag("--group-size")] = 8
    """G, completions sampled for each prompt."""
    prompts_per_iteration: Annotated[int | None, Field(ge=1), Flag("--prompts-per-iteration")] = None
    """Prompts of one iteration, dealt from a shuffle by (file digest, seed, epoch); all prompts by default."""
    temperature: Annotated[float, Field(gt=0.0), Flag("--temperature")] = 1.0
    """Logits are divided by it; logprob and update take it from the rollouts."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus; below 1 the rollouts are refused for training unless update.allow_truncated_sampling is set."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep only the k most likely tokens; 0 keeps all. Same restriction as top_p."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Drop tokens less likely than min_p times the likeliest. Same restriction as top_p."""
    max_new_tokens: Annotated[int, Field(ge=1), Flag("--max-new-tokens")] = 256
    """Sampling limit, tokens."""
    stop: Words = ()
    """Strings that end a completion; the tokens that complete one are kept, the text is cut before it."""
    stop_token_ids: Numbers = ()
    """Token ids that end a completion, besides the model's own."""
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """Completions that hit max_new_tokens: train on them, mask all their tokens, or fail the row."""
    max_truncated_ratio: Annotated[float, Field(ge=0.0, le=1.0), GATE] = 0.95
    """Share of completions that may hit max_new_tokens; above it the stage fails (exit 4); above 0.5 it warns."""
    failed_budget: Annotated[float, Field(ge=0.0, le=1.0), GATE] = 0.0
    """Share of rows that may fail in the engine (aborted, log-probability missing or not finite)."""
    prompts_per_shard: Positive = 64
    """Prompts in one shard: the unit that a crash loses at most."""
    dtype: Dtype = "float32"
    """Floating-point type of the sampler's weights."""


class RewardConfig(Section):
    """One reward function."""

    ref: str
    """Built-in name, `package.module:function`, `path/file.py:function`, entry point, or an http(s) URL."""
    name: str | None = None
    """Column under `rewards`; by default the function's name."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    signature: Literal["auto", "row", "trl", "verl", "verl_batch", "openrlhf", "http"] = "auto"
    """How the function is called; `auto` decides by its parameter names and refuses when unsure."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed on every call."""
    allow_null: bool = False
    """Hand a null reference column to the function as None instead of refusing the data."""

    @model_validator(mode="before")
    @classmethod
    def _from_reference(cls, value: Any) -> Any:
        return {"ref": value} if isinstance(value, str) else value


AdvantageName = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "passk", "batch", "none"
]


class ScoreConfig(Section):
    """Rewards and advantages."""

    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False), Flag("--reward")] = ()
    """Reward functions; the reward is the weighted sum of those that scored the row (None leaves one out, as in TRL)."""
    reward_model: Annotated[str | None, Flag("--reward-model")] = None
    """Value-head reward model, a folder or REF; its raw score is one more reward, named `reward_model`."""
    reward_model_weight: float = 1.0
    """Factor of the reward model's score in the weighted sum."""
    reward_model_dtype: Dtype = "float32"
    """Floating-point type of the reward model's forward; its weights and its head are float32."""
    advantages: Annotated[AdvantageName, Flag("--advantages")] = "grpo"
    """Estimator."""
    advantage_eps: Annotated[float, Field(ge=0.0)] = 1e-6
    """Added to a standard deviation before dividing by it (verl 1e-6, TRL 1e-4)."""
    kl_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """KL as part of the reward: weight of the per-token penalty old − ref; needs logprobs with both columns."""
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 10.0
    """Deadline of one call of a reward function."""
    error_budget: Annotated[float, Field(ge=0.0, le=1.0), GATE] = 0.01
    """Share of rows whose reward may time out, raise or crash; beyond it the stage fails (exit 6)."""
    fail_if_all_equal: Annotated[Literal["first", "always", "never"], GATE] = "first"
    """Fail (exit 4) when every reward of the artifact is the same: `first` checks iteration 0 only, later ones warn."""
    incomplete_groups: Literal["use", "drop", "error"] = "drop"
    """Groups with failed or unscored members: use the scored ones, drop the group, or stop (exit 4)."""
    incomplete_budget: Annotated[float, Field(ge=0.0, le=1.0), GATE] = 0.1
    """Share of groups that may be dropped as incomplete; beyond it the stage fails (exit 4)."""


class LogprobConfig(Section):
    """Recomputing log-probabilities with the training framework."""

    engine: Annotated[ForwardEngineName, Flag("--engine")] = "torch"
    """Training framework whose forward runs: the one that `update` uses, so that the first ratio is 1."""
    dtype: Dtype = "float32"
    """Floating-point type of the weights; the softmax is float32 in any case."""
    entropy: bool = False
    """Also write the old policy's entropy at each position."""
    gap_warn: Annotated[float | None, Field(ge=0.0), GATE] = None
    """Mean |rollout_logprobs − old_logprobs| that warns, nats; by default 1e-4 where both are float32, else 0.05."""
    gap_limit: Annotated[float | None, Field(ge=0.0), GATE] = None
    """Mean gap that fails the stage (exit 4): the sampler wasn't the declared policy; by default 1e-3 or 0.15."""
    gap_max_limit: Annotated[float | None, Field(ge=0.0), GATE] = None
    """Largest gap of one token that fails the stage (exit 4), so that a few wrong rows can't hide in a mean; by default 20
    times gap_limit."""


LossName = Literal["ppo_clip", "gspo", "cispo", "sapo", "gpg", "geo_mean", "dppo_tv", "dppo_kl", "reinforce"]
AggregationName = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlName = Literal[
    "k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "kl", "mse", "low_var_kl", "kl+", "mse+", "low_var_kl+"
]


class LoraConfig(Section):
    """Low-rank adapters: train these instead of the weights."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[float, Field(gt=0.0)] = 16.0
    """The adapters' product is multiplied by alpha / rank."""
    targets: Words = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter, by their last part."""
    dropout: Literal[0] = 0
    """Always 0: with dropout the first ratio isn't 1 and a rerun isn't the same."""


class UpdateConfig(Section):
    """The optimizer steps over one artifact of rollouts."""

    engine: Annotated[TrainingEngineName, Flag("--engine")] = "torch"
    """Training framework: `torch` is plain on one process and FSDP2 on several; `deepspeed` is ZeRO (runtime.deepspeed);
    `megatron` is Megatron-LM's layers (runtime.megatron)."""
    loss: Annotated[LossName, Flag("--loss")] = "ppo_clip"
    """Policy loss."""
    clip_low: Annotated[float, Field(ge=0.0)] = 0.2
    """ε_low: the ratio is clipped at 1 − ε_low."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.2
    """ε_high: the ratio is clipped at 1 + ε_high."""
    dual_clip: Annotated[float | None, Field(gt=1.0)] = None
    """Bounds the loss of negative advantages to −A times this; null leaves it unbounded."""
    tau_positive: Annotated[float, Field(gt=0.0)] = 1.0
    """SAPO's temperature for positive advantages."""
    tau_negative: Annotated[float, Field(gt=0.0)] = 1.05
    """SAPO's temperature for the others."""
    ratio_cap: Annotated[float, Field(gt=0.0)] = 20.0
    """DPPO's truncation of the importance ratio."""
    aggregation: Annotated[AggregationName, Flag("--aggregation")] = "token-mean"
    """How per-token losses become one number."""
    norm_tokens: Annotated[int | None, Field(ge=1)] = None
    """Constant of seq-mean-token-sum-norm; by default the rollouts' max_new_tokens."""
    kl_coef: Annotated[float, Field(ge=0.0), Flag("--kl-coef")] = 0.0
    """Weight of the KL term in the loss; above 0 logprobs with ref_logprobs are needed."""
    kl_estimator: KlName = "k3"
    """Estimator of the KL term."""
    kl_times_ratio: bool = False
    """Multiply the KL estimate by the policy ratio, which keeps it unbiased off-policy."""
    old: Literal["old_logprobs", "rollout_logprobs"] = "old_logprobs"
    """Denominator of the ratio: recomputed by the training framework, or kept by the sampler."""
    correction: Literal["none", "tis", "mis", "icepop"] = "none"
    """Off-policy correction between rollout_logprobs and old_logprobs."""
    correction_level: Literal["token", "sequence"] = "token"
    """Weights by token, or by the product over the completion."""
    correction_cap: Annotated[float, Field(gt=0.0)] = 2.0
    """Upper bound of the weights."""
    correction_floor: Annotated[float | None, Field(ge=0.0)] = None
    """Lower bound of the weights; icepop needs one."""
    epochs: Annotated[int, Field(ge=1), Flag("--epochs")] = 1
    """Passes over the rollouts."""
    mini_batch_size: Annotated[int | None, Field(ge=1), Flag("--mini-batch-size")] = None
    """Completions per optimizer step; a multiple of the group size unless shuffle is `completions`. All by default."""
    shuffle: Literal["groups", "completions", "none"] = "groups"
    """What is shuffled over mini-batches, by (rollouts digest, seed, epoch)."""
    groups_without_signal: Literal["keep", "drop"] = "keep"
    """Groups whose advantages are all 0: keep their tokens in the denominator (and their KL), or leave them out."""
    without_signal: Annotated[Literal["stop", "pass_on"], GATE] = "stop"
    """A batch in which no group has differing rewards: stop (exit 4), or pass the policy on unchanged as next version."""
    lr: Annotated[float, Field(ge=0.0), Flag("--lr")] = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warmup, as a function of the global step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warmup."""
    total_steps: Annotated[int | None, Field(ge=1)] = None
    """Global step at which linear and cosine schedules end; required by them."""
    lr_end_fraction: Fraction = 0.0
    """Where linear and cosine schedules end, as a share of lr."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW's first moment."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """AdamW's second moment."""
    adam_eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay on matrices; norms and biases have none."""
    grad_clip: Annotated[float | None, Field(gt=0.0)] = 1.0
    """Largest global gradient norm; null doesn't clip."""
    dtype: Dtype = "float32"
    """Floating-point type of the forward; master weights and optimizer are float32."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters."""
    max_staleness: Annotated[int, Field(ge=0), GATE] = 0
    """Versions that the rollouts' policy may lie behind the one being updated."""
    allow_truncated_sampling: Annotated[bool, GATE] = False
    """Accept rollouts drawn with top_p, top_k or min_p, whose log-probabilities aren't those of the policy."""
    max_nonfinite_steps: Annotated[int, Field(ge=0)] = 0
    """Steps that may be skipped for a non-finite loss or gradient before the stage fails (exit 4)."""
    max_kl: Annotated[float | None, Field(gt=0.0), GATE] = None
    """Gate: mean KL of a step above which the stage fails (exit 4)."""
    max_ratio: Annotated[float | None, Field(gt=1.0), GATE] = None
    """Gate: largest ratio of a step above which the stage fails (exit 4)."""
    max_grad_norm: Annotated[float | None, Field(gt=0.0), GATE] = None
    """Gate: gradient norm above which the stage fails (exit 4)."""
    entropy: bool = True
    """Report the policy's mean entropy at each step."""
    token_stats: bool = False
    """Write per-token log-probability, ratio, clip and loss of the first epoch beside the steps."""
    num_probe_rows: Annotated[int, Field(ge=0)] = 4
    """Completions whose log-probabilities under the new policy are stored, for sync to compare after publishing."""

    @model_validator(mode="after")
    def _together(self) -> UpdateConfig:
        if self.lr_schedule != "constant" and self.total_steps is None:
            raise ValueError(f"lr_schedule {self.lr_schedule} needs total_steps")
        if self.correction == "icepop" and self.correction_floor is None:
            raise ValueError("correction icepop needs correction_floor")
        if self.engine == "megatron" and self.lora.rank:
            raise ValueError("engine megatron trains whole weights; lora needs engine torch or deepspeed")
        if self.correction != "none" and self.old == "rollout_logprobs":
            raise ValueError("correction needs old: old_logprobs; with rollout_logprobs the ratio corrects already")
        return self


class SyncConfig(Section):
    """Publishing a new policy."""

    adapters: Literal["merged", "beside"] = "merged"
    """Low-rank adapters: `merged` into the policy's weights alone, or also `beside` them, as the folder `adapter` in peft's
    format: for runtime.vllm_adapters, for peft, for other servers. A version that is published already stays as it is."""

    max_probe_gap: Annotated[float, Field(gt=0.0), GATE] = 1e-3
    """Largest |Δ log-probability| on the probe rows between the update engine and the published folder, nats."""


class RewardModelConfig(Section):
    """Fitting a value-head reward model to pairs of answers."""

    prompt_column: str = "prompt"
    """Column with what both answer, text or messages; may be absent where chosen and rejected are whole texts or
    conversations."""
    chosen_column: str = "chosen"
    """Column with the better answer: text, or a message list."""
    rejected_column: str = "rejected"
    """Column with the other answer."""
    epochs: Annotated[int, Field(ge=1), Flag("--epochs")] = 1
    """Passes over the pairs."""
    batch_size: Annotated[int, Field(ge=1), Flag("--batch-size")] = 32
    """Pairs per optimizer step."""
    lr: Annotated[float, Field(gt=0.0), Flag("--lr")] = 1e-5
    """Peak learning rate: linear warmup, then linear decay to 0."""
    warmup_fraction: Fraction = 0.1
    """Share of the steps that warm up."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay on matrices."""
    grad_clip: Annotated[float | None, Field(gt=0.0)] = 1.0
    """Largest global gradient norm; null doesn't clip."""
    head_only: Annotated[bool, Flag("--head-only")] = False
    """Train the head alone and leave the language model as it is; use a learning rate near 1e-2 then."""
    holdout_fraction: Annotated[float, Field(ge=0.0, lt=1.0), Flag("--holdout-fraction")] = 0.1
    """Share of the pairs kept out of training for the accuracy that is reported; pairs of one prompt stay together."""
    max_tokens: Annotated[int | None, Field(ge=1), Flag("--max-tokens")] = None
    """Longest text of a pair, template included; by default the model's context."""
    overlong: Literal["error", "skip"] = "error"
    """What happens to a pair with a longer text."""
    dtype: Dtype = "float32"
    """Floating-point type of the forward; weights and optimizer are float32."""
