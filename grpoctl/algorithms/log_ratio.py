"""Log-ratios kept where their exponential is a number."""

from __future__ import annotations

from typing import Final

from torch import Tensor

LOG_RATIO_LIMIT: Final = 20.0
"""e^20 ≈ 5e8; beyond it one token's ratio says nothing and its square leaves float32's useful range."""


def within_limit(log_ratio: Tensor) -> Tensor:
    """Return the log-ratio within ±LOG_RATIO_LIMIT, in its own shape."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
