"""How a matrix of per-token losses becomes one number, numerator and denominator apart.

The denominator belongs to the mini-batch: it is computed from the files' lengths before the first forward. Every
micro-batch then adds its own numerator, so how the mini-batch is cut, padded or spread over ranks can't change the loss.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

AGGREGATIONS: Final = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def check_aggregation(name: str) -> None:
    """Raise ValueError for a name that isn't an aggregation."""
    if name not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {name!r}; known: {', '.join(AGGREGATIONS)}")


def loss_denominator(lengths: Tensor, *, aggregation: str, norm_tokens: int | None = None) -> float:
    """Return what the summed numerators of a mini-batch are divided by.

    Args:
        lengths: (B,) number of tokens with loss in each row of the whole mini-batch; rows of 0 don't count
        aggregation: `token-mean`: all tokens. `seq-mean-token-mean` and `seq-mean-token-sum`: rows with a token.
            `seq-mean-token-sum-norm`: these rows times `norm_tokens`
        norm_tokens: the constant of `seq-mean-token-sum-norm` (the sampling limit, never a padded width)

    Returns:
        The denominator; 0.0 where the mini-batch has no token, which the caller must treat as a step without loss.

    Raises:
        ValueError: an unknown aggregation, or `norm_tokens` missing or not positive where it is used.
    Source: token-mean: DAPO (arXiv 2503.14476) eq. 8; seq-mean-token-mean: DeepSeekMath (arXiv 2402.03300) eq. 3;
    seq-mean-token-sum-norm: Understanding R1-Zero-like training (arXiv 2503.20783), section 3.2.
    """
    check_aggregation(aggregation)
    if aggregation == "token-mean":
        return float(lengths.sum())
    num_rows = float((lengths > 0).sum())
    if aggregation != "seq-mean-token-sum-norm":
        return num_rows
    if norm_tokens is None or norm_tokens <= 0:
        raise ValueError(f"seq-mean-token-sum-norm needs norm_tokens > 0, got {norm_tokens}")
    return num_rows * norm_tokens


def loss_numerator(token_losses: Tensor, mask: Tensor, *, aggregation: str) -> Tensor:
    """Sum the selected losses with the aggregation's row weights.

    Args:
        token_losses: (B, T) losses; anything, NaN included, where the mask is false
        mask: (B, T) bool, true at tokens with loss
        aggregation: as in `loss_denominator`

    Returns:
        Scalar; exactly 0 where no token is selected.
    """
    check_aggregation(aggregation)
    selected = torch.where(mask, token_losses, torch.zeros_like(token_losses))
    if aggregation != "seq-mean-token-mean":
        return selected.sum()
    lengths = mask.sum(dim=-1).clamp(min=1)
    return (selected.sum(dim=-1) / lengths).sum()
