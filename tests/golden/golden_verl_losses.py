"""The recorded policy losses of verl: loss, gradient and the metrics that we have too."""

from __future__ import annotations

import math

import pytest
import torch
from golden_cases import MATCHED, Case, Outcome, absent, differs, first_gap, gap
from golden_correction import effective_weights
from golden_losses import NO_TOKEN, Result, Run, compare, evaluate, explain, masked_mean
from torch import Tensor

from grpoctl.algorithms.aggregation import AGGREGATIONS, check_aggregation, loss_denominator, loss_numerator
from grpoctl.algorithms.policy_loss import LOSSES, LossSettings
from grpoctl.algorithms.token_logprobs import token_logprobs

BROKEN_METRICS = "IcePop that keeps no weight: verl's metrics divide by zero and raise; ours is a finite loss"
PADDED_WIDTH = (
    "divisor of seq-mean-token-sum-norm: the padded width in verl, a constant here (equal when it is set to it)"
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
NOT_HERE = ("clip_cov", "dro", "kl_cov")
METHODS_NOT_HERE = {
    **dict.fromkeys(NOT_HERE, "policy loss"),
    "token-sum": "aggregation",
    "rollout_is_batch_normalize": "correction",
}


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
        for name in ("rollout_is_batch_normalize", "rollout_rs"):
            if correction.get(name):
                return absent(name)
        loss = correction.get("loss_type", "ppo_clip")
        weights = effective_weights(
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
    ("trl", "selective_log_softmax"): entropy_and_logprobs,
    ("verl", "compute_entropy_loss"): entropy_and_logprobs,
    **{("verl", f"compute_policy_loss_{mode}"): verl_loss for mode in (*VERL_MODES, *NOT_HERE)},
}
