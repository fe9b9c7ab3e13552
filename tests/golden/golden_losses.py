"""The recorded policy losses of verl and TRL: loss, gradient and the metrics that we have too.

A peer's call is mapped to a `Run`: our loss, aggregation, weights, mask and denominator for the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from golden_cases import MATCHED, Case, Outcome, absent, differs, first_gap, gap
from golden_correction import effective_correction
from torch import Tensor

from grpoctl.algorithms.aggregation import AGGREGATIONS, check_aggregation, loss_denominator, loss_numerator
from grpoctl.algorithms.kl import token_kl
from grpoctl.algorithms.policy_loss import LOSSES, LossSettings, TokenLoss, policy_loss
from grpoctl.algorithms.token_logprobs import token_logprobs

UNDER_THE_MASK = "NaN or inf under the mask: ours is bitwise what it is without; the peer's loss or gradient turns NaN"
NO_TOKEN = "no valid token: ours is a step without loss (numerator 0, denominator 0, gradient 0); verl computes 0/0"
EMPTY_ROW = "row without a valid token in a mean over rows: ours leaves it out, TRL and verl's geo_mean count it"
BROKEN_METRICS = "IcePop that keeps no weight: verl's metrics divide by zero and raise; ours is a finite loss"
CLAMP = "log-ratio NaN or beyond our clamp (±20 a token, 10 a sequence): ours has no gradient there and is finite unless NaN"
PADDED_WIDTH = (
    "divisor of seq-mean-token-sum-norm: the padded width in verl, a constant here (equal when it is set to it)"
)
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

VERL_MODES = {
    "vanilla": "ppo_clip",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "gpg",
    "geo_mean": "geo_mean",
    "cispo": "cispo",
    "bypass_mode": "",
}
TRL_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
METHODS_NOT_HERE = {
    **dict.fromkeys(("clip_cov", "dro", "kl_cov", "luspo", "vespo"), "policy loss"),
    "token-sum": "aggregation",
    "rollout_is_batch_normalize": "correction",
    **dict.fromkeys(("sequence-level cispo", "sequence-level sapo"), "policy loss"),
    **dict.fromkeys(("delta", "entropy_coef", "off_policy_mask_threshold", "top_entropy_quantile"), "TRL option"),
}


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


# verl


def verl_run(case: Case) -> Run | Outcome:
    """Return our evaluation for a verl loss mode, or say that the method isn't here."""
    params = case.params
    mode, aggregation = params["loss_mode"], params["loss_agg_mode"]
    if mode not in VERL_MODES:
        assert mode not in LOSSES
        return absent(mode)
    loss = VERL_MODES[mode]
    mask = case.mask("response_mask")
    weights = case.tensor("rollout_is_weights") if "rollout_is_weights" in case.inputs else None
    if mode == "bypass_mode":
        correction = params["policy_loss"]["rollout_correction"]
        if correction.get("rollout_is_batch_normalize"):
            return absent("rollout_is_batch_normalize")
        loss = correction.get("loss_type", "ppo_clip")
        weights, mask = effective_correction(
            case.tensor("log_prob"), case.tensor("old_log_prob"), mask, correction, default_threshold=2.0
        )
        weights = weights if loss == "reinforce" else None
    if loss in ("sapo", "geo_mean"):  # both ignore loss_agg_mode
        aggregation = "seq-mean-token-mean"
    if aggregation not in AGGREGATIONS:
        with pytest.raises(ValueError, match="unknown aggregation"):
            check_aggregation(aggregation)
        return absent(aggregation)
    clip = params["clip_ratio"]
    low, high = params.get("clip_ratio_low"), params.get("clip_ratio_high")
    denominator, multiplier = verl_denominator(
        mask, aggregation, {} if loss == "geo_mean" else params.get("global_batch_info") or {}
    )
    return Run(
        loss=loss,
        aggregation=aggregation,
        settings=LossSettings(
            clip_low=clip if low is None else low,
            clip_high=clip if high is None else high,
            dual_clip=params["clip_ratio_c"],
            tau_positive=params.get("tau_pos", 1.0),
            tau_negative=params.get("tau_neg", 1.05),
            ratio_cap=params["clip_ratio_c"],
        ),
        logprobs=case.tensor("log_prob"),
        old_logprobs=case.tensor("old_log_prob"),
        advantages=case.tensor("advantages"),
        mask=mask,
        denominator=denominator,
        multiplier=multiplier,
        weights=weights,
    )


