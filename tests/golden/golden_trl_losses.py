"""The recorded losses of TRL: loss, gradient and metrics of a call, and of a mini-batch cut into micro-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from golden_cases import MATCHED, Case, Outcome, absent, differs, first_gap, gap
from golden_losses import Result, Run, compare, evaluate, explain, masked_mean
from torch import Tensor

from grpoctl.algorithms.aggregation import loss_denominator
from grpoctl.algorithms.policy_loss import LOSSES, LossSettings

BNPO_MEAN = "bnpo over several micro-batches: TRL averages their token means, ours divides by the mini-batch's tokens"


TRL_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
METHODS_NOT_HERE = {
    **dict.fromkeys(("luspo", "vespo", "sequence-level cispo", "sequence-level sapo"), "policy loss"),
    **dict.fromkeys(("delta", "entropy_coef", "off_policy_mask_threshold", "top_entropy_quantile"), "TRL option"),
}


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


HANDLERS = {("trl", "_compute_loss"): trl_loss}
