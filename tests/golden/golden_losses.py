"""What the recorded policy losses of both peers share: evaluating ours, comparing, and the rules of difference.

A peer's call is mapped to a `Run`: our loss, aggregation, weights, mask and denominator for the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from golden_cases import Case, Outcome, differs, first_gap, gap
from torch import Tensor

from grpoctl.algorithms.aggregation import loss_numerator
from grpoctl.algorithms.kl import token_kl
from grpoctl.algorithms.policy_loss import LossSettings, TokenLoss, policy_loss

UNDER_THE_MASK = "NaN or inf under the mask: ours is bitwise what it is without; the peer's loss or gradient turns NaN"
NO_TOKEN = "no valid token: ours is a step without loss (numerator 0, denominator 0, gradient 0); verl computes 0/0"
EMPTY_ROW = "row without a valid token in a mean over rows: ours leaves it out, TRL and verl's geo_mean count it"
CLAMP = "log-ratio NaN or beyond our clamp (±20 a token, 10 a sequence): ours has no gradient there and is finite unless NaN"
GEO_WEIGHTS = (
    "geo_mean with weights that vary in a row: ours multiplies each token's loss, verl takes their geometric mean"
)
GEO_LOG = "geo_mean with weights: verl takes exp(log(w + 1e-10)); equal once 1e-10 is added to ours"
GRADIENT_UNDER_THE_MASK = (
    "NaN or inf at a valid token: ours leaves the row's masked tokens without gradient, the peer's turn NaN"
)
SEQUENCE_WEIGHTS = (
    "sequence-level ratio with weights that vary in a row: ours weights each token's own gradient (GSPO-token)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One evaluation of our loss on a case's numbers."""

    loss: str
    aggregation: str
    settings: LossSettings
    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    denominator: float
    multiplier: float = 1.0
    weights: Tensor | None = None
    ref_logprobs: Tensor | None = None
    kl_coef: float = 0.0
    kl_times_ratio: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Loss, its gradient, the magnitude of the loss's terms, and the per-token statistics."""

    loss: float
    gradient: Tensor
    scale: float
    gradient_scale: Tensor
    token_loss: TokenLoss
    kl: Tensor | None = field(default=None)


def evaluate(run: Run) -> Result:
    """Return numerator / denominator and its gradient; a denominator of 0 is a step without loss."""
    logprobs = run.logprobs.clone().requires_grad_()
    result = policy_loss(
        run.loss,
        logprobs,
        old_logprobs=run.old_logprobs,
        advantages=run.advantages,
        mask=run.mask,
        settings=run.settings,
        weights=run.weights,
    )
    factor = run.multiplier / run.denominator if run.denominator else 0.0
    policy = loss_numerator(result.loss, run.mask, aggregation=run.aggregation) * factor
    (policy_gradient,) = torch.autograd.grad(policy, logprobs, retain_graph=True)
    scale = loss_numerator(result.loss.abs(), run.mask, aggregation=run.aggregation) * abs(factor)
    if run.ref_logprobs is None:
        return Result(
            loss=policy.item(),
            gradient=policy_gradient,
            scale=scale.item(),
            gradient_scale=policy_gradient.abs(),
            token_loss=result,
        )
    kl = token_kl(logprobs, run.ref_logprobs, estimator="k3", clamped=False, mask=run.mask)
    if run.kl_times_ratio:
        kl = kl * _ratio(run, logprobs)
    penalty = loss_numerator(kl, run.mask, aggregation=run.aggregation) * (factor * run.kl_coef)
    kl_gradient, row_weight = torch.autograd.grad(penalty, (logprobs, kl))
    ratio = _ratio(run, logprobs).detach() if run.kl_times_ratio else 1.0
    terms = 1 + torch.exp(run.ref_logprobs - run.logprobs) + (run.ref_logprobs - run.logprobs).abs()
    kl_scale = row_weight.abs() * ratio * terms
    if run.loss == "gspo" and run.kl_times_ratio:  # every token of the row feeds every token's gradient
        kl_scale = torch.where(run.mask, kl_scale, 0.0).amax(dim=-1, keepdim=True).expand_as(kl_scale)
    return Result(
        loss=(policy + penalty).item(),
        gradient=policy_gradient + kl_gradient,
        scale=(scale + penalty.abs()).item(),
        gradient_scale=policy_gradient.abs() + kl_scale,
        token_loss=result,
        kl=kl.detach(),
    )


def _ratio(run: Run, logprobs: Tensor) -> Tensor:
    zero = torch.zeros_like(logprobs)
    log_ratio = torch.where(run.mask, logprobs, zero) - torch.where(run.mask, run.old_logprobs, zero)
    if run.loss == "gspo":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True) / run.mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return torch.exp(log_ratio)


def masked_mean(values: Tensor, mask: Tensor) -> float:
    count = int(mask.sum())
    return (torch.where(mask, values.double(), 0.0).sum() / count).item() if count else 0.0


