"""Jobs: the inputs, output and settings of one stage, and the pipeline file that holds the settings of all.

What a command's flags, a section of a pipeline file and a line to a stage's interpreter all become.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from grpoctl.settings.fields import (
    Flag,
    LogprobConfig,
    PromptsConfig,
    RewardModelConfig,
    RolloutConfig,
    ScoreConfig,
    Section,
    SyncConfig,
    UpdateConfig,
)
from grpoctl.settings.runtime import RuntimeConfig, ServeConfig


class Job(Section):
    """Inputs, output and settings of one stage: everything its command line can say."""

    runs_forward: ClassVar[bool] = False
    """Whether the training framework's forward runs, so that --micro-batch-tokens means something."""
    output_field: ClassVar[str] = "out"
    """Name of the field that holds what it writes."""

    runtime: RuntimeConfig = RuntimeConfig()
    """What never changes the result."""

    @classmethod
    def of(cls, config: PipelineConfig, inputs: Mapping[str, Any]) -> Self:
        """Return the job of a pipeline's iteration: the same record that its command would fill from flags.

        Args:
            config: settings, by the names that a job and a pipeline file share
            inputs: everything else by the job's names, such as rollouts, policy, out, iteration; those it lacks are left
        """
        shared = {name: getattr(config, name) for name in cls.model_fields if name in PipelineConfig.model_fields}
        given = {name: value for name, value in inputs.items() if name in cls.model_fields}
        return cls(**{**shared, **given})

    @property
    def output(self) -> str:
        """Artifact or folder to write."""
        return getattr(self, self.output_field)


Servers = Annotated[tuple[str, ...], Field(strict=False)]


