"""Give each completion a reward and, compared with its group, an advantage."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from grpoctl.algorithms.advantages import advantages, token_advantages
from grpoctl.artifacts.artifact import Artifact, ArtifactWriter, Work, open_artifact
from grpoctl.artifacts.lineage import require_made_from, require_same_rows
from grpoctl.artifacts.manifest import Parent
from grpoctl.artifacts.tables import SCORES
from grpoctl.errors import GateFailed, InputRefused, UsageError
from grpoctl.inputs.prompts import ROW_FIELD, column_names
from grpoctl.rewards.calling.pool import RewardPool
from grpoctl.rewards.resolve.columns_check import RewardReference, check_columns
from grpoctl.rewards.resolve.reference import resolve_reward
from grpoctl.rewards.sample import FAILED_STATUSES, RewardOutcome, RewardSample
from grpoctl.settings.fields import RewardConfig, defining
from grpoctl.settings.jobs import ScoreJob
from grpoctl.stages.reward_model.scores import NAME as REWARD_MODEL
from grpoctl.stages.reward_model.scores import RewardModelScorer, reward_model_scorer
from grpoctl.stages.score_report import accounting, summary
from grpoctl.stages.stage import Context, StageResult, already_done, check_outside, environment, finished, planned
from grpoctl.stages.token_rows import require_whole_groups

log = logging.getLogger("grpoctl")
BATCH_WIDE: Final = frozenset({"batch", "reinforce_plus_plus_baseline", "gpg"})
"""Estimators that look at the whole artifact, not at one group."""
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
class _Scored:
    """One shard's rows with their outcomes, before advantages."""

    index: int
    names: tuple[str, ...]
    rows: list[dict[str, Any]]
    rewards: list[dict[str, float | None]]
    outcomes: list[RewardOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rewards:
    """What scores each completion."""

    functions: list[tuple[RewardConfig, RewardReference]]
    model: RewardModelScorer | None

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each reward in the weighted sum."""
        weights = {reference.name: config.weight for config, reference in self.functions}
        return weights if self.model is None else {**weights, REWARD_MODEL: self.model.weight}


def run(job: ScoreJob, context: Context) -> StageResult:
    """Score a rollouts artifact.

    Raises:
        UsageError: no reward named, or one that doesn't exist.
        InputRefused: columns that a reward needs are missing or null, or texts beyond the reward model's context.
        PluginFailed: rewards failed beyond the budget.
        GateFailed: all rewards equal, or too many incomplete groups.
    """
    check_outside(job.out, job.rollouts, job.logprobs)
    rollouts = open_artifact(job.rollouts, table="rollouts")
    rewards = _rewards(job, context, rollouts)
    logprobs = _logprobs(job, rollouts)
    work = Work(
        stage="score",
        table=SCORES,
        definition=_definition(job, rollouts, logprobs, rewards),
        config=job.model_dump(mode="json"),
        parents=_parents(rollouts, logprobs),
        num_shards=len(rollouts.manifest.shards),
    )
    done = already_done(job.out, work)
    if done is not None:
        return done
    _check_group_size(job, rollouts)
    for _, reference in rewards.functions:
        check_columns(reference, _source_columns(rollouts))
    if context.dry_run:
        return planned(job.out, work, rewards=list(rewards.weights))
    return _score(job, context, work, (rollouts, logprobs), rewards)


def _rewards(job: ScoreJob, context: Context, rollouts: Artifact) -> _Rewards:
    functions = [(config, _resolve(config)) for config in job.score.rewards]
    if not functions and job.score.reward_model is None:
        raise UsageError(
            "no reward; name one with --reward accuracy, --reward file.py:function, --reward package.module:f "
            "or --reward-model FOLDER"
        )
    if job.score.reward_model is not None and REWARD_MODEL in [reference.name for _, reference in functions]:
        raise UsageError(f"rewards: one is named {REWARD_MODEL!r}, as is the reward model's; give it another `name:`")
    return _Rewards(functions=functions, model=reward_model_scorer(job, context, rollouts))


def _resolve(config: RewardConfig) -> RewardReference:
    return resolve_reward(
        config.ref,
        signature=config.signature,
        kwargs=config.kwargs,
        name=config.name,
        allow_null=config.allow_null,
    )


def _logprobs(job: ScoreJob, rollouts: Artifact) -> Artifact | None:
    if job.score.kl_coef == 0:
        return None
    if job.logprobs is None:
        raise UsageError("score.kl_coef above 0 needs --logprobs with old_logprobs and ref_logprobs")
    artifact = open_artifact(job.logprobs, table="logprobs")
    require_made_from(artifact, rollouts)
    return artifact


def _parents(rollouts: Artifact, logprobs: Artifact | None) -> list[Parent]:
    return [rollouts.parent("rollouts")] + ([logprobs.parent("logprobs")] if logprobs else [])


def _definition(
    job: ScoreJob,
    rollouts: Artifact,
    logprobs: Artifact | None,
    rewards: _Rewards,
) -> dict[str, Any]:
    return {
        "stage": "score",
        "table_version": SCORES.version,
        "score": {**defining(job.score), "rewards": None, "reward_model": None},
        "rewards": [
            {
                "name": reference.name,
                "signature": reference.signature,
                "kwargs": dict(reference.kwargs),
                "source_digest": reference.source_digest,
                "weight": config.weight,
            }
            for config, reference in rewards.functions
        ],
        "reward_model": None if rewards.model is None else rewards.model.definition,
        "combination": "weighted sum of the rewards that scored the row",
        "rollouts": rollouts.manifest.content_digest,
        "logprobs": logprobs.manifest.content_digest if logprobs else None,
    }


def _check_group_size(job: ScoreJob, rollouts: Artifact) -> None:
    assert rollouts.manifest.sampling is not None
    if rollouts.manifest.sampling.group_size < 2 and job.score.advantages != "none":
        raise InputRefused(
            f"{job.rollouts}: groups of size 1 have no deviation or baseline for {job.score.advantages}; "
            "sample with --group-size 2 or more, or score with --advantages none"
        )


def _source_columns(rollouts: Artifact) -> list[str]:
    return column_names(rollouts.read_shard(0, ["source"]).schema.field("source").type)


def _score(
    job: ScoreJob,
    context: Context,
    work: Work,
    inputs: tuple[Artifact, Artifact | None],
    rewards: _Rewards,
) -> StageResult:
    rollouts, logprobs = inputs
    writer = ArtifactWriter(url=job.out, work=work)
    todo = writer.missing_shards(context.selected(work.num_shards))
    batch_wide = job.score.advantages in BATCH_WIDE
    if batch_wide and context.shards is not None:
        raise UsageError(f"--shards: {job.score.advantages} looks at the whole batch; score it in one job")
    if batch_wide and todo:
        todo = list(range(work.num_shards))
    max_failures = int(job.score.error_budget * rollouts.manifest.rows.input)
    started = time.monotonic()
    with ExitStack() as stack:
        pool = None
        if todo:
            iteration = int(rollouts.manifest.definition.get("iteration", 0))
            pool = stack.enter_context(_pool(job, [reference for _, reference in rewards.functions], iteration))
        held: list[_Scored] = []
        groups: frozenset[str] = frozenset()
        for index in context.follow(todo, "score"):
            assert pool is not None
            held.append(_score_shard(index, rollouts, pool, rewards, max_failures))
            groups = require_whole_groups([row["group_id"] for row in held[-1].rows], rollouts, groups)
            if not batch_wide:
                _write(job, writer, held, (rollouts, logprobs))
                held.clear()
        _write(job, writer, held, (rollouts, logprobs))
    seconds = time.monotonic() - started
    artifact = writer.commit(
        rows=lambda shards: accounting(shards, job),
        policy=rollouts.manifest.policy,
        sampling=rollouts.manifest.sampling,
        stats=lambda shards: summary(shards, job, rollouts),
        tokens={},
        timings={"scoring_seconds": seconds},
        environment=environment(),
    )
    return finished(writer, artifact)


def _pool(job: ScoreJob, references: Sequence[RewardReference], iteration: int) -> RewardPool:
    log_path = Path(job.out) / "_logs" / "rewards.log" if "://" not in job.out else None
    return RewardPool(
        references,
        num_workers=job.runtime.reward_workers,
        timeout_seconds=job.score.timeout_seconds,
        log_path=log_path,
        iteration=iteration,
    )


def _score_shard(
    index: int,
    rollouts: Artifact,
    pool: RewardPool,
    rewards: _Rewards,
    max_failures: int,
) -> _Scored:
    assert rollouts.manifest.sampling is not None
    messages = rollouts.manifest.sampling.prompt_format == "messages"
    rows = rollouts.read_shard(index, COLUMNS).to_pylist()
    usable = [number for number, row in enumerate(rows) if row["status"] != "failed"]
    samples = [reward_sample(rows[number], messages) for number in usable]
    names = [reference.name for _, reference in rewards.functions]
    by_reward = {name: pool.score(name, samples, max_failures=max_failures) for name in names}
    if rewards.model is not None:
        by_reward[REWARD_MODEL] = rewards.model.outcomes(samples)
    weights = rewards.weights
    position = {number: place for place, number in enumerate(usable)}
    outcomes, values = [], []
    for number, row in enumerate(rows):
        place = position.get(number)
        if place is None:
            failure = f"the rollout failed: {row['error']}"
            outcomes.append(RewardOutcome(reward=None, status="unscorable", error=failure, seconds=0.0))
            values.append(dict.fromkeys(weights))
        else:
            parts = {name: results[place] for name, results in by_reward.items()}
            outcomes.append(combine(parts, weights))
            values.append(_values(parts))
    return _Scored(index=index, names=tuple(weights), rows=rows, rewards=values, outcomes=outcomes)


def reward_sample(row: Mapping[str, Any], messages: bool) -> RewardSample:
    """Return what a reward sees of a rollouts row; `messages` tells that the prompt column is JSON of a message list."""
    source = {name: value for name, value in (row["source"] or {}).items() if name != ROW_FIELD}
    return RewardSample(
        sample_id=row["sample_id"],
        prompt=json.loads(row["prompt"]) if messages else row["prompt"],
        completion=row["completion"],
        prompt_ids=row["prompt_ids"],
        completion_ids=row["completion_ids"],
        finish_reason=row["finish_reason"],
        source=source,
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


def _write(
    job: ScoreJob, writer: ArtifactWriter, held: Sequence[_Scored], inputs: tuple[Artifact, Artifact | None]
) -> None:
    if not held:
        return
    _, logprobs = inputs
    rows = [row for scored in held for row in scored.rows]
    outcomes = [outcome for scored in held for outcome in scored.outcomes]
    rewards = np.array([np.nan if o.reward is None else o.reward for o in outcomes], dtype=np.float64)
    groups = np.unique([row["group_id"] for row in rows], return_inverse=True)[1]
    dropped = _dropped_groups(rows, outcomes, groups, job)
    usable = np.where(np.isin(groups, list(dropped)), np.nan, rewards)
    lengths = [sum(row["completion_mask"]) for row in rows]
    values = advantages(usable, groups, method=job.score.advantages, eps=job.score.advantage_eps, lengths=lengths)
    num_scored = np.bincount(groups, weights=~np.isnan(rewards)).astype(int)[groups]
    start = 0
    for scored in held:
        part = slice(start, start + len(scored.rows))
        start = part.stop
        table = _table(scored, values[part], num_scored[part], _token_advantages(job, logprobs, scored, values[part]))
        stats = _stats(scored, values[part], groups[part], dropped)
        counts = {
            s: sum(o.status == s for o in scored.outcomes) for s in ("ok", "unscorable", *sorted(FAILED_STATUSES))
        }
        writer.write_shard(scored.index, table, counts=counts, stats=stats)


def _dropped_groups(
    rows: Sequence[Mapping[str, Any]], outcomes: Sequence[RewardOutcome], groups: Any, job: ScoreJob
) -> set[int]:
    """Return the groups with a member that failed in the sampler or in a reward, where the policy is to drop them."""
    incomplete = {
        int(group)
        for row, outcome, group in zip(rows, outcomes, groups, strict=True)
        if row["status"] == "failed" or outcome.status in FAILED_STATUSES
    }
    if incomplete and job.score.incomplete_groups == "error":
        raise GateFailed(
            f"{job.out}: {len(incomplete)} groups have members without a reward (score.incomplete_groups: error)"
        )
    return incomplete if job.score.incomplete_groups == "drop" else set()


def _token_advantages(job: ScoreJob, logprobs: Artifact | None, scored: _Scored, values: Any) -> list[Any]:
    if logprobs is None:
        return [None] * len(scored.rows)
    table = logprobs.read_shard(scored.index)
    require_same_rows([row["sample_id"] for row in scored.rows], table.column("sample_id").to_pylist(), logprobs.url)
    result = []
    for value, old, ref in zip(
        values, table["old_logprobs"].to_pylist(), table["ref_logprobs"].to_pylist(), strict=True
    ):
        if old is None or ref is None:
            raise InputRefused(f"{logprobs.url}: score.kl_coef needs both old_logprobs and ref_logprobs; recompute it")
        unscored = math.isnan(value)
        result.append(None if unscored else token_advantages(value, old, ref, kl_coef=job.score.kl_coef))
    return result


def _table(scored: _Scored, values: Any, num_scored: Any, by_token: Sequence[Any]) -> pa.Table:
    names = list(dict.fromkeys([*scored.names, *(name for row in scored.rewards for name in row)]))
    kind = pa.struct([pa.field(name, pa.float64()) for name in names])
    columns: dict[str, Any] = {
        "sample_id": [row["sample_id"] for row in scored.rows],
        "group_id": [row["group_id"] for row in scored.rows],
        "reward": [outcome.reward for outcome in scored.outcomes],
        "rewards": [{name: row.get(name) for name in names} for row in scored.rewards],
        "reward_status": [outcome.status for outcome in scored.outcomes],
        "reward_error": [outcome.error for outcome in scored.outcomes],
        "reward_seconds": [outcome.seconds for outcome in scored.outcomes],
        "advantage": [None if math.isnan(value) else float(value) for value in values],
        "token_advantages": list(by_token),
        "num_scored_in_group": [int(count) for count in num_scored],
    }
    schema = SCORES.arrow_schema({"rewards": kind})
    return pa.table({field.name: pa.array(columns[field.name], type=field.type) for field in schema}, schema=schema)


def _stats(scored: _Scored, values: Any, groups: Any, dropped: set[int]) -> dict[str, Any]:
    rewards = np.array([o.reward for o in scored.outcomes if o.reward is not None], dtype=np.float64)
    names = list(dict.fromkeys(name for row in scored.rewards for name in row))
    present = {name: [row[name] for row in scored.rewards if row.get(name) is not None] for name in names}
    signal = {int(group) for group, value in zip(groups, values, strict=True) if not math.isnan(value) and value != 0}
    return {
        "num_rewards": len(rewards),
        "reward_sum": float(rewards.sum()),
        "reward_square_sum": float((rewards**2).sum()),
        "reward_min": float(rewards.min()) if len(rewards) else None,
        "reward_max": float(rewards.max()) if len(rewards) else None,
        "by_name": {name: [len(found), float(np.sum(found))] for name, found in present.items()},  # type: ignore[arg-type]
        "num_groups": len(set(map(int, groups))),
        "num_dropped_groups": len(dropped & set(map(int, groups))),
        "num_signal_groups": len(signal),
    }
