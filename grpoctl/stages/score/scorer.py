"""Call the rewards on a shard's completions and fold what they say into one outcome a row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from grpoctl.artifacts.artifact import Artifact
from grpoctl.engines.warm import Warm
from grpoctl.inputs.json_columns import decoded, json_fields
from grpoctl.inputs.policies import open_policy
from grpoctl.inputs.prompts import ROW_FIELD
from grpoctl.rewards.calling.pool import RewardPool
from grpoctl.rewards.resolve.columns_check import RewardReference
from grpoctl.rewards.sample import FAILED_STATUSES, RewardOutcome, RewardSample
from grpoctl.settings.fields import RewardConfig
from grpoctl.stages.reward_model.scores import NAME as REWARD_MODEL
from grpoctl.stages.reward_model.scores import RewardModelScorer
from grpoctl.stages.stage import require_same_tokenizer

COLUMNS: Final = [
    "sample_id",
    "group_id",
    "prompt",
    "completion",
    "prompt_ids",
    "completion_ids",
    "completion_mask",
    "finish_reason",
    "status",
    "error",
    "source",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One shard's rows with their outcomes, before advantages."""

    index: int
    names: tuple[str, ...]
    rows: list[dict[str, Any]]
    rewards: list[dict[str, float | None]]
    outcomes: list[RewardOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """What scores each completion."""

    functions: list[tuple[RewardConfig, RewardReference]]
    model: RewardModelScorer | None

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each reward in the weighted sum."""
        weights = {reference.name: config.weight for config, reference in self.functions}
        return weights if self.model is None else {**weights, REWARD_MODEL: self.model.weight}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """What scores the rows of a shard.

    Args:
        rollouts: the rows
        rewards: functions and model
        pool: the children that call the functions
        warm: keeps the model
        max_failures: rows of a reward that may fail before all is given up
        messages: prompts are message lists
        texts: turns prompt ids into the text that the model saw, for rewards that are given that
    """

    rollouts: Artifact
    rewards: Rewards
    pool: RewardPool
    warm: Warm
    max_failures: int
    messages: bool
    texts: Callable[[Sequence[int]], str] | None

    def shard(self, index: int) -> Scored:
        """Return a shard's rows with their outcomes."""
        rewards = self.rewards
        table = self.rollouts.read_shard(index, COLUMNS)
        rows = source_rows(table)
        usable = [number for number, row in enumerate(rows) if row["status"] != "failed"]
        samples = [reward_sample(rows[number], self.messages, self.texts) for number in usable]
        by_reward = self._outcomes(samples)
        position = {number: place for place, number in enumerate(usable)}
        outcomes: list[RewardOutcome] = []
        values: list[dict[str, float | None]] = []
        for number, row in enumerate(rows):
            place = position.get(number)
            if place is None:
                failure = f"the rollout failed: {row['error']}"
                outcomes.append(RewardOutcome(reward=None, status="unscorable", error=failure, seconds=0.0))
                values.append(dict.fromkeys(rewards.weights))
            else:
                parts = {name: results[place] for name, results in by_reward.items()}
                outcomes.append(combine(parts, rewards.weights))
                values.append(_values(parts))
        return Scored(index=index, names=tuple(rewards.weights), rows=rows, rewards=values, outcomes=outcomes)

    def _outcomes(self, samples: Sequence[RewardSample]) -> dict[str, list[RewardOutcome]]:
        rewards = self.rewards
        names = [reference.name for _, reference in rewards.functions]
        found = {name: self.pool.score(name, samples, max_failures=self.max_failures) for name in names}
        if rewards.model is not None:
            found[REWARD_MODEL] = rewards.model.outcomes(samples, self.warm)
        return found


def prompt_texts(rollouts: Artifact, references: Sequence[RewardReference]) -> Callable[[Sequence[int]], str] | None:
    """Return what turns prompt ids into the text that the model saw, where a reward is given that; else None.

    Raises:
        InputRefused: the policy that sampled is gone, or has another tokenizer now.
    """
    assert rollouts.manifest.sampling is not None
    if rollouts.manifest.sampling.prompt_format == "text" or all(r.signature != "openrlhf" for r in references):
        return None
    from grpoctl.engines.tokenizer import load_tokenizer

    sampled = rollouts.manifest.policy
    assert sampled is not None
    policy = open_policy(sampled.ref)
    require_same_tokenizer(policy, sampled.tokenizer_digest, rollouts.url)
    return load_tokenizer(policy.folder, policy.ref).decode_whole


def source_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows of rollouts whose `source` holds the values of the user's file as they were."""
    schema: Any = table.schema
    fields = json_fields(schema.field("source").type)
    rows: list[dict[str, Any]] = table.to_pylist()
    return [{**row, "source": decoded(row["source"] or {}, fields)} for row in rows] if fields else rows


def reward_sample(
    row: Mapping[str, Any], messages: bool, text_of: Callable[[Sequence[int]], str] | None = None
) -> RewardSample:
    """Return what a reward sees of a rollouts row.

    Args:
        row: its columns
        messages: the prompt column is JSON of a message list
        text_of: turns prompt ids into the text that the model saw, for rewards that are given that
    """
    given: dict[str, Any] = row["source"] or {}
    source = {name: value for name, value in given.items() if name != ROW_FIELD}
    return RewardSample(
        sample_id=row["sample_id"],
        prompt=json.loads(row["prompt"]) if messages else row["prompt"],
        completion=row["completion"],
        prompt_ids=row["prompt_ids"],
        completion_ids=row["completion_ids"],
        finish_reason=row["finish_reason"],
        source=source,
        prompt_text=None if text_of is None else text_of(row["prompt_ids"]),
    )


def _values(parts: Mapping[str, RewardOutcome]) -> dict[str, Any]:
    """Return each reward's raw value, and numbers it reported beside it as `name.key`."""
    values: dict[str, Any] = {}
    for name, outcome in parts.items():
        values[name] = outcome.reward
        for key, extra in outcome.extras.items():
            if isinstance(extra, int | float) and math.isfinite(extra):
                values[f"{name}.{key}"] = float(extra)
    return values


def combine(parts: Mapping[str, RewardOutcome], weights: Mapping[str, float]) -> RewardOutcome:
    """Fold one completion's outcomes into its reward.

    A reward that says None (unscorable) is left out of the sum, as in TRL; one that failed leaves the row without a
    reward, for a failure must never look like a 0.
    """
    seconds = sum(part.seconds for part in parts.values())
    failed = [(name, part) for name, part in parts.items() if part.status in FAILED_STATUSES]
    if failed:
        name, part = failed[0]
        return RewardOutcome(reward=None, status=part.status, error=f"{name}: {part.error}", seconds=seconds)
    scored = [weights[name] * part.reward for name, part in parts.items() if part.reward is not None]
    if not scored:
        return RewardOutcome(reward=None, status="unscorable", error=None, seconds=seconds)
    return RewardOutcome(reward=float(sum(scored)), status="ok", error=None, seconds=seconds)
