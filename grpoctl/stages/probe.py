"""A policy's log-probabilities of a few stored completions: proof that two copies of it are the same policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def probe_logprobs(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], *, temperature: float
) -> list[list[float]]:
    """Return each completion's log-probabilities by token, one row a forward."""
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
            values, _ = unit_logprobs(model, [unit], temperature=temperature)
        result.append([float(value) for value in values])
    return result
