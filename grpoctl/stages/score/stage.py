"""Give each completion a reward and, compared with its group, an advantage."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa

from grpoctl.algorithms.advantages import advantages, token_advantages
from grpoctl.artifacts.artifact import Artifact, open_artifact
from grpoctl.artifacts.lineage import require_made_from, require_same_rows
from grpoctl.artifacts.manifest import Sampling
from grpoctl.artifacts.tables import SCORES
from grpoctl.artifacts.writer import ArtifactWriter
from grpoctl.engines.warm import Warm
from grpoctl.errors import GateFailed, InputRefused, UsageError
from grpoctl.inputs.prompts import column_names
from grpoctl.rewards.calling.pool import RewardPool
from grpoctl.rewards.resolve.columns_check import RewardReference, check_columns
from grpoctl.rewards.resolve.reference import resolve_reward
from grpoctl.rewards.sample import FAILED_STATUSES, RewardOutcome
from grpoctl.settings.fields import RewardConfig, defining
from grpoctl.settings.jobs import ScoreJob
from grpoctl.stages.context import Context
from grpoctl.stages.reward_model.scores import NAME as REWARD_MODEL
from grpoctl.stages.reward_model.scores import reward_model_scorer
from grpoctl.stages.score.report import accounting, summary
from grpoctl.stages.score.scorer import Rewards, Scored, Scorer, prompt_texts
from grpoctl.stages.stage import Definition, Facts, Prepared, Stage
from grpoctl.stages.token_rows import require_whole_groups

log = logging.getLogger("grpoctl")
BATCH_WIDE: Final = frozenset({"batch", "reinforce_plus_plus_baseline", "gpg"})
"""Estimators that look at the whole artifact, not at one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreInputs:
    """The rollouts, what scores them, and the log-probabilities of a KL penalty."""

    rollouts: Artifact
    rewards: Rewards
    logprobs: Artifact | None

    @property
    def sampling(self) -> Sampling:
        """What the completions were drawn from."""
        assert self.rollouts.manifest.sampling is not None
        return self.rollouts.manifest.sampling


def open_inputs(job: ScoreJob) -> ScoreInputs:
    """Open the rollouts and find the rewards.

    Raises:
        UsageError: no reward named, or one that doesn't exist.
        InputRefused: something else than rollouts.
    """
    rollouts = open_artifact(job.rollouts, table="rollouts")
    return ScoreInputs(rollouts=rollouts, rewards=_rewards(job, rollouts), logprobs=_logprobs(job, rollouts))


def _rewards(job: ScoreJob, rollouts: Artifact) -> Rewards:
    functions = [(config, _resolve(config, job.runtime.reward_environment)) for config in job.score.rewards]
    if not functions and job.score.reward_model is None:
        raise UsageError(
            "no reward; name one with --reward accuracy, --reward file.py:function, --reward package.module:f "
            "or --reward-model FOLDER"
        )
    if job.score.reward_model is not None and REWARD_MODEL in [reference.name for _, reference in functions]:
        raise UsageError(f"rewards: one is named {REWARD_MODEL!r}, as is the reward model's; give it another `name:`")
    return Rewards(functions=functions, model=reward_model_scorer(job, rollouts))


def _resolve(config: RewardConfig, keep_environment: Sequence[str]) -> RewardReference:
    return resolve_reward(
        config.ref,
        signature=config.signature,
        kwargs=config.kwargs,
        name=config.name,
        allow_null=config.allow_null,
        keep_environment=keep_environment,
    )


def _logprobs(job: ScoreJob, rollouts: Artifact) -> Artifact | None:
    if job.score.kl_coef == 0:
        return None
    if job.logprobs is None:
        raise UsageError("score.kl_coef above 0 needs --logprobs with old_logprobs and ref_logprobs")
    artifact = open_artifact(job.logprobs, table="logprobs")
    require_made_from(artifact, rollouts)
    return artifact


def define(job: ScoreJob, inputs: ScoreInputs) -> Definition:
    """Return what the scores are made of."""
    rollouts, logprobs = inputs.rollouts, inputs.logprobs
    values = {
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
            for config, reference in inputs.rewards.functions
        ],
        "reward_model": None if inputs.rewards.model is None else inputs.rewards.model.definition,
        "combination": "weighted sum of the rewards that scored the row",
        "rollouts": rollouts.manifest.content_digest,
        "logprobs": logprobs.manifest.content_digest if logprobs else None,
    }
    parents = [rollouts.parent("rollouts")] + ([logprobs.parent("logprobs")] if logprobs else [])
    return Definition(values=values, parents=parents, num_shards=len(rollouts.manifest.shards))


def prepare(job: ScoreJob, inputs: ScoreInputs, context: Context) -> Prepared[ScoreInputs]:
    """Compare what the rewards need with the columns that there are.

    Raises:
        InputRefused: columns that a reward needs are missing, or groups of one where they are compared.
        UsageError: some shards only, for an estimator that looks at all of them.
    """
    _check_group_size(job, inputs.sampling)
    for _, reference in inputs.rewards.functions:
        check_columns(reference, _source_columns(inputs.rollouts))
    return Prepared(plan=inputs, facts={"rewards": list(inputs.rewards.weights)})