def verl_denominator(mask: Tensor, aggregation: str, batch_info: dict[str, int | None]) -> tuple[float, float]:
    """Return the mini-batch's denominator (from the global counts where given) and verl's factor dp_size."""
    lengths = mask.sum(dim=-1)
    num_tokens, num_rows = batch_info.get("batch_num_tokens"), batch_info.get("global_batch_size")
    if aggregation == "token-mean" and num_tokens is not None:
        lengths = torch.tensor([num_tokens])
    if aggregation != "token-mean" and num_rows is not None:
        lengths = torch.ones(num_rows, dtype=torch.int64)
    norm_tokens = batch_info.get("loss_scale_factor") or mask.shape[-1]
    denominator = loss_denominator(lengths, aggregation=aggregation, norm_tokens=norm_tokens)
    return denominator, float(batch_info.get("dp_size") or 1)


def verl_loss(case: Case) -> Outcome:
    """Compare loss, gradient and clip fractions with a verl policy loss."""
    run = verl_run(case)
    if isinstance(run, Outcome):
        return run
    ours = evaluate(run)
    if case.error is not None:
        return _explain_error(case, ours, run)
    padded = run.aggregation == "seq-mean-token-sum-norm" and not (case.params.get("global_batch_info") or {}).get(
        "loss_scale_factor"
    )
    if not compare(case, ours, run) and not verl_metrics_gap(case, ours, run):
        return differs(PADDED_WIDTH) if padded else MATCHED
    return explain(case, ours, run, rows_in_mean=run.mask.shape[0] if run.loss == "geo_mean" else None)


def _explain_error(case: Case, ours: Result, run: Run) -> Outcome:
    """Return the rule for a case in which verl raised: its correction's metrics refuse or break."""
    if not run.mask.any():
        assert run.denominator == 0 and ours.loss == 0 and not ours.gradient.any()
        return differs(NO_TOKEN)
    threshold = case.params.get("policy_loss", {}).get("rollout_correction", {}).get("rollout_is_threshold")
    assert "_" in str(threshold), f"no rule for the error {case.error}"
    assert math.isfinite(ours.loss) and torch.isfinite(ours.gradient).all()
    return differs(BROKEN_METRICS)


def verl_metrics_gap(case: Case, ours: Result, run: Run) -> str:
    """Compare the metrics that we have too. Clip fractions are float32 in verl, whatever the case's precision."""
    metrics = case.outputs["metrics"]
    token, advantages = ours.token_loss, run.advantages.expand_as(run.mask)
    expected: dict[str, float] = {}
    clipped = token.clipped_low | token.clipped_high
    if run.loss == "ppo_clip":
        dual = token.clipped_high & (advantages < 0)
        expected["actor/pg_clipfrac"] = masked_mean(clipped & ~dual, run.mask)
        expected["actor/pg_clipfrac_lower"] = masked_mean(dual, run.mask)
    elif run.loss == "cispo":  # verl's test of clipping is ratio != clip(ratio), true for NaN
        expected["actor/pg_clipfrac"] = masked_mean(clipped | token.ratio.isnan(), run.mask)
    elif run.loss in ("gspo", "sapo", "dppo_tv", "dppo_kl"):
        expected["actor/pg_clipfrac"] = masked_mean(clipped, run.mask)
    elif run.loss == "geo_mean":  # verl counts a ratio out of bounds on either side, ours the side that costs gradient
        assert masked_mean(token.clipped_high, run.mask) <= metrics["actor/pg_clipfrac"] + 1e-6
        assert masked_mean(token.clipped_low, run.mask) <= metrics["actor/pg_clipfrac_lower"] + 1e-6
    gaps = [gap(value, metrics[key], rtol=1e-6, scale=1.0) for key, value in expected.items()]
    if run.loss in ("ppo_clip", "cispo", "sapo", "dppo_tv", "dppo_kl"):
        kl = -torch.log(token.ratio)
    else:
        kl = torch.where(run.mask, run.old_logprobs - run.logprobs, 0.0)
    if "actor/ppo_kl" in metrics:
        scale = masked_mean(kl.abs(), run.mask) if torch.isfinite(kl).all() else 0.0
        gaps.append(gap(masked_mean(kl, run.mask), metrics["actor/ppo_kl"], rtol=max(case.rtol, 1e-6), scale=scale))
    return first_gap(*gaps)


# TRL


