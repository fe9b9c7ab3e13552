"""One iteration's numbers, from the manifests of its artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpoctl.artifacts.artifact import Artifact


def metrics_row(iteration: int, artifacts: Mapping[str, Artifact]) -> dict[str, Any]:
    """Return one iteration's numbers from its manifests."""
    stats = {stage: artifact.manifest.stats for stage, artifact in artifacts.items()}
    timings = {stage: sum(artifact.manifest.timings.values()) for stage, artifact in artifacts.items()}
    tokens = artifacts["rollout"].manifest.tokens["completion"] if "rollout" in artifacts else 0
    names = {
        "rollout": ("mean_completion_tokens", "truncated_ratio"),
        "score": ("reward_mean", "reward_std", "signal_groups_ratio", "rewards"),
        "logprob": ("rollout_gap_mean", "rollout_gap_max"),
        "update": (
            "loss", "kl", "entropy", "clip_fraction", "ratio_max", "first_ratio_max_gap", "grad_norm", "lr",
            "num_steps", "num_skipped_steps", "global_step",
        ),
    }  # fmt: skip
    row: dict[str, Any] = {"iteration": iteration}
    for stage, keys in names.items():
        row |= {key: stats[stage].get(key) for key in keys if stage in stats}
    seconds = sum(timings.values())
    row["completion_tokens"] = tokens
    row["tokens_per_second"] = tokens / seconds if seconds else None
    row["seconds"] = {stage: round(value, 3) for stage, value in timings.items()}
    return row
