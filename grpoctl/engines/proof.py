"""How far two programs' log-probabilities of the same sequences may lie apart where both hold the same weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_GAPS: Final = {"float32": 2e-3, "bfloat16": 1.0}
MEAN_GAPS: Final = {"float32": 5e-4, "bfloat16": 0.08}
"""Limits of |Δ log-probability| by floating-point type, nats.

Measured over real text on SmolLM2-135M (docs/rollout-engines.md): float32 at most 7.5e-6 on average and 5e-5 for a token,
bfloat16 0.027 and 0.53.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far a server's log-probabilities lie from the policy's, nats."""

    mean: float
    max: float

    def within(self, dtype: str) -> bool:
        """Return whether this is no more than the noise of that floating-point type."""
        return self.mean <= MEAN_GAPS[dtype] and self.max <= MAX_GAPS[dtype]

    def __str__(self) -> str:
        return f"mean {self.mean:.2g}, max {self.max:.2g} nats"


def gap_between(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> Gap:
    """Return mean and largest |Δ| between two answers to the same canary, as far as the shorter one goes."""
    deltas = [abs(a - b) for row, other in zip(found, expected, strict=True) for a, b in zip(row, other, strict=False)]
    return Gap(mean=sum(deltas) / len(deltas), max=max(deltas)) if deltas else Gap(mean=math.inf, max=math.inf)
