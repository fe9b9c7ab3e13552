"""Per-token estimates of the divergence between the policy and the reference."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from grpoctl.algorithms.log_ratio import within_limit

K3_LIMIT: Final = 10.0

ALIASES: Final = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""verl's names. The literature calls k3 the low-variance estimator."""

ESTIMATORS: Final = ("k1", "k2", "k3", "abs")


def canonical_estimator(name: str) -> str:
    """Return our name of an estimator given ours or verl's, keeping a trailing `+`.

    Raises:
        ValueError: no estimator of that name.
    """
    base, plus = (name[:-1], "+") if name.endswith("+") else (name, "")
    base = ALIASES.get(base, base)
    if base not in ESTIMATORS:
        known = ", ".join([*ESTIMATORS, *ALIASES])
        raise ValueError(f"unknown KL estimator {name!r}; known: {known}, each also with a trailing '+'")
    return base + plus


def token_kl(
    logprobs: Tensor, ref_logprobs: Tensor, *, estimator: str, clamped: bool = True, mask: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy ‖ reference) at each sampled token.

    Args:
        logprobs: (B, T) log-probabilities of the sampled tokens under the policy, nats
        ref_logprobs: (B, T) the same under the reference, nats
        estimator: `k1` = logprobs − ref; `k2` = ½(logprobs − ref)²; `k3` = exp(ref − logprobs) − (ref − logprobs) − 1;
            `abs` = |logprobs − ref|; verl's names; a trailing `+` keeps the value and takes the gradient of k2
            (straight-through: k2's is the one whose expectation is the gradient of the KL)
        clamped: bound k3's exponent to ±20 and its value to ±10, with no gradient beyond
        mask: (B, T) bool, true at tokens that count. Selecting after the estimate is too late for the gradient
            (0 · exp(NaN) is NaN), so pass it wherever masked positions may hold anything but numbers

    Returns:
        (B, T) estimates, nats; 0 without gradient where masked.
    Source: Schulman, Approximating KL divergence (2020), http://joschu.net/blog/kl-approx.html.
    """
    name = canonical_estimator(estimator)
    straight_through = name.endswith("+")
    if mask is not None:
        zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
        logprobs, ref_logprobs = torch.where(mask, logprobs, zero), torch.where(mask, ref_logprobs, zero)
    value = _estimate(logprobs, ref_logprobs, name.removesuffix("+"), clamped)
    if not straight_through:
        return value
    gradient_of = 0.5 * (logprobs - ref_logprobs).square()
    return gradient_of - gradient_of.detach() + value.detach()


def _estimate(logprobs: Tensor, ref_logprobs: Tensor, name: str, clamped: bool) -> Tensor:
    if name == "k1":
        return logprobs - ref_logprobs
    if name == "k2":
        return 0.5 * (logprobs - ref_logprobs).square()
    if name == "abs":
        return (logprobs - ref_logprobs).abs()
    log_ratio = ref_logprobs - logprobs
    if not clamped:
        return torch.exp(log_ratio) - log_ratio - 1
    log_ratio = within_limit(log_ratio)
    return (torch.exp(log_ratio) - log_ratio - 1).clamp(max=K3_LIMIT)
