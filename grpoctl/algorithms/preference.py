"""The Bradley–Terry model of preferences: the better of two answers wins with probability sigmoid(difference of rewards)."""

from __future__ import annotations

import torch
from torch import Tensor


def bradley_terry_loss(chosen_rewards: Tensor, rejected_rewards: Tensor) -> Tensor:
    """Return −log of the probability that the chosen answer wins, for each pair.

    Args:
        chosen_rewards: (B,) rewards of the better answers
        rejected_rewards: (B,) rewards of the others

    Returns:
        (B,) nats; log 2 where both rewards are equal, finite for any finite difference.
    Source: Bradley & Terry 1952 (Biometrika 39), equation 2; InstructGPT (arXiv 2203.02155), equation 1.
    """
    return -torch.nn.functional.logsigmoid(chosen_rewards - rejected_rewards)
