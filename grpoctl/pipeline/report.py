"""A run as text for a person: a line an iteration, the curve of rewards, what a run directory holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from grpoctl.artifacts.artifact import read_manifest
from grpoctl.artifacts.storage import list_names, locate, read_if_there
from grpoctl.errors import InputRefused
from grpoctl.stages.registry import artifact_folders


def summary_line(row: dict[str, Any]) -> str:
    """Return one iteration's numbers as the line that a person reads."""

    def shown(name: str, pattern: str) -> str:
        value = row.get(name)
        return "–" if value is None else format(value, pattern)

    stages = " ".join(f"{stage} {seconds:.2f}" for stage, seconds in row["seconds"].items())
    return (
        f"iter {row['iteration']:3d}  reward {shown('reward_mean', '.3f')}  len {shown('mean_completion_tokens', '.1f')}  "
        f"kl {shown('kl', '.4f')}  clip {shown('clip_fraction', '.3f')}  grad {shown('grad_norm', '.3f')}  "
        f"{shown('tokens_per_second', ',.0f')} tok/s  [{stages} s]"
    )


def reward_curve(metrics: list[dict[str, Any]]) -> str:
    """Return the mean reward by iteration as plain text, one bar a line."""
    values = [(row["iteration"], row["reward_mean"]) for row in metrics if row.get("reward_mean") is not None]
    if not values:
        return "no rewards"
    low, high = min(0.0, *(v for _, v in values)), max(v for _, v in values)
    span = (high - low) or 1.0
    lines = [f"  {number:4d}  {value:7.3f}  {'█' * round(50 * (value - low) / span)}" for number, value in values]
    return "\n".join(["mean reward by iteration", *lines])


def status_lines(run_dir: str) -> Iterator[str]:
    """Yield what a run directory holds, an iteration a line.

    Raises:
        InputRefused: it isn't a run directory.
    """
    names = [name for name in list_names(locate(run_dir)) if name.startswith("iter-")]
    if not names:
        raise InputRefused(f"{run_dir}: no iter-… folders; expected the run_dir of a pipeline")
    for name in names:
        found = {stage: read_manifest(f"{run_dir}/{name}/{folder}") for stage, folder in artifact_folders().items()}
        artifacts = {stage: artifact for stage, artifact in found.items() if artifact is not None}
        states = " ".join(f"{stage}:{'done' if stage in artifacts else '–'}" for stage in artifact_folders())
        reward = artifacts["score"].manifest.stats["reward_mean"] if "score" in artifacts else None
        yield f"{name}  {states}  reward {'–' if reward is None else format(reward, '.3f')}"
    pointer = read_if_there(locate(run_dir).child("policies/CURRENT"))
    yield f"published: {json.loads(pointer)['name'] if pointer else 'none yet'}"
