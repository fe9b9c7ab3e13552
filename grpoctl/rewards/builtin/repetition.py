"""A reward that punishes completions which repeat themselves."""

from __future__ import annotations

from collections.abc import Callable

from grpoctl.rewards.builtin.options import require_positive_int
from grpoctl.rewards.sample import RewardSample


def repetition(*, n: int = 3) -> Callable[[RewardSample], float]:
    """Return minus the fraction of token n-grams that occurred before: 0 without repetition, towards −1 for a loop.

    `−(1 − distinct n-grams / all n-grams)`; 0 for a completion of fewer than n tokens.

    Args:
        n: tokens per n-gram.

    Source: Yeo et al., Demystifying Long Chain-of-Thought Reasoning (arXiv:2502.03373), appendix C.2.
    """
    require_positive_int("repetition", "n", n)

    def reward(sample: RewardSample) -> float:
        ids = sample.completion_ids
        ngrams = list(zip(*(ids[start:] for start in range(n)), strict=False))
        return len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0

    return reward