def trl_run(case: Case, rows: slice = slice(None)) -> Run | Outcome:
    """Return our evaluation for a TRL loss type, or say that the method isn't here."""
    params = case.params
    loss_type, level = params["loss_type"], params.get("importance_sampling_level", "token")
    if loss_type not in TRL_AGGREGATIONS:
        assert loss_type not in LOSSES
        return absent(loss_type)
    if loss_type in ("cispo", "sapo") and level == "sequence":
        return absent(f"sequence-level {loss_type}")
    for option, neutral in (
        ("delta", None),
        ("entropy_coef", 0.0),
        ("off_policy_mask_threshold", None),
        ("top_entropy_quantile", 1.0),
    ):
        if params.get(option, neutral) != neutral:
            return absent(option)
    clip, clip_high = params["epsilon"], params.get("epsilon_high")
    clip_high = clip if clip_high is None else clip_high
    settings = LossSettings(clip_low=clip, clip_high=clip_high)
    if loss_type == "cispo":  # TRL bounds the ratio by epsilon_high itself, and not from below
        settings = LossSettings(clip_low=1.0, clip_high=clip_high - 1)
    if loss_type == "sapo":  # TRL holds the temperatures in torch's default precision
        rounding = getattr(np, params.get("default_dtype", "float32"))
        settings = LossSettings(
            tau_positive=float(rounding(params.get("sapo_temperature_pos", 1.0))),
            tau_negative=float(rounding(params.get("sapo_temperature_neg", 1.05))),
        )
    loss = {"cispo": "cispo", "sapo": "sapo"}.get(loss_type, "gspo" if level == "sequence" else "ppo_clip")
    mask = case.mask("mask")[rows]
    logprobs = case.tensor("log_prob")[rows]
    beta = params.get("beta", 0.0)
    return Run(
        loss=loss,
        aggregation=TRL_AGGREGATIONS[loss_type],
        settings=settings,
        logprobs=logprobs,
        old_logprobs=case.tensor("old_log_prob")[rows] if "old_log_prob" in case.inputs else logprobs,
        advantages=case.tensor("advantages")[rows, None],
        mask=mask,
        denominator=trl_denominator(case, mask),
        weights=case.tensor("importance_sampling_ratio") if "importance_sampling_ratio" in case.inputs else None,
        ref_logprobs=case.tensor("ref_log_prob")[rows] if beta else None,
        kl_coef=beta,
        kl_times_ratio=params.get("use_bias_correction_kl", True),
    )


def trl_denominator(case: Case, mask: Tensor) -> float:
    """Return the denominator of one micro-batch as TRL scales it for gradient accumulation."""
    params, lengths = case.params, mask.sum(dim=-1)
    training = params.get("mode", "train") == "train"
    accumulation = params["gradient_accumulation_steps"] if training else 1
    aggregation = TRL_AGGREGATIONS[params["loss_type"]]
    if params["loss_type"] in ("dapo", "cispo"):
        window = accumulation / params["steps_per_generation"] if training else 1.0
        return loss_denominator(torch.tensor([params["num_items_in_batch"]]), aggregation=aggregation) * window
    norm_tokens = params["max_completion_length"]
    return loss_denominator(lengths, aggregation=aggregation, norm_tokens=norm_tokens) * accumulation


def trl_loss(case: Case) -> Outcome:
    """Compare one `_compute_loss` call with ours."""
    if "micro_losses" in case.outputs:
        return trl_micro_batches(case)
    run = trl_run(case)
    if isinstance(run, Outcome):
        return run
    ours = evaluate(run)
    if not compare(case, ours, run) and not trl_metrics_gap(case, ours, run):
        return MATCHED
    counts_rows = case.params["loss_type"] in ("grpo", "sapo", "dr_grpo")
    return explain(case, ours, run, rows_in_mean=run.mask.shape[0] if counts_rows else None)


def trl_metrics_gap(case: Case, ours: Result, run: Run) -> str:
    """Compare clip fractions and KL; those of a sequence-level ratio are means over rows in TRL. All are float32."""
    metrics, token = case.outputs["metrics"], ours.token_loss
    expected: dict[str, float] = {}

    def mean(flags: Tensor) -> float:
        return flags.any(dim=-1).double().mean().item() if run.loss == "gspo" else masked_mean(flags, run.mask)

    if run.loss in ("ppo_clip", "gspo"):
        expected["clip_ratio/low_mean"] = mean(token.clipped_low)
        expected["clip_ratio/high_mean"] = mean(token.clipped_high)
        expected["clip_ratio/region_mean"] = mean(token.clipped_low | token.clipped_high)
    elif run.loss == "cispo":
        expected["cispo_clip_ratio"] = masked_mean(token.clipped_high & (run.advantages > 0), run.mask)
    gaps = [gap(value, metrics[key], rtol=1e-6, scale=1.0) for key, value in expected.items()]
    if ours.kl is not None:
        gaps.append(gap(masked_mean(ours.kl, run.mask), metrics["kl"], rtol=1e-6))
    return first_gap(*gaps)