def compare(case: Case, ours: Result, run: Run, *, only: Tensor | None = None) -> str:
    """Return "" where loss and gradient (at the tokens of `only`) agree with the peer's."""
    only = torch.ones_like(run.mask) if only is None else only
    scale = ours.scale if math.isfinite(ours.scale) else 0.0
    gradient_scale = ours.gradient_scale[only].nan_to_num(nan=0.0, posinf=0.0)
    return first_gap(
        gap(ours.loss, case.output("loss"), rtol=case.rtol, scale=scale),
        gap(ours.gradient[only], case.output("grad_log_prob")[only.numpy()], rtol=case.rtol, scale=gradient_scale),
    )


def explain(  # noqa: PLR0911  one return a rule
    case: Case, ours: Result, run: Run, *, rows_in_mean: int | None
) -> Outcome:
    """Return the rule that the mismatch falls under, having asserted our own value; fail where none does."""
    message = first_gap(compare(case, ours, run), "metrics only")
    lengths = run.mask.sum(dim=-1)
    if not run.mask.any():
        assert run.denominator == 0 and ours.loss == 0 and not ours.gradient.any()
        return differs(NO_TOKEN)

    neutral = replace(run, **{name: torch.where(run.mask, value, 0.5) for name, value in _matrices(run).items()})
    if any(not torch.isfinite(value[~run.mask]).all() for value in _matrices(run).values()):
        without = evaluate(neutral)
        assert _same_bits(ours.loss, without.loss) and _same_bits(ours.gradient, without.gradient)
        valid_is_finite = all(torch.isfinite(value[run.mask]).all() for value in _matrices(run).values())
        assert not valid_is_finite or (math.isfinite(ours.loss) and torch.isfinite(ours.gradient).all())
        return differs(UNDER_THE_MASK)

    varies = run.weights is not None and any(
        len(set(row[row_mask].tolist())) > 1
        for row, row_mask in zip(run.weights.expand_as(run.mask), run.mask, strict=True)
    )
    if varies and run.loss in ("geo_mean", "gspo"):
        return _explain_varying_weights(ours, run)
    if run.loss == "geo_mean" and run.weights is not None:
        shifted = replace(run, weights=run.weights + 1e-10)
        if not compare(case, evaluate(shifted), shifted):
            return differs(GEO_LOG)

    valid_values = [value[run.mask] for value in _matrices(run).values()]
    if not all(torch.isfinite(values).all() for values in valid_values):
        assert not ours.gradient[~run.mask].any()
        if not compare(case, ours, run, only=run.mask):
            return differs(GRADIENT_UNDER_THE_MASK)

    if rows_in_mean is not None and bool((lengths == 0).any()):
        share = int((lengths > 0).sum()) / rows_in_mean
        scaled = replace(run, multiplier=run.multiplier * share)
        assert not compare(case, evaluate(scaled), scaled)
        return differs(EMPTY_ROW)

    if case.package == "trl":
        beyond = _beyond_clamp(run)
        if beyond.any():
            _assert_clamped(case, ours, run, beyond)
            return differs(CLAMP)
    pytest.fail(f"no rule explains {case.name}: {message}")


def _matrices(run: Run) -> dict[str, Tensor]:
    names = ("logprobs", "old_logprobs", "ref_logprobs", "weights", "advantages")
    values = {name: getattr(run, name) for name in names}
    return {name: value.expand_as(run.mask) for name, value in values.items() if value is not None}


def _same_bits(left: float | Tensor, right: float | Tensor) -> bool:
    return torch.equal(
        torch.as_tensor(left, dtype=torch.float64).nan_to_num(nan=1e300),
        torch.as_tensor(right, dtype=torch.float64).nan_to_num(nan=1e300),
    )


def _explain_varying_weights(ours: Result, run: Run) -> Outcome:
    """Assert that a token's loss is its unweighted loss times its own weight."""
    assert run.weights is not None
    plain = evaluate(replace(run, weights=None)).token_loss.loss
    assert not gap(ours.token_loss.loss, torch.where(run.mask, plain * run.weights, 0.0), rtol=1e-15)
    return differs(GEO_WEIGHTS if run.loss == "geo_mean" else SEQUENCE_WEIGHTS)


def _beyond_clamp(run: Run) -> Tensor:
    """Return the valid tokens whose ratio we bound and TRL doesn't."""
    log_ratio = torch.where(run.mask, run.logprobs - run.old_logprobs, 0.0)
    if run.loss == "gspo":
        mean = log_ratio.sum(dim=-1, keepdim=True) / run.mask.sum(dim=-1, keepdim=True).clamp(min=1)
        return ((mean > 10) | mean.isnan()).expand_as(run.mask) & run.mask
    return ((log_ratio.abs() > 20) | log_ratio.isnan()) & run.mask


def _assert_clamped(case: Case, ours: Result, run: Run, beyond: Tensor) -> None:
    """Assert the peer's gradient everywhere else, and a finite one (0 where the ratio has the gradient) beyond."""
    assert not ours.gradient[~run.mask].any()
    message = compare(case, replace(ours, loss=float(case.output("loss"))), run, only=run.mask & ~beyond)
    assert not message, f"outside the clamp {message}"
    if (run.logprobs - run.old_logprobs)[run.mask].isnan().any():
        assert math.isnan(ours.loss)
    elif run.ref_logprobs is None:
        assert math.isfinite(ours.loss) and torch.isfinite(ours.gradient).all()
        if run.loss in ("ppo_clip", "sapo", "gspo"):
            assert not ours.gradient[beyond].any()
