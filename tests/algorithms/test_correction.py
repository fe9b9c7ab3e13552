"""Importance weights between sampler and trainer, and rejection."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import MiniBatch, make_mini_batch, mini_batches, quick

from grpoctl.algorithms.correction import CORRECTIONS, LEVELS, correction_weights

OLD = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -9.0]], dtype=torch.float64)
ROLLOUT = OLD - torch.tensor(
    [[math.log(3), math.log(0.5), 0.0], [math.log(0.2), math.log(2), 5.0]], dtype=torch.float64
)
MASK = torch.tensor([[True, True, True], [True, True, False]])


def weights(correction: str, level: str, *, cap: float = 2.0, floor: float | None = None) -> list[list[float]]:
    return correction_weights(OLD, ROLLOUT, MASK, correction=correction, level=level, cap=cap, floor=floor).tolist()


def test_token_weights_are_those_worked_out_by_hand() -> None:
    assert weights("none", "token") == [[1, 1, 1], [1, 1, 0]]
    assert weights("tis", "token") == [pytest.approx([2, 0.5, 1]), pytest.approx([0.2, 2, 0])]
    assert weights("tis", "token", floor=0.4) == [pytest.approx([2, 0.5, 1]), pytest.approx([0.4, 2, 0])]
    assert weights("mis", "token", cap=2.5) == [pytest.approx([0, 0.5, 1]), pytest.approx([0.2, 2, 0])]
    assert weights("mis", "token", cap=2.5, floor=0.4) == [pytest.approx([0, 0.5, 1]), pytest.approx([0, 2, 0])]
    assert weights("icepop", "token", cap=2.5, floor=0.4) == weights("mis", "token", cap=2.5, floor=0.4)


def test_sequence_weights_are_the_product_of_the_rows_ratios() -> None:
    assert weights("tis", "sequence", cap=9.0) == [pytest.approx([1.5] * 3), pytest.approx([0.4, 0.4, 0])]
    assert weights("tis", "sequence", cap=1.2) == [pytest.approx([1.2] * 3), pytest.approx([0.4, 0.4, 0])]
    assert weights("mis", "sequence", cap=1.2) == [[0, 0, 0], pytest.approx([0.4, 0.4, 0])]
    assert weights("icepop", "sequence", cap=2.0, floor=0.5) == [pytest.approx([1.5] * 3), [0, 0, 0]]


@quick(60)
@given(mini_batches(), st.floats(1.0, 3.0), st.floats(0.2, 0.9))
def test_weights_stay_within_their_bounds_and_are_constants(batch: MiniBatch, cap: float, floor: float) -> None:
    old = batch.old_logprobs.clone().requires_grad_()
    for correction in CORRECTIONS:
        for level in LEVELS:
            ours = correction_weights(
                old, batch.rollout_logprobs, batch.mask, correction=correction, level=level, cap=cap, floor=floor
            )
            assert not ours.requires_grad
            assert not ours[~batch.mask].any()
            valid = ours[batch.mask]
            inside = (valid >= floor) & (valid <= cap) if correction != "none" else valid == 1
            assert bool((inside | ((valid == 0) & (correction in ("mis", "icepop")))).all())


@quick(60)
@given(mini_batches())
def test_without_a_mismatch_every_weight_is_one_and_nothing_is_rejected(batch: MiniBatch) -> None:
    for correction in CORRECTIONS:
        for level in LEVELS:
            ours = correction_weights(
                batch.old_logprobs,
                batch.old_logprobs,
                batch.mask,
                correction=correction,
                level=level,
                cap=2.0,
                floor=0.5,
            )
            assert torch.equal(ours, batch.mask.double())


def test_a_log_ratio_beyond_twenty_is_clamped() -> None:
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    for level in LEVELS:
        ours = correction_weights(old, old - 99, old < 0, correction="tis", level=level, cap=math.inf)
        assert ours.item() == pytest.approx(math.exp(20))


@quick(60)
@given(mini_batches(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_stands_under_the_mask_changes_nothing(batch: MiniBatch, garbage: float) -> None:
    dirty = batch.with_garbage(garbage)
    for level in LEVELS:
        for correction in CORRECTIONS:
            clean, ours = (
                correction_weights(
                    b.old_logprobs, b.rollout_logprobs, b.mask, correction=correction, level=level, cap=1.5, floor=0.5
                )
                for b in (batch, dirty)
            )
            assert torch.equal(clean, ours)


def test_nan_at_a_selected_token_stays_visible_or_is_dropped() -> None:
    batch = make_mini_batch(1, [3], 3)
    rollout = batch.rollout_logprobs.clone()
    rollout[0, 1] = math.nan
    args = (batch.old_logprobs, rollout, batch.mask)
    assert correction_weights(*args, correction="tis", level="token", cap=2.0).isnan().tolist() == [
        [False, True, False]
    ]
    assert correction_weights(*args, correction="mis", level="token", cap=1e9)[0, 1] == 0


def test_unknown_names_and_a_missing_floor_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown correction 'vtrace' at level 'token'"):
        weights("vtrace", "token")
    with pytest.raises(ValueError, match="unknown correction 'tis' at level 'row'"):
        weights("tis", "row")
    with pytest.raises(ValueError, match="icepop needs a floor"):
        weights("icepop", "token")
