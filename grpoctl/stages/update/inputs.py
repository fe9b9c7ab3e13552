"""What an update starts from: its artifacts, the policy, and their rows joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from grpoctl.artifacts.artifact import Artifact
from grpoctl.artifacts.manifest import Sampling
from grpoctl.inputs.policies import PolicyFolder
from grpoctl.stages.update.batches import TrainingRows

STATE: Final = "trainer_state"
"""Folder of the optimizer's state in an update artifact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateInputs:
    """The artifacts and the policy that an update starts from."""

    rollouts: Artifact
    scores: Artifact
    logprobs: Artifact | None
    resume: Artifact | None
    policy: PolicyFolder

    @property
    def first_step(self) -> int:
        """Global steps taken before this update."""
        return int(self.resume.manifest.stats["global_step"]) if self.resume else 0

    @property
    def sampling(self) -> Sampling:
        """What the completions were drawn from."""
        assert self.rollouts.manifest.sampling is not None
        return self.rollouts.manifest.sampling

    @property
    def digest(self) -> str:
        """Content digest of the rollouts: the identity of this batch."""
        return self.rollouts.manifest.content_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """The inputs, and their rows joined."""

    inputs: UpdateInputs
    data: TrainingRows
