"""What an update says of its steps: their rows in the table, their limits, and the numbers that sum them up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from grpoctl.artifacts.storage import locate, write_bytes
from grpoctl.errors import GateFailed
from grpoctl.settings.jobs import UpdateJob

if TYPE_CHECKING:
    from grpoctl.stages.update.step import Step, StepSums

NONFINITE_FILE = "_nonfinite.json"


def step_statistics(job: UpdateJob, step: Step, sums: StepSums) -> dict[str, Any]:
    """Return a step's statistics as columns of the steps table."""
    count = max(1, sums.num_tokens)
    has_reference = all(step.data.ref_logprobs[row] is not None for row in step.rows)
    return {
        "policy_loss_numerator": sums.policy_numerator,
        "kl_loss_numerator": sums.kl_numerator if job.update.kl_coef > 0 else None,
        "kl": sums.kl_sum / count if has_reference else None,
        "ratio_mean": sums.ratio_sum / count if sums.num_tokens else 1.0,
        "ratio_max": sums.ratio_max if sums.num_tokens else 1.0,
        "ratio_min": sums.ratio_min if sums.num_tokens else 1.0,
        "clip_fraction_low": sums.clipped_low / count,
        "clip_fraction_high": sums.clipped_high / count,
        "correction_mean": sums.correction_sum / count if job.update.correction != "none" else None,
        "entropy": sums.entropy_sum / count if job.update.entropy else None,
        "num_tokens": sums.num_tokens,
        "num_sequences": sum(bool(step.data.rows.completion_masks[row].any()) for row in step.rows),
        "num_micro_batches": sums.num_micro_batches,
    }


def check_limits(job: UpdateJob, steps: list[dict[str, Any]]) -> None:
    """Stop where the last step crossed a limit; nothing is committed."""
    last = steps[-1]
    skipped = [step for step in steps if step["status"] == "nonfinite"]
    if len(skipped) > job.update.max_nonfinite_steps:
        ids = [name for step in skipped for name in step["skipped_ids"]]
        _save_nonfinite(job, ids)
        raise GateFailed(
            f"{job.out}: {len(skipped)} steps had a non-finite loss or gradient, update.max_nonfinite_steps allows "
            f"{job.update.max_nonfinite_steps}; rows {ids[:5]}, all in {job.out}/{NONFINITE_FILE}"
        )
    for name, limit in (
        ("kl", job.update.max_kl),
        ("ratio_max", job.update.max_ratio),
        ("grad_norm", job.update.max_grad_norm),
    ):
        if limit is not None and last[name] is not None and last[name] > limit:
            raise GateFailed(
                f"{job.out}: {name} is {last[name]:.4g} at step {len(steps) - 1}, limit {limit}; nothing committed"
            )


def _save_nonfinite(job: UpdateJob, ids: list[str]) -> None:
    write_bytes(locate(job.out).child(NONFINITE_FILE), json.dumps(ids, indent=1).encode())


def summary(steps: list[dict[str, Any]], *, first_step: int) -> dict[str, Any]:
    """Return an update's numbers: token-weighted means over its steps, and the first step's ratio; null without steps.

    Args:
        steps: rows of the steps table
        first_step: global steps taken before them
    """
    taken = [step for step in steps if step["status"] == "ok"]
    weights = np.array([step["num_tokens"] for step in taken], dtype=np.float64)

    def mean(name: str) -> float | None:
        values = [step[name] for step in taken]
        return None if not values or any(v is None for v in values) else float(np.average(values, weights=weights))

    norms = [step["grad_norm"] for step in taken]
    return {
        "num_steps": len(steps),
        "num_skipped_steps": len(steps) - len(taken),
        "global_step": first_step + len(steps),
        "loss": mean("loss"),
        "kl": mean("kl"),
        "entropy": mean("entropy"),
        "ratio_max": max((step["ratio_max"] for step in taken), default=None),
        "first_ratio_max_gap": max(abs(steps[0]["ratio_max"] - 1), abs(steps[0]["ratio_min"] - 1)) if steps else None,
        "clip_fraction": (mean("clip_fraction_low") or 0.0) + (mean("clip_fraction_high") or 0.0),
        "grad_norm": float(np.mean(norms)) if norms else None,
        "lr": steps[-1]["lr"] if steps else None,
    }
