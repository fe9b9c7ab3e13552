"""Correction for samples whose sampler was not exactly the policy that the trainer recomputes.

Both inputs are in the files before the step, so weights and masks are constants of the mini-batch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from grpoctl.algorithms.log_ratio import within_limit

CORRECTIONS: Final = ("none", "tis", "mis", "icepop")
LEVELS: Final = ("token", "sequence")


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
    weights = torch.exp(within_limit(log_ratio))
    if correction == "tis":
        weights = weights.clamp(min=floor, max=cap)
    else:
        kept = (weights <= cap) if floor is None else (weights <= cap) & (weights >= floor)
        weights = torch.where(kept, weights, zero)
    return torch.where(mask, weights, zero).detach()


def _masked_log_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    difference = old_logprobs.detach() - rollout_logprobs
    return torch.where(mask, difference, torch.zeros_like(difference))
