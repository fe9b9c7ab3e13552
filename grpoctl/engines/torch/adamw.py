"""torch's AdamW over float32 weights: its groups, and the clipped step that every engine but DeepSpeed takes with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpoctl.engines.base import OptimizerSettings


def torch_adamw(parameters: Sequence[Any], settings: OptimizerSettings) -> torch.optim.AdamW:
    """Return the optimizer; the learning rate is set at each step."""
    return torch.optim.AdamW(
        decay_groups(parameters, settings.weight_decay),
        lr=0.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )


def decay_groups(parameters: Sequence[Any], weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: matrices decay, norms and biases don't; a group without members is left out."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def clipped_step(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Any], norm: Tensor, *, lr: float, grad_clip: float | None
) -> float | None:
    """Clip, step and clear; return the norm, or None (and no step) where it isn't finite.

    Args:
        optimizer: with the gradients of a whole step
        parameters: those that have one
        norm: of the whole gradient, over all processes
        lr: of this step
        grad_clip: largest norm, None without limit
    """
    finite = bool(torch.isfinite(norm))
    if finite:
        if grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm) if finite else None
