"""The per-token policy losses against formulas over plain floats, and what must hold for any input."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SETTINGS, MiniBatch, make_mini_batch, mini_batches, quick
from torch import Tensor

from grpoctl.algorithms.policy_loss import LOSSES, LossSettings, TokenLoss, policy_loss

TOKEN_LEVEL = ("ppo_clip", "cispo", "sapo", "gpg", "reinforce", "dppo_tv", "dppo_kl")


def run(batch: MiniBatch, name: str, settings: LossSettings | None = None, **options) -> tuple[TokenLoss, Tensor]:
    """Return the loss and the gradient of its sum."""
    logprobs = batch.logprobs.clone().requires_grad_()
    result = policy_loss(
        name,
        logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        settings=settings or SETTINGS[name],
        **options,
    )
    return result, torch.autograd.grad(result.loss.sum(), logprobs)[0]


def one(
    name: str, logprob: float, old: float, advantage: float, settings: LossSettings
) -> tuple[float, float, TokenLoss]:
    """Return loss and gradient of a single token, and its statistics."""
    values = [torch.tensor([[value]], dtype=torch.float64) for value in (logprob, old, advantage)]
    batch = MiniBatch(
        logprobs=values[0],
        old_logprobs=values[1],
        ref_logprobs=values[1],
        rollout_logprobs=values[1],
        advantages=values[2],
        mask=torch.tensor([[True]]),
    )
    result, gradient = run(batch, name, settings)
    return result.loss.item(), gradient.item(), result


def plain(  # noqa: PLR0911  one return a case of a formula
    name: str, logprob: float, old: float, advantage: float, s: LossSettings
) -> tuple[float, float]:
    """Return a token's loss and its derivative by its log-probability, written case by case."""
    ratio = math.exp(max(-20.0, min(20.0, logprob - old)))
    moves = 1.0 if abs(logprob - old) <= 20 else 0.0
    low, high = 1 - s.clip_low, 1 + s.clip_high
    if name == "ppo_clip":
        if advantage > 0 and ratio > high:
            return -advantage * high, 0.0
        if advantage < 0 and ratio < low:
            return -advantage * low, 0.0
        if advantage < 0 and s.dual_clip is not None and ratio > s.dual_clip:
            return -advantage * s.dual_clip, 0.0
        return -advantage * ratio, -advantage * ratio * moves
    if name == "cispo":
        weight = min(high, max(low, ratio))
        return -weight * advantage * logprob, -weight * advantage
    if name == "sapo":
        tau = s.tau_positive if advantage > 0 else s.tau_negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -advantage * gate * 4 / tau, -advantage * 4 * gate * (1 - gate) * ratio * moves
    if name in ("gpg", "reinforce"):
        return -advantage * logprob, -advantage
    new, before = math.exp(logprob), math.exp(old)
    if name == "dppo_tv":
        outside = new - before > s.clip_high if advantage > 0 else new - before < -s.clip_low
    else:
        kl = before * math.log(before / new) + (1 - before) * math.log((1 - before + 1e-8) / (1 - new + 1e-8))
        rising = new > before
        outside = (kl > s.clip_high and rising) if advantage > 0 else (kl > s.clip_low and new < before)
    if outside:
        return 0.0, 0.0
    weight = min(ratio, s.ratio_cap)
    return -advantage * weight * logprob, -advantage * weight


@pytest.mark.parametrize("name", TOKEN_LEVEL)
@quick(150)
@given(
    logprob=st.floats(-6, -0.001),
    old=st.one_of(st.floats(-6, -0.001), st.floats(-60, -6)),
    advantage=st.floats(-3, 3),
    dual_clip=st.sampled_from([None, 1.05, 3.0]),
)
def test_each_token_level_loss_is_its_formula(
    name: str, logprob: float, old: float, advantage: float, dual_clip: float | None
) -> None:
    settings = replace(SETTINGS[name], dual_clip=dual_clip, ratio_cap=2.5)
    loss, gradient, _ = one(name, logprob, old, advantage, settings)
    assert (loss, gradient) == pytest.approx(plain(name, logprob, old, advantage, settings), rel=1e-11, abs=1e-13)