class RolloutJob(Job):
    """Sample G completions for each prompt."""

    prompts: PromptsConfig = PromptsConfig()
    """Prompts."""
    policy: Annotated[str, Flag("--policy")] = "builtin:tiny"
    """Policy REF: folder, fsspec URL, hub id (org/name@revision) or builtin:tiny."""
    seed: Annotated[int, Field(ge=0), Flag("--seed")] = 0
    """Run seed."""
    iteration: Annotated[int, Field(ge=0), Flag("--iteration")] = 0
    """Iteration number; part of every identity."""
    out: Annotated[str, Flag("--out")] = "rollouts"
    """Artifact to write."""
    servers: Annotated[Servers, Flag("--server")] = ()
    """Addresses of running vLLM or SGLang servers, one a replica, as http://HOST:PORT; for engine server."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""


class ScoreJob(Job):
    """Reward each completion and compare it with its group."""

    rollouts: Annotated[str, Flag("--rollouts")] = "rollouts"
    """Rollouts artifact."""
    logprobs: Annotated[str | None, Flag("--logprobs")] = None
    """Logprobs artifact; needed only for score.kl_coef."""
    iterations: Annotated[int | None, Field(ge=1)] = None
    """Iterations of the whole run, for rewards that ask (TRL's trainer_state.max_steps); `run` fills it in."""
    out: Annotated[str, Flag("--out")] = "scores"
    """Artifact to write."""
    score: ScoreConfig = ScoreConfig()
    """Rewards and advantages."""

    @classmethod
    def of(cls, config: PipelineConfig, inputs: Mapping[str, Any]) -> Self:
        """Return an iteration's job; log-probabilities are read for a KL penalty only."""
        return super().of(config, inputs if config.score.kl_coef > 0 else {**inputs, "logprobs": None})


class LogprobJob(Job):
    """Recompute log-probabilities with the training framework."""

    runs_forward: ClassVar[bool] = True

    rollouts: Annotated[str, Flag("--rollouts")] = "rollouts"
    """Rollouts artifact."""
    policy: Annotated[str | None, Flag("--policy")] = None
    """Policy REF for old_logprobs: the one that sampled."""
    reference: Annotated[str | None, Flag("--reference")] = None
    """Policy REF for ref_logprobs."""
    out: Annotated[str, Flag("--out")] = "logprobs"
    """Artifact to write."""
    logprob: LogprobConfig = LogprobConfig()
    """Precision and gates."""

    @classmethod
    def of(cls, config: PipelineConfig, inputs: Mapping[str, Any]) -> Self:
        """Return an iteration's job; the policy's own are recomputed where the ratio divides by them."""
        return super().of(config, inputs if config.update.old == "old_logprobs" else {**inputs, "policy": None})


class UpdateJob(Job):
    """Take the optimizer steps over one batch of rollouts."""

    runs_forward: ClassVar[bool] = True

    rollouts: Annotated[str, Flag("--rollouts")] = "rollouts"
    """Rollouts artifact."""
    scores: Annotated[str, Flag("--scores")] = "scores"
    """Scores artifact."""
    logprobs: Annotated[str | None, Flag("--logprobs")] = None
    """Logprobs artifact."""
    policy: Annotated[str, Flag("--policy")] = "builtin:tiny"
    """Policy REF to update."""
    resume_from: Annotated[str | None, Flag("--resume-from")] = None
    """Update artifact whose optimizer state and global step are continued."""
    seed: Annotated[int, Field(ge=0), Flag("--seed")] = 0
    """Run seed, for the order of mini-batches."""
    out: Annotated[str, Flag("--out")] = "update"
    """Artifact to write."""
    update: UpdateConfig = UpdateConfig()
    """Loss, optimizer, batches."""


class SyncJob(Job):
    """Verify an update's policy and publish it."""

    output_field: ClassVar[str] = "to"

    update: Annotated[str | None, Flag("--update")] = None
    """Update artifact whose policy is published."""
    to: Annotated[str, Flag("--to")] = "policies"
    """Folder of published policies, v000001 … and the pointer CURRENT; or hf://ORG/NAME: tags and main of a repository."""
    rollback: Annotated[int | None, Field(ge=0), Flag("--rollback")] = None
    """Instead of publishing, point CURRENT (on the hub: main) at this version."""
    servers: Annotated[Servers, Flag("--server")] = ()
    """Addresses of running vLLM or SGLang servers that load the published policy and prove it before CURRENT moves."""
    sync: SyncConfig = SyncConfig()
    """Checks."""


class RewardModelJob(Job):
    """Train a value-head reward model on pairs of answers."""

    runs_forward: ClassVar[bool] = True

    preferences: Annotated[str | None, Flag("--preferences")] = None
    """Data file, folder or glob with chosen and rejected, and prompt where they don't hold it."""
    base: Annotated[str, Flag("--base")] = "builtin:tiny"
    """Language model REF that gets the head: folder, fsspec URL, hub id (org/name@revision) or builtin:tiny."""
    seed: Annotated[int, Field(ge=0), Flag("--seed")] = 0
    """Seed of the head, of the order of pairs and of what is held out."""
    out: Annotated[str, Flag("--out")] = "reward-model"
    """Folder to write."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """Columns, optimizer, held-out pairs."""


class PipelineConfig(Job):
    """A pipeline file: the cycle of stages, iteration after iteration."""

    runs_forward: ClassVar[bool] = True
    output_field: ClassVar[str] = "run_dir"

    name: str
    """Name of the run."""
    run_dir: Annotated[str, Flag("--run-dir")]
    """Folder or URL under which everything is written."""
    iterations: Annotated[int, Field(ge=1), Flag("--iterations")] = 1
    """Iterations of the cycle."""
    seed: Annotated[int, Field(ge=0), Flag("--seed")] = 0
    """Run seed."""
    policy: Annotated[str, Flag("--policy")] = "builtin:tiny"
    """Policy REF of version 0."""
    reference: str | None = None
    """`initial` (the policy at version 0), another REF, or null for no reference."""
    servers: Annotated[Servers, Flag("--server")] = ()
    """Addresses of running vLLM or SGLang servers: rollout with engine server asks them, sync loads each new policy into
    them."""
    prompts: PromptsConfig = PromptsConfig()
    """Prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    score: ScoreConfig = ScoreConfig()
    """Rewards and advantages."""
    logprob: LogprobConfig = LogprobConfig()
    """Recomputed log-probabilities."""
    update: UpdateConfig = UpdateConfig()
    """Optimizer steps."""
    sync: SyncConfig = SyncConfig()
    """Publishing."""

    @property
    def stage_runtime(self) -> RuntimeConfig:
        """What a stage is given: servers that `run` starts are no business of it, nor of its manifest."""
        return self.runtime.model_copy(update={"serve": ServeConfig()})

    @property
    def needs_logprobs(self) -> bool:
        """Whether an iteration recomputes log-probabilities."""
        return self.update.old == "old_logprobs" or self.reference is not None

    @model_validator(mode="after")
    def _reference_where_needed(self) -> PipelineConfig:
        if (self.update.kl_coef > 0 or self.score.kl_coef > 0) and self.reference is None:
            raise ValueError("a kl_coef above 0 needs reference: initial (or another REF)")
        if self.runtime.serve.command and self.rollout.engine != "server":
            raise ValueError("runtime.serve starts servers for rollout.engine: server; set that, or remove it")
        return self
