"""Rewards that punish long completions, by number of tokens."""

from __future__ import annotations

from collections.abc import Callable

from grpoctl.algorithms.overlong import overlong_penalty
from grpoctl.errors import UsageError
from grpoctl.rewards.builtin.options import require_positive_int
from grpoctl.rewards.sample import RewardSample


def length(*, target: int) -> Callable[[RewardSample], float]:
    """Return a reward of 0 up to `target` tokens, then falling linearly to −1 at twice as many and staying there.

    `reward = max(−1, −max(0, num_tokens − target) / target)`

    Args:
        target: the number of tokens that costs nothing.
    """
    require_positive_int("length", "target", target)

    def reward(sample: RewardSample) -> float:
        excess = len(sample.completion_ids) - target
        return max(-1.0, -excess / target) if excess > 0 else 0.0

    return reward


def overlong(*, max_tokens: int, buffer_tokens: int) -> Callable[[RewardSample], float]:
    """Return DAPO's soft overlong punishment, `algorithms.overlong.overlong_penalty`.

    Args:
        max_tokens: L_max, where the punishment is full.
        buffer_tokens: L_cache, the number of tokens before L_max over which it grows.
    """
    require_positive_int("overlong", "max_tokens", max_tokens)
    require_positive_int("overlong", "buffer_tokens", buffer_tokens)
    if buffer_tokens > max_tokens:
        raise UsageError(f"reward overlong: buffer_tokens {buffer_tokens} is above max_tokens {max_tokens}; lower it")

    def reward(sample: RewardSample) -> float:
        num_tokens = len(sample.completion_ids)
        return overlong_penalty(num_tokens, max_tokens=max_tokens, buffer_tokens=buffer_tokens)

    return reward
