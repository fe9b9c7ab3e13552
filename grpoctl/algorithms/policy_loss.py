"""The per-token policy losses and what they say about themselves.

Every loss gets matrices that are already neutral where the mask is false (selection, never multiplication: 0 × NaN is
NaN), so no value under the mask reaches a sum or a gradient. Minimising the loss raises the objective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from grpoctl.algorithms.log_ratio import within_limit

SEQUENCE_LOG_RATIO_LIMIT: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The knobs of the losses; each loss reads the ones its docstring names.

    Args:
        clip_low: ε_low; the ratio's lower bound is 1 − ε_low
        clip_high: ε_high; the ratio's upper bound is 1 + ε_high
        dual_clip: c > 1 bounds the loss of negative advantages to −A·c; None leaves it unbounded
        tau_positive: SAPO's temperature for positive advantages
        tau_negative: SAPO's temperature for the others
        ratio_cap: DPPO's truncation of the importance ratio
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    ratio_cap: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A loss matrix and its statistics, all (B, T).

    Args:
        loss: per-token loss with its gradient; 0 where masked
        ratio: π/π_old at each token (of the sequence for `gspo`), detached; 1 where masked
        clipped_low: true where the lower bound took the gradient away (`cispo`: where it bounds the weight)
        clipped_high: true where the upper bound or dual clip took the gradient away (`cispo`: bounds the weight)
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, LossSettings], TokenLoss]


def policy_loss(
    name: str,
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: LossSettings,
    weights: Tensor | None = None,
) -> TokenLoss:
    """Compute the named loss at every selected token.

    Args:
        name: a key of `LOSSES`
        logprobs: (B, T) log-probabilities under the policy being updated, with gradient
        old_logprobs: (B, T) log-probabilities under the policy that is the ratio's denominator
        advantages: (B, T) or (B, 1)
        mask: (B, T) bool, true at tokens with loss
        settings: the knobs
        weights: (B, T) detached off-policy correction that multiplies the loss

    Returns:
        Loss and statistics; masked tokens have loss 0, no gradient, ratio 1.

    Raises:
        ValueError: no loss of that name.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}; known: {', '.join(LOSSES)}")
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    result = LOSSES[name](
        torch.where(mask, logprobs, zero),
        torch.where(mask, old_logprobs, zero),
        torch.where(mask, advantages, zero),
        mask,
        settings,
    )
    loss = result.loss if weights is None else result.loss * torch.where(mask, weights, zero)
    return TokenLoss(
        loss=torch.where(mask, loss, zero),
        ratio=torch.where(mask, result.ratio.detach(), zero + 1),
        clipped_low=result.clipped_low & mask,
        clipped_high=result.clipped_high & mask,
    )


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return within_limit(logprobs - old_logprobs)


def _nowhere(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> TokenLoss:
    """Return max(−A·ratio, −A·clip(ratio)) with dual clip where set."""
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    clipped_high = (ratio > high) & (advantages > 0)
    if settings.dual_clip is not None:
        bound = -advantages * settings.dual_clip
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
        clipped_high = clipped_high | bounded
    return TokenLoss(loss=loss, ratio=ratio, clipped_low=(ratio < low) & (advantages < 0), clipped_high=clipped_high)


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> TokenLoss:
    """Clip each token's ratio to [1 − clip_low, 1 + clip_high]; log-ratio clamped to ±20; dual clip off by default.

    Source: PPO (arXiv 1707.06347) eq. 7; separate bounds: DAPO (arXiv 2503.14476) eq. 8; dual clip: arXiv 1912.09729.
    """
    return _clipped_surrogate(torch.exp(_log_ratio(logprobs, old_logprobs)), advantages, settings)


def gspo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings) -> TokenLoss:
    """Clip the sequence's length-normalised ratio, each token carrying its own gradient (GSPO-token).

    Source: GSPO (arXiv 2507.18071), equations 7 and 14; the log-ratio is bounded from above at 10.
    """
    lengths = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    sequence_log_ratio = (logprobs - old_logprobs).sum(dim=-1, keepdim=True) / lengths
    log_ratio = logprobs - logprobs.detach() + sequence_log_ratio.detach()
    ratio = torch.exp(log_ratio.clamp(max=SEQUENCE_LOG_RATIO_LIMIT))
    return _clipped_surrogate(ratio, advantages, _without_dual_clip(settings))


