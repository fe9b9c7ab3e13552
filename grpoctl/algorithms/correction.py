"""Correction for samples whose sampler was not exactly the policy that the trainer recomputes.

Both inputs are in the files before the step, so weights and masks are constants of the mini-batch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

LOG_RATIO_LIMIT: Final = 20.0
CORRECTIONS: Final = ("none", "tis", "mis", "icepop")
LEVELS: Final = ("token", "sequence")
REJECTION_LEVELS: Final = ("token", "seq_sum", "seq_mean", "seq_max")


def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    correction: str,
    level: str,
    cap: float,
    floor: float | None = None,
) -> Tensor:
    """Return importance weights π_old/π_rollout, bounded as the correction says.

    Args:
        old_logprobs: (B, T) recomputed by the training framework
        rollout_logprobs: (B, T) kept by the sampler
        mask: (B, T) bool
        correction: `none`: all 1. `tis`: weights above `cap` become `cap` (and below `floor`, if given, `floor`).
            `mis`: weights above `cap` (or below `floor`, if given) become 0. `icepop`: `mis` whose `floor` is required
        level: `token`: each token's own ratio; `sequence`: the product over the row, at each of its tokens
        cap: upper bound
        floor: lower bound

    Returns:
        (B, T) detached weights, 0 where masked.

    Raises:
        ValueError: an unknown name, or `icepop` without a floor.
    Source: TIS: Yao et al. (2025), Your efficient RL framework secretly brings you off-policy RL training;
    MIS: Liu et al. (2025), When speed kills stability; IcePop: Ring-1T (arXiv 2510.18855).
    """
    if correction not in CORRECTIONS or level not in LEVELS:
        raise ValueError(f"unknown correction {correction!r} at level {level!r}; known: {CORRECTIONS} at {LEVELS}")
    if correction == "icepop" and floor is None:
        raise ValueError("icepop needs a floor: it keeps the weights within [floor, cap]")
    log_ratio = _masked_log_ratio(old_logprobs, rollout_logprobs, mask)
    zero = torch.zeros_like(log_ratio)
    if correction == "none":
        return torch.where(mask, zero + 1, zero)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
    weights = torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    if correction == "tis":
        weights = weights.clamp(min=floor, max=cap)
    else:
        kept = (weights <= cap) if floor is None else (weights <= cap) & (weights >= floor)
        weights = torch.where(kept, weights, zero)
    return torch.where(mask, weights, zero).detach()


def rejection_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str,
    statistic: str,
    lower: float | None,
    upper: float,
) -> Tensor:
    """Return the mask without the tokens or rows whose mismatch statistic lies out of bounds.

    Args:
        old_logprobs: (B, T) recomputed by the training framework
        rollout_logprobs: (B, T) kept by the sampler
        mask: (B, T) bool
        level: `token`, or a whole row by `seq_sum`, `seq_mean` or `seq_max` of the statistic over its tokens
        statistic: `k1` = rollout − old (its bounds are natural logarithms of ratio bounds); `k2` = ½(old − rollout)²;
            `k3` = ratio − log ratio − 1
        lower: lower bound, or None
        upper: upper bound

    Returns:
        (B, T) bool.

    Raises:
        ValueError: an unknown level or statistic.
    Source: Liu et al. (2025), When speed kills stability (masked importance sampling); the divergences are verl's.
    """
    if level not in REJECTION_LEVELS or statistic not in ("k1", "k2", "k3"):
        raise ValueError(
            f"unknown rejection {level!r} by {statistic!r}; levels {REJECTION_LEVELS}, statistics k1, k2, k3"
        )
    log_ratio = _masked_log_ratio(old_logprobs, rollout_logprobs, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if statistic == "k1":
        value = -log_ratio
    elif statistic == "k2":
        value = 0.5 * log_ratio.square()
    else:
        value = torch.exp(log_ratio) - log_ratio - 1
    if level != "token":
        value = _over_row(value, mask, level).expand_as(value)
    kept = value <= upper if lower is None else (value <= upper) & (value >= lower)
    return mask & kept


def _masked_log_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    difference = old_logprobs.detach() - rollout_logprobs
    return torch.where(mask, difference, torch.zeros_like(difference))


def _over_row(value: Tensor, mask: Tensor, level: str) -> Tensor:
    if level == "seq_max":
        return torch.where(mask, value, torch.full_like(value, -torch.inf)).amax(dim=-1, keepdim=True)
    total = torch.where(mask, value, torch.zeros_like(value)).sum(dim=-1, keepdim=True)
    return total if level == "seq_sum" else total / mask.sum(dim=-1, keepdim=True).clamp(min=1)
