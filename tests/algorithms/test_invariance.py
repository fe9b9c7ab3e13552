"""How a mini-batch is cut, padded, ordered or spread over ranks changes neither loss nor gradient."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
import two_ranks
from hypothesis import given
from hypothesis import strategies as st
from strategies import SETTINGS, MiniBatch, denominator, loss_and_gradient, mini_batches, quick
from torch import Tensor

from grpoctl.algorithms.aggregation import AGGREGATIONS
from grpoctl.algorithms.correction import correction_weights

LOSSES = list(SETTINGS)
every_loss = pytest.mark.parametrize("loss", LOSSES)
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)

WEIGHTS = [
    None,
    *(
        {"correction": correction, "level": level, "cap": 1.3, "floor": 0.6}
        for correction in ("tis", "mis", "icepop")
        for level in ("token", "sequence")
    ),
]
any_weights = st.sampled_from(WEIGHTS)


def weights_of(batch: MiniBatch, options: dict | None) -> Tensor | None:
    if options is None:
        return None
    return correction_weights(batch.old_logprobs, batch.rollout_logprobs, batch.mask, **options)


def assert_same(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> None:
    for ours, expected in zip(left, right, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-13)


@every_loss
@every_aggregation
@quick(12)
@given(batch=mini_batches(), data=st.data(), options=any_weights)
def test_cutting_into_micro_batches_changes_nothing(
    loss: str, aggregation: str, batch: MiniBatch, data: st.DataObject, options: dict | None
) -> None:
    num_rows = batch.mask.shape[0]
    cuts = sorted(data.draw(st.sets(st.integers(1, num_rows), max_size=num_rows)) | {0, num_rows})
    total = denominator(batch, aggregation)
    value, gradients = torch.zeros((), dtype=torch.float64), []
    for start, stop in pairwise(cuts):
        part = batch.rows(slice(start, stop))
        width = max(1, int(part.mask.any(dim=0).nonzero().max()) + 1 if part.mask.any() else 1)
        narrow = MiniBatch(
            **{name: getattr(part, name)[:, :width] for name in MiniBatch.__slots__ if name != "advantages"},
            advantages=part.advantages,
        )  # a micro-batch is padded to its own longest row only
        part_value, gradient = loss_and_gradient(
            narrow, loss, aggregation, weights_of(narrow, options), divide_by=total
        )
        value = value + part_value
        gradients.append(torch.nn.functional.pad(gradient, (0, batch.mask.shape[1] - width)))
    assert_same((value, torch.cat(gradients)), loss_and_gradient(batch, loss, aggregation, weights_of(batch, options)))


@every_loss
@every_aggregation
@quick(12)
@given(
    batch=mini_batches(),
    width=st.integers(1, 20),
    garbage=st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
    options=any_weights,
)
def test_padding_changes_nothing(  # noqa: PLR0917  hypothesis passes them by name
    loss: str, aggregation: str, batch: MiniBatch, width: int, garbage: float, options: dict | None
) -> None:
    wide = batch.padded(width, garbage)
    value, gradient = loss_and_gradient(wide, loss, aggregation, weights_of(wide, options))
    assert not gradient[:, -width:].any()
    expected = loss_and_gradient(batch, loss, aggregation, weights_of(batch, options))
    assert_same((value, gradient[:, :-width]), expected)


@every_loss
@every_aggregation
@quick(12)
@given(batch=mini_batches(), seed=st.integers(0, 2**31), options=any_weights)
def test_the_order_of_rows_changes_nothing(
    loss: str, aggregation: str, batch: MiniBatch, seed: int, options: dict | None
) -> None:
    order = torch.randperm(batch.mask.shape[0], generator=torch.Generator().manual_seed(seed))
    shuffled = batch.rows(order)
    value, gradient = loss_and_gradient(batch, loss, aggregation, weights_of(batch, options))
    assert_same(loss_and_gradient(shuffled, loss, aggregation, weights_of(shuffled, options)), (value, gradient[order]))


@every_loss
@every_aggregation
@quick(12)
@given(batch=mini_batches(), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]), options=any_weights)
def test_what_stands_under_the_mask_changes_no_bit(
    loss: str, aggregation: str, batch: MiniBatch, garbage: float, options: dict | None
) -> None:
    dirty = batch.with_garbage(garbage)
    clean = loss_and_gradient(batch, loss, aggregation, weights_of(batch, options))
    ours = loss_and_gradient(dirty, loss, aggregation, weights_of(dirty, options))
    for left, right in zip(ours, clean, strict=True):
        assert torch.isfinite(left).all() and torch.equal(left, right)


@every_loss
@every_aggregation
def test_rows_without_a_token_change_nothing(loss: str, aggregation: str) -> None:
    batch = two_ranks.make_mini_batch(3, [3, 0, 4, 0], 4)
    full = batch.rows(batch.mask.any(dim=-1))
    value, gradient = loss_and_gradient(batch, loss, aggregation)
    assert_same((value, gradient[batch.mask.any(dim=-1)]), loss_and_gradient(full, loss, aggregation))


def test_two_gloo_ranks_take_the_same_step_as_one(tmp_path: Path) -> None:
    mp.spawn(two_ranks.run_rank, args=(2, str(tmp_path)), nprocs=2, join=True)
    two = torch.load(tmp_path / "results.pt", weights_only=True)
    one = two_ranks.step(0, 1)
    assert set(one) == set(two) == {(loss, aggregation) for loss in LOSSES for aggregation in AGGREGATIONS}
    for key, expected in one.items():
        assert expected[1:].any(), f"{key} has no gradient: the test would prove nothing"
        torch.testing.assert_close(two[key], expected, rtol=1e-10, atol=1e-13)
