"""Samples for reward tests."""

from __future__ import annotations

from grpoctl.rewards.sample import RewardSample


def sample(completion="x", *, index=0, prompt="q", source=None, num_tokens=2, ids=None, prompt_text=None):
    return RewardSample(
        sample_id=f"p0@0#{index}",
        prompt=prompt,
        completion=completion,
        prompt_ids=[1],
        completion_ids=list(range(num_tokens)) if ids is None else ids,
        finish_reason="stop",
        source={} if source is None else source,
        prompt_text=prompt_text,
    )
