"""Random mini-batches for the property tests of the formulas: shapes and lengths by hypothesis, values by seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from grpoctl.algorithms.aggregation import loss_denominator, loss_numerator
from grpoctl.algorithms.kl import token_kl
from grpoctl.algorithms.policy_loss import LossSettings, policy_loss

NORM_TOKENS = 11
KL_COEF = 0.04

SETTINGS = {
    "ppo_clip": LossSettings(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "gspo": LossSettings(clip_low=0.1, clip_high=0.15),
    "cispo": LossSettings(clip_low=0.2, clip_high=0.28),
    "sapo": LossSettings(),
    "gpg": LossSettings(),
    "geo_mean": LossSettings(clip_low=0.3, clip_high=0.5),
    "dppo_tv": LossSettings(clip_low=0.1, clip_high=0.2),
    "dppo_kl": LossSettings(clip_low=0.03, clip_high=0.06),
    "reinforce": LossSettings(),
}


def quick(max_examples: int) -> settings:
    """Return settings under which the same examples are drawn on every machine, however slow."""
    return settings(max_examples=max_examples, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The (B, T) inputs of a loss; `advantages` is (B, 1)."""

    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor

    def rows(self, index: Tensor | slice) -> MiniBatch:
        return MiniBatch(**{name: getattr(self, name)[index] for name in self.__slots__})

    def padded(self, width: int, value: float) -> MiniBatch:
        """Return the batch with columns added on the right that hold `value` and aren't selected."""
        extra = (self.mask.shape[0], width)
        wide = {
            name: torch.cat([getattr(self, name), torch.full(extra, value, dtype=self.logprobs.dtype)], dim=1)
            for name in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs")
        }
        return replace(self, **wide, mask=torch.cat([self.mask, torch.zeros(extra, dtype=torch.bool)], dim=1))

    def with_garbage(self, value: float) -> MiniBatch:
        """Return the batch with `value` wherever the mask is false."""
        names = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs")
        return replace(
            self,
            **{name: torch.where(self.mask, getattr(self, name), value) for name in names},
            advantages=torch.where(self.mask, self.advantages, value),
        )


@st.composite
def mini_batches(draw: st.DrawFn, *, max_rows: int = 6, max_tokens: int = 7) -> MiniBatch:
    """Draw a mini-batch with at least one token; rows may be empty, and the mask may have holes."""
    num_rows = draw(st.integers(1, max_rows))
    width = draw(st.integers(1, max_tokens))
    lengths = draw(st.lists(st.integers(0, width), min_size=num_rows, max_size=num_rows))
    holes = draw(st.booleans())
    spread = draw(st.sampled_from([0.01, 0.3, 1.5]))
    return make_mini_batch(draw(st.integers(0, 2**31)), lengths, width, spread=spread, holes=holes)


def make_mini_batch(
    seed: int,
    lengths: list[int],
    width: int,
    *,
    spread: float = 0.3,
    holes: bool = False,
    dtype: torch.dtype = torch.float64,
) -> MiniBatch:
    """Return a mini-batch of these lengths; the first row gets a token where all are empty."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), width)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    if holes:
        mask = mask & (torch.rand(shape, generator=generator) < 0.8)
    if not mask.any():
        mask[0, 0] = True
    old = -normal(*shape).abs() - 0.05
    return MiniBatch(
        logprobs=(old + spread * normal(*shape)).clamp(max=-1e-4),
        old_logprobs=old,
        ref_logprobs=old + spread * normal(*shape),
        rollout_logprobs=old + 0.5 * spread * normal(*shape),
        advantages=normal(len(lengths), 1),
        mask=mask,
    )


def denominator(batch: MiniBatch, aggregation: str) -> float:
    """Return the mini-batch's denominator, as it is computed before the first forward."""
    return loss_denominator(batch.mask.sum(dim=-1), aggregation=aggregation, norm_tokens=NORM_TOKENS)


def numerator(batch: MiniBatch, logprobs: Tensor, loss: str, aggregation: str, weights: Tensor | None = None) -> Tensor:
    """Return the summed policy loss and KL of some rows."""
    result = policy_loss(
        loss,
        logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        settings=SETTINGS[loss],
        weights=weights,
    )
    kl = token_kl(logprobs, batch.ref_logprobs, estimator="k3", mask=batch.mask)
    return loss_numerator(result.loss, batch.mask, aggregation=aggregation) + KL_COEF * loss_numerator(
        kl, batch.mask, aggregation=aggregation
    )


def loss_and_gradient(
    batch: MiniBatch, loss: str, aggregation: str, weights: Tensor | None = None, *, divide_by: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return loss and gradient with respect to the log-probabilities, over the given or the batch's own denominator."""
    logprobs = batch.logprobs.clone().requires_grad_()
    total = denominator(batch, aggregation) if divide_by is None else divide_by
    value = numerator(batch, logprobs, loss, aggregation, weights) / total
    (gradient,) = torch.autograd.grad(value, logprobs)
    return value.detach(), gradient
