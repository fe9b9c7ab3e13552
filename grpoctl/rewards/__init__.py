"""Rewards: user functions called as their home calls them, in children that can be killed; built-ins beside them.

Knows nothing of artifacts, stages or configs: samples in, one typed outcome per sample out.
"""

from grpoctl.rewards.sample import RewardOutcome, RewardSample

__all__ = ["RewardOutcome", "RewardSample"]