@quick(60)
@given(mini_batches())
def test_gspo_is_ppo_with_the_geometric_mean_of_the_rows_ratios(batch: MiniBatch) -> None:
    settings = SETTINGS["gspo"]
    ours, gradient = run(batch, "gspo")
    for i, keep in enumerate(batch.mask):
        if not keep.any():
            continue
        logs = (batch.logprobs - batch.old_logprobs)[i][keep].tolist()
        ratio = math.exp(min(10.0, math.fsum(logs) / len(logs)))
        advantage = batch.advantages[i].item()
        bounded = min(1 + settings.clip_high, max(1 - settings.clip_low, ratio))
        expected = max(-advantage * ratio, -advantage * bounded)
        free = ratio == bounded or -advantage * ratio > -advantage * bounded
        assert ours.loss[i][keep].tolist() == pytest.approx([expected] * len(logs), rel=1e-12)
        assert gradient[i][keep].tolist() == pytest.approx([-advantage * ratio * free] * len(logs), rel=1e-12)
        assert ours.ratio[i][keep].tolist() == pytest.approx([ratio] * len(logs), rel=1e-12)


@quick(60)
@given(mini_batches())
def test_geo_mean_is_the_geometric_mean_of_pessimistically_clipped_ratios(batch: MiniBatch) -> None:
    settings = SETTINGS["geo_mean"]
    ours, gradient = run(batch, "geo_mean")
    for i, keep in enumerate(batch.mask):
        if not keep.any():
            continue
        advantage = batch.advantages[i].item()
        logs = (batch.logprobs - batch.old_logprobs)[i][keep].tolist()
        bounded = [min(log, settings.clip_high) if advantage > 0 else max(log, -settings.clip_low) for log in logs]
        expected = -advantage * math.exp(math.fsum(bounded) / len(logs))
        assert ours.loss[i][keep].tolist() == pytest.approx([expected] * len(logs), rel=1e-12)
        # the loss stands at each of the row's tokens, so their sum holds it len(logs) times
        free = [log == limit for log, limit in zip(logs, bounded, strict=True)]
        assert gradient[i][keep].tolist() == pytest.approx([expected * moves for moves in free], rel=1e-11)


@quick(60)
@given(mini_batches())
def test_at_ratio_one_the_gradient_is_the_policy_gradient(batch: MiniBatch) -> None:
    on_policy = replace(batch, old_logprobs=batch.logprobs)
    expected = torch.where(batch.mask, -batch.advantages, 0.0)
    for name in LOSSES:
        ours, gradient = run(on_policy, name)
        if name == "geo_mean":  # each token carries the whole row's loss: the mean over its tokens is the gradient
            lengths = batch.mask.sum(dim=-1, keepdim=True).clamp(min=1)
            torch.testing.assert_close(gradient / lengths, expected / lengths, rtol=1e-12, atol=0)
        else:
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
        assert (ours.ratio == 1).all() and not (ours.clipped_low | ours.clipped_high).any()


@quick(40)
@given(mini_batches(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_masked_tokens_have_loss_zero_ratio_one_and_no_gradient(batch: MiniBatch, garbage: float) -> None:
    for name in LOSSES:
        ours, gradient = run(batch.with_garbage(garbage), name)
        assert not ours.loss[~batch.mask].any() and not gradient[~batch.mask].any()
        assert (ours.ratio[~batch.mask] == 1).all()
        assert not (ours.clipped_low | ours.clipped_high)[~batch.mask].any()
        assert torch.isfinite(ours.loss).all() and torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "advantages"])
def test_nan_at_a_selected_token_is_never_hidden(name: str, field: str) -> None:
    batch = make_mini_batch(3, [3, 2], 3)
    value = getattr(batch, field).clone()
    value[0, 0] = math.nan
    ours, _ = run(replace(batch, **{field: value}), name)
    plays_no_part = field == "old_logprobs" and name in ("gpg", "reinforce")
    assert ours.loss[0].isnan().any() != plays_no_part
    assert torch.isfinite(ours.loss[1]).all()


