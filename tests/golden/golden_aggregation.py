"""The recorded aggregations of verl: loss, gradient, and micro-batches against the whole mini-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from golden_cases import MATCHED, Case, Outcome, absent, differs, first_gap, gap
from golden_losses import NO_TOKEN
from golden_verl_losses import PADDED_WIDTH, verl_denominator
from torch import Tensor

from grpoctl.algorithms.aggregation import AGGREGATIONS, check_aggregation, loss_denominator, loss_numerator

UNDER_THE_MASK = "NaN or inf under the mask: ours is bitwise what it is without; verl's loss turns NaN"
COUNT_PLUS_EPS = "float64 mask: verl adds 1e-8 to a row's token count; ours divides by the count"
NO_GLOBAL_COUNT = "dp_size > 1 without global counts: verl refuses; ours takes the denominator from the files"

METHODS_NOT_HERE = {"token-sum": "aggregation", "masked_var": "helper of verl", "masked_whiten": "helper of verl"}


def verl_agg_loss(case: Case) -> Outcome:  # noqa: PLR0911  one return a rule
    """Compare the aggregated loss and its gradient, or the two losses of a cut mini-batch."""
    mode = case.params["loss_agg_mode"]
    if mode not in AGGREGATIONS:
        with pytest.raises(ValueError, match="unknown aggregation"):
            check_aggregation(mode)
        if case.error is not None and case.error.startswith("ValueError: Invalid loss_agg_mode"):
            return MATCHED
        return absent(mode)
    losses, mask = case.tensor("loss_mat"), case.mask("loss_mask")
    if "micro_global_norm" in case.outputs:
        return _micro_batches(case, losses, mask)
    denominator, multiplier = verl_denominator(mask, mode, case.params)
    loss, gradient, scale = _aggregate(losses, mask, mode, denominator, multiplier)
    if case.error is not None:
        assert case.params.get("dp_size", 1) > 1, f"no rule for the error {case.error}"
        assert not gap(loss / multiplier, plain_loss(losses, mask, mode), rtol=case.rtol, scale=scale)
        return differs(NO_GLOBAL_COUNT)
    message = first_gap(
        gap(loss, case.output("loss"), rtol=case.rtol, scale=scale),
        gap(gradient, case.output("grad_loss_mat"), rtol=case.rtol),
    )
    if not message:
        padded = mode == "seq-mean-token-sum-norm" and not case.params.get("loss_scale_factor")
        return differs(PADDED_WIDTH) if padded else MATCHED
    if not mask.any():
        assert denominator == 0 and loss == 0 and not gradient.any()
        return differs(NO_TOKEN)
    if not torch.isfinite(losses[~mask]).all():
        neutral, neutral_gradient, _ = _aggregate(torch.where(mask, losses, 0.25), mask, mode, denominator, multiplier)
        assert (loss == neutral or np.isnan(loss)) and torch.equal(gradient, neutral_gradient)
        assert np.isnan(loss) == bool(losses[mask].isnan().any())
        return differs(UNDER_THE_MASK)
    if case.params["mask_dtype"] == "float64" and mode == "seq-mean-token-mean":
        counts = mask.sum(dim=-1, keepdim=True).clamp(min=1).double()
        factor = counts / (counts + 1e-8)
        assert not gap(gradient * factor, case.output("grad_loss_mat"), rtol=case.rtol)
        shrunk, _, _ = _aggregate(losses * factor, mask, mode, denominator, multiplier)
        assert not gap(shrunk, case.output("loss"), rtol=case.rtol, scale=scale)
        return differs(COUNT_PLUS_EPS)
    pytest.fail(f"no rule explains {case.name}: {message}")


def _aggregate(
    losses: Tensor, mask: Tensor, mode: str, denominator: float, multiplier: float
) -> tuple[float, Tensor, float]:
    leaf = losses.clone().requires_grad_()
    factor = multiplier / denominator if denominator else 0.0
    loss = loss_numerator(leaf, mask, aggregation=mode) * factor
    (gradient,) = torch.autograd.grad(loss, leaf)
    scale = loss_numerator(losses.abs().nan_to_num(), mask, aggregation=mode) * factor
    return loss.item(), gradient, scale.item()


def plain_loss(losses: Tensor, mask: Tensor, mode: str) -> float:
    """Return the aggregation by loops, with the padded width as the constant of seq-mean-token-sum-norm."""
    rows = [row[keep].double().tolist() for row, keep in zip(losses, mask, strict=True)]
    rows = [row for row in rows if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    per_row = [sum(row) / len(row) if mode == "seq-mean-token-mean" else sum(row) for row in rows]
    width = mask.shape[1] if mode == "seq-mean-token-sum-norm" else 1
    return sum(per_row) / len(rows) / width


def _micro_batches(case: Case, losses: Tensor, mask: Tensor) -> Outcome:
    """Compare a mini-batch cut in two: numerators over the whole mini-batch's denominator add up to the full loss."""
    mode, cut = case.params["loss_agg_mode"], case.params["rows_first_micro"]
    denominator = loss_denominator(mask.sum(dim=-1), aggregation=mode, norm_tokens=mask.shape[1])
    parts = [_aggregate(losses[rows], mask[rows], mode, denominator, 1.0) for rows in (slice(cut), slice(cut, None))]
    scale = sum(part[2] for part in parts)
    micro = [part[0] for part in parts]
    message = first_gap(
        gap(micro, case.output("micro_global_norm"), rtol=case.rtol, scale=scale),
        gap(sum(micro), case.output("micro_global_norm_sum"), rtol=case.rtol, scale=scale),
        gap(sum(micro), case.output("loss_full"), rtol=case.rtol, scale=scale),
    )
    assert not message, message
    return differs(PADDED_WIDTH) if mode == "seq-mean-token-sum-norm" else MATCHED


def verl_masked_mean(case: Case) -> Outcome:
    """Compare verl's masked mean: token-mean over all, and row by row."""
    values, mask = case.tensor("values"), case.mask("mask")
    num_tokens = loss_denominator(mask.sum(dim=-1), aggregation="token-mean")
    total = _aggregate(values, mask, "token-mean", num_tokens, 1.0)
    rows = [_aggregate(values[i, None], mask[i, None], "seq-mean-token-mean", 1.0, 1.0) for i in range(len(mask))]
    ours, scale = np.array([total[0], *(row[0] for row in rows)]), [total[2], *(row[2] for row in rows)]
    peer = np.append(case.output("all"), case.output("axis-1"))
    if not gap(ours, peer, rtol=case.rtol, scale=scale):
        return MATCHED
    assert case.params["mask_dtype"] == "float64", "no rule"
    counts = np.append(num_tokens, mask.sum(dim=-1).numpy())
    assert not gap(ours * counts / (counts + 1e-8), peer, rtol=case.rtol, scale=scale)
    return differs(COUNT_PLUS_EPS)


HANDLERS = {
    ("verl", "agg_loss"): verl_agg_loss,
    ("verl", "masked_mean"): verl_masked_mean,
    ("verl", "masked_var"): lambda _: absent("masked_var"),
    ("verl", "masked_whiten"): lambda _: absent("masked_whiten"),
}
