"""The stages by name. A stage is one file and one line here; its module, with pydantic and pyarrow, comes when it runs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from grpoctl.stages.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A stage before it is imported.

    Args:
        module: where its STAGE is
        help: what goes in and what comes out, one line
        folder: its artifact's name in an iteration; None where it writes none
        in_cycle: whether a pipeline's iterations have it
        takes_shards: whether several processes may each write some of its shards
    """

    module: str
    help: str
    folder: str | None = None
    in_cycle: bool = True
    takes_shards: bool = True


STAGES: Final = {
    "rollout": Listed(
        module="grpoctl.stages.rollout",
        folder="rollouts",
        help="Prompts in, G sampled completions each out, with the log-probability of every token.",
    ),
    "logprob": Listed(
        module="grpoctl.stages.logprob",
        folder="logprobs",
        help="Rollouts in, log-probabilities recomputed by the training framework out.",
    ),
    "score": Listed(
        module="grpoctl.stages.score.stage",
        folder="scores",
        help="Rollouts in, rewards and group-relative advantages out.",
    ),
    "update": Listed(
        module="grpoctl.stages.update.stage",
        folder="update",
        help="Rollouts, scores and logprobs in, the next policy and every step's numbers out.",
    ),
    "sync": Listed(
        module="grpoctl.stages.sync.stage",
        help="Update in, verified and published policy out; or roll back.",
    ),
    "reward-model train": Listed(
        module="grpoctl.stages.reward_model.stage",
        help="Pairs of answers in, a value-head reward model out.",
        in_cycle=False,
        takes_shards=False,
    ),
}
"""In the order of an iteration."""


def stage_named(name: str) -> Stage[Any, Any, Any]:
    """Return a stage."""
    return importlib.import_module(STAGES[name].module).STAGE


def cycle() -> list[str]:
    """Return the names of an iteration's stages, in order."""
    return [name for name, listed in STAGES.items() if listed.in_cycle]


def artifact_folders() -> dict[str, str]:
    """Return the artifact's folder of each stage of an iteration that writes one, in order."""
    return {name: listed.folder for name, listed in STAGES.items() if listed.in_cycle and listed.folder}