@quick(80)
@given(mini_batches(), st.sampled_from([None, 1.2, 3.0]))
def test_clip_bounds_hold(batch: MiniBatch, dual_clip: float | None) -> None:
    settings = LossSettings(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    ours, gradient = run(batch, "ppo_clip", settings)
    advantages = batch.advantages.expand_as(batch.mask)
    gain = -ours.loss  # A · (what the ratio counts for)
    tolerance = 1e-12
    assert (gain <= torch.clamp(advantages, min=0) * 1.28 + torch.clamp(advantages, max=0) * 0.8 + tolerance)[
        batch.mask
    ].all()
    if dual_clip is not None:
        assert (gain >= torch.clamp(advantages, max=0) * dual_clip - tolerance)[batch.mask].all()
    clipped = ours.clipped_low | ours.clipped_high
    assert not gradient[clipped].any()
    assert (ours.ratio[ours.clipped_low] < 0.8).all() and (advantages[ours.clipped_low] < 0).all()
    assert (ours.ratio[ours.clipped_high] > 1.2).all()
    stopped = batch.mask & (gradient == 0) & (advantages != 0)
    assert torch.equal(stopped, clipped & (advantages != 0))


def test_clip_flags_of_geo_mean_name_the_bound_that_took_the_gradient() -> None:
    settings = LossSettings(clip_low=0.4, clip_high=0.4)
    for log_ratio, advantage, low, high in (
        (-1, 1, False, False),
        (1, 1, False, True),
        (-1, -1, True, False),
        (1, -1, False, False),
    ):
        _, gradient, result = one("geo_mean", -2.0 + log_ratio, -2.0, float(advantage), settings)
        assert (result.clipped_low.item(), result.clipped_high.item()) == (low, high)
        assert (gradient == 0) == (low or high)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_bounds_a_rising_token_by_clip_high_and_a_falling_one_by_clip_low(name: str) -> None:
    rising, falling = (math.log(0.6), math.log(0.3)), (math.log(0.3), math.log(0.6))
    tight, wide = 0.01, 0.9
    for (logprob, old), advantage, low, high, dropped in (
        (rising, 1.0, wide, tight, True),
        (rising, 1.0, tight, wide, False),
        (falling, -1.0, tight, wide, True),
        (falling, -1.0, wide, tight, False),
        (rising, -1.0, tight, tight, False),  # against the gradient's direction nothing is dropped
        (falling, 1.0, tight, tight, False),
    ):
        loss, gradient, result = one(name, logprob, old, advantage, LossSettings(clip_low=low, clip_high=high))
        assert (loss == 0, gradient == 0) == (dropped, dropped)
        assert (result.clipped_high | result.clipped_low).item() == dropped
        assert result.clipped_high.item() == (dropped and advantage > 0)


def test_a_log_ratio_beyond_twenty_is_clamped_and_without_gradient() -> None:
    loss, gradient, result = one("ppo_clip", -1.0, -60.0, -1.0, LossSettings())
    assert loss == pytest.approx(math.exp(20)) and gradient == 0
    assert result.ratio.item() == pytest.approx(math.exp(20))
    assert one("ppo_clip", -1.0, -60.0, -1.0, LossSettings(dual_clip=3.0))[0] == 3.0


def test_a_sequence_log_ratio_beyond_ten_is_clamped_and_without_gradient() -> None:
    loss, gradient, result = one("gspo", -1.0, -13.0, -1.0, LossSettings())
    assert loss == result.ratio.item() == pytest.approx(math.exp(10)) and gradient == 0
    loss, gradient, _ = one("gspo", -1.0, -10.0, -1.0, LossSettings())
    assert loss == gradient == pytest.approx(math.exp(9))


@quick(40)
@given(mini_batches(), st.integers(0, 2**31))
def test_weights_multiply_loss_and_gradient_and_are_not_read_under_the_mask(batch: MiniBatch, seed: int) -> None:
    weights = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    for name in LOSSES:
        bare, _ = run(batch, name)
        weighted, gradient = run(batch, name, weights=torch.where(batch.mask, weights, math.nan))
        torch.testing.assert_close(weighted.loss, bare.loss * torch.where(batch.mask, weights, 0.0), rtol=1e-14, atol=0)
        assert torch.isfinite(gradient).all()
        doubled, twice = run(batch, name, weights=2 * weights)
        torch.testing.assert_close(doubled.loss, 2 * weighted.loss, rtol=1e-14, atol=0)
        torch.testing.assert_close(twice, 2 * gradient, rtol=1e-14, atol=0)


def test_defaults_are_the_documented_ones() -> None:
    assert LossSettings() == LossSettings(
        clip_low=0.2, clip_high=0.2, dual_clip=None, tau_positive=1.0, tau_negative=1.05, ratio_cap=20.0
    )


def test_an_unknown_loss_is_refused_with_the_known_names() -> None:
    batch = make_mini_batch(0, [2], 2)
    with pytest.raises(ValueError, match="unknown loss 'vespo'; known: ppo_clip, gspo, cispo"):
        run(batch, "vespo", LossSettings())
