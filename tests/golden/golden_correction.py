"""The recorded off-policy corrections of verl and TRL: importance weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from golden_cases import MATCHED, Case, Outcome, absent, differs, first_gap, gap, numbers
from torch import Tensor

from grpoctl.algorithms.aggregation import loss_denominator
from grpoctl.algorithms.correction import correction_weights

UNDER_THE_MASK = "NaN or inf under the mask: ours has weight 0 there; verl's weight is NaN there"
NO_TOKEN = "correction of a batch without a valid token: ours is all 0; verl refuses"
ICEPOP_METRICS = "IcePop that keeps no weight: verl's metrics divide by zero and raise; ours is the ratio or 0"
NAN_SAMPLING = (
    "NaN rollout log-probability at a valid token: ours stays NaN (tis) or drops the token or row (mis), TRL's is 1"
)
EMPTY_COMPLETION = "completion without a token: ours has weight 0; TRL raises"
CLAMP = "weight beyond e^±20: ours is clamped, TRL's isn't"

METHODS_NOT_HERE = {"rollout_is_batch_normalize": "correction", "rollout_rs": "correction"}


def effective_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    params: dict[str, Any],
    *,
    default_threshold: float = 2.0,
) -> Tensor | None:
    """Return our weights for verl's rollout_is settings, None where verl applies none."""
    weights = None
    level = params.get("rollout_is")
    if level is not None:
        lower, upper = _bounds(params.get("rollout_is_threshold", default_threshold))
        weights = correction_weights(
            old_logprobs,
            rollout_logprobs,
            mask,
            correction="tis" if lower is None else "icepop",
            level=level,
            cap=upper,
            floor=lower,
        )
    return weights


def _bounds(threshold: str | float) -> tuple[float | None, float]:
    text = str(threshold)
    if "_" in text:
        lower, upper = text.split("_", 1)
        return float(lower), float(upper)
    return None, float(text)


def verl_correction(case: Case) -> Outcome:
    """Compare weights and modified mask with verl's rollout correction."""
    for name in METHODS_NOT_HERE:
        if case.params.get(name):
            return absent(name)
    old, rollout = case.tensor("old_log_prob"), case.tensor("rollout_log_prob")
    mask = case.mask("response_mask")
    weights, kept = effective_weights(old, rollout, mask, case.params), mask
    if case.error is not None:
        return _explain_verl_error(case, weights, kept, mask)
    expected_weights = case.outputs["rollout_is_weights"]
    message = first_gap(
        "" if expected_weights is None and weights is None else gap(weights, numbers(expected_weights), rtol=case.rtol),
        gap(kept, case.output("modified_response_mask"), rtol=0.0),
    )
    if not message:
        return MATCHED
    assert not all(torch.isfinite(value[~mask]).all() for value in (old, rollout)), message
    assert weights is not None and not weights[~mask].any() and not kept[~mask].any()
    valid = mask.numpy()
    message = first_gap(
        gap(weights[mask], numbers(expected_weights)[valid], rtol=case.rtol),
        gap(kept[mask], case.output("modified_response_mask")[valid], rtol=0.0),
    )
    assert not message, message
    return differs(UNDER_THE_MASK)


def _explain_verl_error(case: Case, weights: Tensor | None, kept: Tensor, mask: Tensor) -> Outcome:
    if not mask.any():
        assert not kept.any() and (weights is None or not weights.any())
        return differs(NO_TOKEN)
    lower, upper = _bounds(case.params.get("rollout_is_threshold", 2.0))
    assert weights is not None and lower is not None, f"no rule for the error {case.error}"
    for row in range(mask.shape[0]):
        old, rollout = case.tensor("old_log_prob")[row], case.tensor("rollout_log_prob")[row]
        logs = (old - rollout)[mask[row]].tolist()
        if case.params["rollout_is"] == "sequence":
            logs = [math.fsum(logs)] * len(logs)
        ratios = [math.exp(min(20.0, max(-20.0, log))) for log in logs]
        expected = [ratio if lower <= ratio <= upper else 0.0 for ratio in ratios]
        assert not gap(weights[row][mask[row]], expected, rtol=case.rtol)
    return differs(ICEPOP_METRICS)


def trl_correction(case: Case) -> Outcome:
    """Compare with TRL's importance sampling between trainer and vLLM; its ratio is 1 under the mask, ours 0."""
    params, lengths = case.params, case.inputs["lengths"]
    old = case.tensor("old_log_prob")
    width = max([old.shape[1], *lengths])
    sampled = torch.full((len(lengths), width), torch.nan, dtype=old.dtype)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    for row, values in enumerate(case.inputs["sampling_log_prob"]):
        sampled[row, : len(values)] = torch.tensor(numbers(values), dtype=old.dtype)
    if params.get("mask_truncated_completions"):
        mask = mask & torch.tensor(case.inputs["ends_with_eos"], dtype=torch.bool)[:, None]
    level, form = params["vllm_importance_sampling_mode"].split("_")
    cap = math.inf if params["clip_max"] is None else params["clip_max"]
    weights = correction_weights(
        old,
        sampled,
        mask,
        correction={"truncate": "tis", "mask": "mis"}[form],
        level=level,
        cap=cap,
        floor=params["clip_min"],
    )
    if case.error is not None:
        assert 0 in lengths, f"no rule for the error {case.error}"
        assert not weights[torch.tensor(lengths) == 0].any()
        return differs(EMPTY_COMPLETION)
    ratio = torch.tensor(case.output("importance_sampling_ratio")).expand(mask.shape).double()
    message = first_gap(
        gap(mask, case.output("completion_mask"), rtol=0.0),
        gap(loss_denominator(mask.sum(dim=-1), aggregation="token-mean"), case.output("num_items_in_batch"), rtol=0.0),
    )
    assert not message, message
    if not gap(weights[mask], ratio[mask], rtol=case.rtol):
        return MATCHED

    unknown = mask & torch.isnan(sampled)
    spoilt = unknown.any(dim=-1, keepdim=True).expand_as(mask) if level == "sequence" else unknown
    log_ratio = torch.where(mask, old - sampled, 0.0)
    total = log_ratio.sum(dim=-1, keepdim=True).expand_as(mask) if level == "sequence" else log_ratio
    beyond = mask & (total.abs() > 20) & ~spoilt
    rest = mask & ~spoilt & ~beyond
    message = gap(weights[rest], ratio[rest], rtol=case.rtol)
    assert not message, message
    if spoilt.any():
        ours = weights[spoilt & mask]
        assert bool(ours.isnan().all()) if form == "truncate" else not ours.any()
        return differs(NAN_SAMPLING)
    assert beyond.any(), "weights differ without a rule"
    assert bool(((weights[beyond] == 0) | (weights[beyond] >= math.exp(-20) * (1 - 1e-6))).all())
    return differs(CLAMP)


HANDLERS = {
    ("verl", "compute_rollout_correction_and_rejection_mask"): verl_correction,
    ("trl", "rollout_correction"): trl_correction,
}