def _check_group_size(job: ScoreJob, sampling: Sampling) -> None:
    if sampling.group_size < 2 and job.score.advantages != "none":
        raise InputRefused(
            f"{job.rollouts}: groups of size 1 have no deviation or baseline for {job.score.advantages}; "
            "sample with --group-size 2 or more, or score with --advantages none"
        )


def _source_columns(rollouts: Artifact) -> list[str]:
    return column_names(cast("Any", rollouts.read_shard(0, ["source"]).schema).field("source").type)


def compute(job: ScoreJob, inputs: ScoreInputs, writer: ArtifactWriter, context: Context) -> Facts:
    """Score every missing shard; estimators that look at the whole batch hold all of them first.

    Raises:
        PluginFailed: rewards failed beyond the budget.
        GateFailed: all rewards equal, or too many incomplete groups.
    """
    rollouts = inputs.rollouts
    todo = writer.missing_shards(context.selected(writer.work.num_shards))
    batch_wide = job.score.advantages in BATCH_WIDE
    if batch_wide and context.shards is not None:
        raise UsageError(f"--shards: {job.score.advantages} looks at the whole batch; score it in one job")
    if batch_wide and todo:
        todo = list(range(writer.work.num_shards))
    started = time.monotonic()
    with ExitStack() as stack:
        scorer = stack.enter_context(_scorer(job, inputs, context.warm)) if todo else None
        held: list[Scored] = []
        groups: frozenset[str] = frozenset()
        for index in context.follow(todo, "score"):
            assert scorer is not None
            held.append(scorer.shard(index))
            groups = require_whole_groups([row["group_id"] for row in held[-1].rows], rollouts, groups)
            if not batch_wide:
                _write(job, writer, held, inputs.logprobs)
                held.clear()
        _write(job, writer, held, inputs.logprobs)
    return Facts(
        rows=lambda shards: accounting(shards, job),
        policy=rollouts.manifest.policy,
        sampling=inputs.sampling,
        stats=lambda shards: summary(shards, job, rollouts),
        timings={"scoring_seconds": time.monotonic() - started},
    )


@contextmanager
def _scorer(job: ScoreJob, inputs: ScoreInputs, warm: Warm) -> Generator[Scorer]:
    """Start the children that call rewards; they end with the block."""
    references = [reference for _, reference in inputs.rewards.functions]
    log_path = Path(job.out) / "_logs" / "rewards.log" if "://" not in job.out else None
    with RewardPool(
        references,
        num_workers=job.runtime.reward_workers,
        timeout_seconds=job.score.timeout_seconds,
        log_path=log_path,
        iteration=int(inputs.rollouts.manifest.definition.get("iteration", 0)),
        num_iterations=job.iterations,
        keep_environment=job.runtime.reward_environment,
    ) as pool:
        yield Scorer(
            rollouts=inputs.rollouts,
            rewards=inputs.rewards,
            pool=pool,
            warm=warm,
            max_failures=int(job.score.error_budget * inputs.rollouts.manifest.rows.input),
            messages=inputs.sampling.prompt_format == "messages",
            texts=prompt_texts(inputs.rollouts, references),
        )


def _write(job: ScoreJob, writer: ArtifactWriter, held: Sequence[Scored], logprobs: Artifact | None) -> None:
    if not held:
        return
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


def _token_advantages(job: ScoreJob, logprobs: Artifact | None, scored: Scored, values: Any) -> list[Any]:
    if logprobs is None:
        return [None] * len(scored.rows)
    table = logprobs.read_shard(scored.index)
    found = cast("list[str]", table.column("sample_id").to_pylist())
    require_same_rows([row["sample_id"] for row in scored.rows], found, logprobs.url)
    result: list[Any] = []
    for value, old, ref in zip(
        values, table["old_logprobs"].to_pylist(), table["ref_logprobs"].to_pylist(), strict=True
    ):
        if old is None or ref is None:
            raise InputRefused(f"{logprobs.url}: score.kl_coef needs both old_logprobs and ref_logprobs; recompute it")
        unscored = math.isnan(value)
        result.append(None if unscored else token_advantages(value, old, ref, kl_coef=job.score.kl_coef))
    return result


def _table(scored: Scored, values: Any, num_scored: Any, by_token: Sequence[Any]) -> pa.Table:
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
    return SCORES.build(columns, {"rewards": kind})


def _stats(scored: Scored, values: Any, groups: Any, dropped: set[int]) -> dict[str, Any]:
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


STAGE = Stage(
    name="score",
    job=ScoreJob,
    table=SCORES,
    reads=lambda job: (job.rollouts, job.logprobs),
    open=open_inputs,
    define=define,
    prepare=prepare,
    compute=compute,
)
