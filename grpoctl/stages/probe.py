"""A policy's log-probabilities of a few stored completions: proof that two copies of it are the same policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def probe_logprobs(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return each completion's log-probabilities by token at temperature 1, one row a forward."""
    import torch

    from grpoctl.engines.base import Unit
    from grpoctl.engines.forward import unit_logprobs

    result = []
    for prompt, completion in zip(prompts, completions, strict=True):
        unit = Unit(
            prompt_ids=np.asarray(prompt, dtype=np.int32),
            completions=(np.asarray(completion, dtype=np.int32),),
            rows=(0,),
        )
        with torch.no_grad():
            values, _ = unit_logprobs(model, [unit], temperature=1.0)
        result.append([float(value) for value in values])
    return result


def largest_gap(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    """Return the largest |Δ log-probability| between two answers to the same probe, nats."""
    return max(
        (
            abs(ours - theirs)
            for row, other in zip(found, expected, strict=True)
            for ours, theirs in zip(row, other, strict=True)
        ),
        default=0.0,
    )