BNPO_MEAN = "bnpo over several micro-batches: TRL averages their token means, ours divides by the mini-batch's tokens"


def trl_micro_batches(case: Case) -> Outcome:
    """Compare every micro-batch and the accumulated step: ours divides each numerator by the mini-batch's denominator."""
    whole = trl_run(case)
    if isinstance(whole, Outcome):
        return whole
    num_micro = case.params["gradient_accumulation_steps"]
    size = whole.mask.shape[0] // num_micro
    cuts = [slice(start, start + size) for start in range(0, whole.mask.shape[0], size)]
    denominator = loss_denominator(
        whole.mask.sum(dim=-1), aggregation=whole.aggregation, norm_tokens=case.params["max_completion_length"]
    )
    results = []
    for rows in cuts:
        run = trl_run(case, rows)
        assert isinstance(run, Run)
        if case.params["loss_type"] != "bnpo":
            run = replace(run, denominator=denominator)
        results.append(evaluate(run))
    scale = sum(result.scale for result in results)
    message = first_gap(
        *(
            gap(result.loss, peer, rtol=case.rtol, scale=result.scale)
            for result, peer in zip(results, case.output("micro_losses"), strict=True)
        ),
        gap(sum(result.loss for result in results), case.output("loss_sum"), rtol=case.rtol, scale=scale),
        gap(torch.cat([result.gradient for result in results]), case.output("grad_log_prob_rows"), rtol=case.rtol),
    )
    assert not message, message
    if case.params["loss_type"] != "bnpo" or num_micro == 1:
        return MATCHED
    cut = [
        evaluate(replace(run, denominator=denominator)).loss
        for run in (trl_run(case, rows) for rows in cuts)
        if isinstance(run, Run)
    ]
    assert not gap(sum(cut), evaluate(replace(whole, denominator=denominator)).loss, rtol=case.rtol, scale=scale)
    return differs(BNPO_MEAN)


# both


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


def entropy_and_logprobs(case: Case) -> Outcome:
    """Compare log-softmax and entropy; with the identity as head, hidden states are logits."""
    logits = case.tensor("logits")
    flat, ids = logits.flatten(0, 1), torch.tensor(case.inputs["labels"]).flatten()
    head = torch.eye(flat.shape[-1], dtype=flat.dtype)
    shape = logits.shape[:2]
    checks = []
    for temperature, keys in ((1.0, ("logprob", "logprob_naive", "logprob_v2")), (0.7, ("logprob_temp0.7",))):
        logprobs, entropy = token_logprobs(flat, head, ids, temperature=temperature, with_entropy=True)
        assert entropy is not None
        largest = float(flat.abs().max()) / temperature
        present = [key for key in keys if key in case.outputs]
        checks += [gap(logprobs.view(shape), case.output(key), rtol=case.rtol, scale=largest) for key in present]
        if temperature == 1.0:
            key = "token_entropy" if "token_entropy" in case.outputs else "entropy"
            checks.append(gap(entropy.view(shape), case.output(key), rtol=case.rtol, scale=largest))
            if "entropy_loss" in case.outputs:
                mask, mode = case.mask("response_mask"), case.params["loss_agg_mode"]
                denominator, _ = verl_denominator(mask, mode, {})
                mean = loss_numerator(entropy.view(shape), mask, aggregation=mode) / denominator
                checks.append(gap(mean, case.output("entropy_loss"), rtol=case.rtol, scale=largest))
    message = first_gap(*checks)
    assert not message, message
    return MATCHED


HANDLERS = {
    ("trl", "_compute_loss"): trl_loss,
    ("trl", "selective_log_softmax"): entropy_and_logprobs,
    ("verl", "compute_entropy_loss"): entropy_and_logprobs,
    **{("verl", f"compute_policy_loss_{mode}"): verl_loss for mode in VERL_MODES},
    **{("verl", f"compute_policy_loss_{mode}"): verl_loss for mode in ("clip_cov", "dro", "kl_cov")},
}
