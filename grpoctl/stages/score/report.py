"""The summary of a scores artifact, from its shards' sums, and the gates on it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa

from grpoctl.artifacts.artifact import Artifact
from grpoctl.artifacts.manifest import RowAccounting, Shard
from grpoctl.errors import GateFailed, PluginFailed
from grpoctl.rewards.sample import FAILED_STATUSES
from grpoctl.settings.jobs import ScoreJob

log = logging.getLogger("grpoctl")


def accounting(shards: Sequence[Shard], job: ScoreJob) -> RowAccounting:
    """Return where the rows went.

    Raises:
        PluginFailed: rewards failed beyond the budget.
    """
    total = sum(shard.rows for shard in shards)
    failed = sum(shard.counts[status] for shard in shards for status in FAILED_STATUSES)
    unscorable = sum(shard.counts["unscorable"] for shard in shards)
    if failed > job.score.error_budget * total:
        raise PluginFailed(
            f"{job.out}: rewards failed for {failed} of {total} rows, budget {job.score.error_budget:.0%} "
            f"(score.error_budget); see reward_error in {job.out}/data: {_first_error(shards, job)}"
        )
    return RowAccounting(input=total, ok=total - failed - unscorable, skipped=unscorable, failed=failed)


def _first_error(shards: Sequence[Shard], job: ScoreJob) -> str:
    import pyarrow.parquet as pq

    from grpoctl.artifacts.storage import locate, read_bytes

    for shard in shards:
        table: pa.Table = cast("Any", pq).read_table(
            pa.BufferReader(read_bytes(locate(job.out).child(shard.part))), columns=["reward_error"]
        )
        for message in table.column(0).to_pylist():
            if message is not None:
                return str(message).splitlines()[0]
    return "no message"


def _sum(shards: Sequence[Shard], name: str) -> float:
    return sum(shard.stats[name] for shard in shards)


def _by_name(shards: Sequence[Shard]) -> Iterator[tuple[str, float | None]]:
    for name in dict.fromkeys(name for shard in shards for name in shard.stats["by_name"]):
        found = [shard.stats["by_name"].get(name, [0, 0.0]) for shard in shards]
        count = sum(number for number, _ in found)
        yield name, sum(total for _, total in found) / count if count else None


def summary(shards: Sequence[Shard], job: ScoreJob, rollouts: Artifact) -> dict[str, Any]:
    """Return the artifact's summary numbers.

    Raises:
        GateFailed: too many incomplete groups, or all rewards equal.
    """
    count, groups, dropped = (int(_sum(shards, k)) for k in ("num_rewards", "num_groups", "num_dropped_groups"))
    if dropped > job.score.incomplete_budget * groups:
        raise GateFailed(
            f"{job.out}: {dropped} of {groups} groups are incomplete, budget {job.score.incomplete_budget:.0%} "
            "(score.incomplete_budget); see reward_error and the rollouts' error column"
        )
    low = min((s.stats["reward_min"] for s in shards if s.stats["reward_min"] is not None), default=None)
    high = max((s.stats["reward_max"] for s in shards if s.stats["reward_max"] is not None), default=None)
    if count > 1 and low == high:
        _all_equal(low, count, job, rollouts)
    mean = _sum(shards, "reward_sum") / count if count else None
    variance = max(0.0, _sum(shards, "reward_square_sum") / count - mean**2) if mean is not None else 0.0
    return {
        "reward_mean": mean,
        "reward_std": math.sqrt(variance),
        "reward_min": low,
        "reward_max": high,
        "rewards": dict(_by_name(shards)),
        "num_groups": groups,
        "num_dropped_groups": dropped,
        "signal_groups_ratio": _sum(shards, "num_signal_groups") / groups if groups else 0.0,
    }


def _all_equal(value: float | None, count: int, job: ScoreJob, rollouts: Artifact) -> None:
    first = rollouts.manifest.definition.get("iteration", 0) == 0
    message = f"{job.out}: all {count} rewards are {value}; is the scorer alive?"
    if job.score.fail_if_all_equal == "always" or (job.score.fail_if_all_equal == "first" and first):
        raise GateFailed(f"{message} Check it with `grpoctl reward test`, or set score.fail_if_all_equal: never")
    log.warning("%s", message)