def _without_dual_clip(settings: LossSettings) -> LossSettings:
    return LossSettings(clip_low=settings.clip_low, clip_high=settings.clip_high)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> TokenLoss:
    """Weight the log-probability by the clipped, detached ratio: clipped tokens keep their gradient.

    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5.
    """
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs)).detach()
    return TokenLoss(
        loss=-ratio.clamp(low, high) * advantages * logprobs,
        ratio=ratio,
        clipped_low=ratio < low,
        clipped_high=ratio > high,
    )


def sapo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings) -> TokenLoss:
    """Replace the clip by a sigmoid gate around ratio 1, steeper for negative advantages.

    Source: SAPO (arXiv 2511.20347): f(x) = σ(τ(x − 1))·4/τ.
    """
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs))
    tau = torch.where(
        advantages > 0,
        torch.as_tensor(settings.tau_positive, dtype=ratio.dtype, device=ratio.device),
        torch.as_tensor(settings.tau_negative, dtype=ratio.dtype, device=ratio.device),
    )
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return TokenLoss(loss=-gate * advantages, ratio=ratio, clipped_low=_nowhere(ratio), clipped_high=_nowhere(ratio))


def geo_mean(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> TokenLoss:
    """Use the geometric mean of the token ratios, each clipped in log space to [−clip_low, clip_high].

    The sequence's loss stands at each of its tokens, so `seq-mean-token-mean` gives the paper's mean over sequences.

    Source: GMPO (arXiv 2507.20673).
    """
    lengths = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    log_ratio = logprobs - old_logprobs
    bounded = log_ratio.clamp(-settings.clip_low, settings.clip_high)
    sign = torch.sign(advantages)
    pessimistic = torch.where(mask, sign * torch.minimum(sign * log_ratio, sign * bounded), torch.zeros_like(log_ratio))
    ratio = torch.exp(pessimistic.sum(dim=-1, keepdim=True) / lengths)
    advantage = advantages.sum(dim=-1, keepdim=True) / lengths
    return TokenLoss(
        loss=(-advantage * ratio).expand_as(logprobs),
        ratio=torch.exp(within_limit(log_ratio).detach()),
        clipped_low=(log_ratio < -settings.clip_low) & (advantages < 0),
        clipped_high=(log_ratio > settings.clip_high) & (advantages > 0),
    )


def dppo_tv(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> TokenLoss:
    """Drop tokens whose probability moved by more than clip_low / clip_high (binary total variation) the gradient's way.

    Source: Rethinking the trust region in LLM RL (arXiv 2602.04879), binary TV; ratio truncated as in 5.4.
    """
    change = torch.exp(logprobs.detach()) - torch.exp(old_logprobs)
    keep = torch.where(advantages > 0, change <= settings.clip_high, change >= -settings.clip_low)
    return _trust_region(logprobs, old_logprobs, advantages, keep, settings)


def dppo_kl(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> TokenLoss:
    """Drop tokens whose binary KL from the old policy exceeds clip_low / clip_high in the gradient's direction.

    Source: Rethinking the trust region in LLM RL (arXiv 2602.04879), binary KL; ratio truncated as in 5.4.
    """
    new, old = torch.exp(logprobs.detach()), torch.exp(old_logprobs)
    other = torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    divergence = old * (old_logprobs - logprobs.detach()) + (1 - old) * other
    rising = (divergence <= settings.clip_high) | (new <= old)
    falling = (divergence <= settings.clip_low) | (new >= old)
    return _trust_region(logprobs, old_logprobs, advantages, torch.where(advantages > 0, rising, falling), settings)


def _trust_region(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, keep: Tensor, settings: LossSettings
) -> TokenLoss:
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs)).detach()
    loss = -advantages * ratio.clamp(max=settings.ratio_cap) * logprobs
    return TokenLoss(
        # a NaN token compares false, so it would be dropped here and show up in the gradient only
        loss=torch.where(keep | loss.isnan(), loss, torch.zeros_like(loss)),
        ratio=ratio,
        clipped_low=~keep & (advantages <= 0),
        clipped_high=~keep & (advantages > 0),
    )


def reinforce(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> TokenLoss:
    """Return −A·logprobs without a ratio (off-policy data need `weights`).

    Source: Williams (1992), Simple statistical gradient-following algorithms, the REINFORCE rule.
    """
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs)).detach()
    loss = -advantages * logprobs
    return TokenLoss(loss=loss, ratio=ratio, clipped_low=_nowhere(ratio), clipped_high=_nowhere(ratio))


LOSSES: Final[dict[str, LossFunction]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gpg": reinforce,  # GPG (arXiv 2504.02546) differs from REINFORCE in its advantage only
    "geo_mean": geo_mean,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "reinforce": reinforce,
}
