"""How per-token losses become one number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import MiniBatch, mini_batches, quick

from grpoctl.algorithms.aggregation import AGGREGATIONS, check_aggregation, loss_denominator, loss_numerator

LOSSES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 100.0, 100.0], [100.0, 100.0, 100.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])

BY_HAND = {
    "token-mean": (10.0, 4.0),
    "seq-mean-token-mean": (2.0 + 4.0, 2.0),
    "seq-mean-token-sum": (10.0, 2.0),
    "seq-mean-token-sum-norm": (10.0, 2.0 * 8),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_numerator_and_denominator_are_those_worked_out_by_hand(name: str) -> None:
    assert loss_numerator(LOSSES, MASK, aggregation=name).item() == BY_HAND[name][0]
    assert loss_denominator(MASK.sum(dim=-1), aggregation=name, norm_tokens=8) == BY_HAND[name][1]


@quick(60)
@given(mini_batches())
def test_every_aggregation_is_its_definition_in_loops(batch: MiniBatch) -> None:
    losses = batch.logprobs
    rows = [row[keep].tolist() for row, keep in zip(losses, batch.mask, strict=True) if keep.any()]
    expected = {
        "token-mean": sum(map(sum, rows)) / sum(map(len, rows)),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum": sum(map(sum, rows)) / len(rows),
        "seq-mean-token-sum-norm": sum(map(sum, rows)) / len(rows) / 8,
    }
    for name, value in expected.items():
        total = loss_denominator(batch.mask.sum(dim=-1), aggregation=name, norm_tokens=8)
        ours = loss_numerator(losses, batch.mask, aggregation=name).item() / total
        assert ours == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_gradient_is_each_tokens_weight_and_zero_under_the_mask(name: str) -> None:
    losses = LOSSES.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_numerator(losses, MASK, aggregation=name), losses)
    third = 1 / 3 if name == "seq-mean-token-mean" else 1.0
    expected = torch.tensor([[third] * 3, [1.0, 0, 0], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e300])
def test_what_stands_under_the_mask_changes_nothing(name: str, garbage: float) -> None:
    losses = torch.where(MASK, LOSSES, garbage).requires_grad_()
    value = loss_numerator(losses, MASK, aggregation=name)
    assert value.item() == BY_HAND[name][0]
    (gradient,) = torch.autograd.grad(value, losses)
    assert not gradient[~MASK].any() and torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_nan_at_a_selected_token_is_never_hidden(name: str) -> None:
    losses = LOSSES.clone()
    losses[0, 1] = math.nan
    assert math.isnan(loss_numerator(losses, MASK, aggregation=name))


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_mini_batch_without_a_token_has_numerator_and_denominator_zero(name: str) -> None:
    empty = torch.zeros_like(MASK)
    losses = torch.full_like(LOSSES, math.nan).requires_grad_()
    value = loss_numerator(losses, empty, aggregation=name)
    assert value.item() == 0.0
    assert not torch.autograd.grad(value, losses)[0].any()
    assert loss_denominator(empty.sum(dim=-1), aggregation=name, norm_tokens=8) == 0.0


@quick(60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 9))
def test_denominators_of_parts_add_up_to_the_mini_batchs(lengths: list[int], cut: int) -> None:
    for name in AGGREGATIONS:
        whole, left, right = (
            loss_denominator(torch.tensor(part, dtype=torch.int64), aggregation=name, norm_tokens=7)
            for part in (lengths, lengths[:cut], lengths[cut:])
        )
        assert whole == left + right


@pytest.mark.parametrize("norm_tokens", [None, 0, -3])
def test_the_constant_of_the_norm_is_required_and_positive(norm_tokens: int | None) -> None:
    with pytest.raises(ValueError, match="seq-mean-token-sum-norm needs norm_tokens > 0, got"):
        loss_denominator(torch.tensor([3]), aggregation="seq-mean-token-sum-norm", norm_tokens=norm_tokens)


def test_an_unknown_aggregation_is_refused_with_the_known_names() -> None:
    for call in (
        lambda: check_aggregation("token-sum"),
        lambda: loss_denominator(torch.tensor([1]), aggregation="token-sum"),
        lambda: loss_numerator(LOSSES, MASK, aggregation="token-sum"),
    ):
        with pytest.raises(ValueError, match="unknown aggregation 'token-sum'; known: token-mean, seq-mean-token-mean"):
            call()
