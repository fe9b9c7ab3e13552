"""One optimizer step: the same loss, order and statistics whatever engine runs the forward.

The denominator is taken from the files before the first forward. Each micro-batch adds its share of the numerator, so the
step doesn't depend on how the mini-batch is cut, nor on how many processes share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpoctl.algorithms.aggregation import loss_denominator, loss_numerator
from grpoctl.algorithms.correction import correction_weights
from grpoctl.algorithms.kl import token_kl
from grpoctl.algorithms.log_ratio import within_limit
from grpoctl.algorithms.policy_loss import LossSettings, TokenLoss, policy_loss
from grpoctl.engines.base import FloatVector, Trainer
from grpoctl.engines.forward import unit_logprobs
from grpoctl.engines.micro_batches import MicroBatch, deal_micro_batches
from grpoctl.processes.memory import memory_errors
from grpoctl.processes.ranks import ALONE, Ranks
from grpoctl.settings.fields import UpdateConfig
from grpoctl.stages.update.batches import TrainingRows

_from_numpy: Callable[[npt.NDArray[Any]], Tensor] = cast("Any", torch).from_numpy  # torch leaves its argument untyped


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What a step needs besides rows and trainer."""

    config: UpdateConfig
    temperature: float
    norm_tokens: int
    micro_batch_tokens: int
    keep_tokens: bool = False


@dataclass(slots=True, kw_only=True)
class StepSums:
    """Sums over a step's micro-batches, from which its statistics are made."""

    policy_numerator: float = 0.0
    kl_numerator: float = 0.0
    kl_sum: float = 0.0
    ratio_sum: float = 0.0
    ratio_max: float = -math.inf
    ratio_min: float = math.inf
    clipped_low: int = 0
    clipped_high: int = 0
    correction_sum: float = 0.0
    entropy_sum: float = 0.0
    num_tokens: int = 0
    num_micro_batches: int = 0
    nonfinite_rows: list[int] = field(default_factory=list[int])
    tokens: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])

    @staticmethod
    def total(parts: Sequence[StepSums]) -> StepSums:
        """Return the sums over all ranks, added in their order."""
        if len(parts) == 1:
            return parts[0]
        added = ("policy_numerator", "kl_numerator", "kl_sum", "ratio_sum", "clipped_low", "clipped_high",
                 "correction_sum", "entropy_sum", "num_tokens", "num_micro_batches")  # fmt: skip
        return StepSums(
            **{name: sum(getattr(part, name) for part in parts) for name in added},
            ratio_max=max(part.ratio_max for part in parts),
            ratio_min=min(part.ratio_min for part in parts),
            nonfinite_rows=[row for part in parts for row in part.nonfinite_rows],
            tokens={row: values for part in parts for row, values in part.tokens.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrices:
    """A micro-batch as matrices; `filled` marks real tokens, `completion_mask` those with loss, both (B, T)."""

    rows: list[int]
    filled: Tensor
    completion_mask: Tensor
    advantages: Tensor
    denominator: Tensor
    old: Tensor | None
    rollout: Tensor | None
    reference: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One mini-batch on its way through the engine.

    Args:
        trainer: the engine
        data: all rows
        rows: the mini-batch, the same on every rank
        settings: loss and budget
        ranks: the processes that share it
    """

    trainer: Trainer
    data: TrainingRows
    rows: Sequence[int]
    settings: StepSettings
    ranks: Ranks = ALONE

    def run(self) -> tuple[StepSums, float]:
        """Collect the gradient of the mini-batch; the caller decides whether to step.

        Returns:
            The sums over all ranks, and the denominator (0.0 where no token carries loss: nothing was run).
        """
        settings, rows = self.settings, self.data.rows
        lengths = torch.tensor([int(rows.completion_masks[row].sum()) for row in self.rows])
        denominator = loss_denominator(
            lengths, aggregation=settings.config.aggregation, norm_tokens=settings.norm_tokens
        )
        sums = StepSums()
        if denominator == 0:
            return sums, denominator
        micro_batches = deal_micro_batches(
            [rows.prompt_ids[row] for row in self.rows],
            [rows.completion_ids[row] for row in self.rows],
            policy=self.trainer.policy,
            budget=settings.micro_batch_tokens,
            ranks=self.ranks,
        )
        for micro_batch in micro_batches:
            with memory_errors("training", "lower runtime.micro_batch_tokens"):
                if micro_batch.counts:
                    self._micro_batch(micro_batch, denominator, sums)
                else:
                    self._padding(micro_batch)
        return StepSums.total(self.ranks.all_gather(sums)), denominator

    def _padding(self, micro_batch: MicroBatch) -> None:
        """Run a forward and a backward whose gradient is 0, because other ranks run one more."""
        flat, _ = unit_logprobs(self.trainer.policy, micro_batch.units, temperature=self.settings.temperature)
        nothing = torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
        self.trainer.backward(torch.where(nothing, flat, 0.0).sum(), last=micro_batch.last)

    def _micro_batch(self, micro_batch: MicroBatch, denominator: float, sums: StepSums) -> None:
        config = self.settings.config
        members = [self.rows[place] for unit in micro_batch.units for place in unit.rows]
        flat, entropy = unit_logprobs(
            self.trainer.policy,
            micro_batch.units,
            temperature=self.settings.temperature,
            with_entropy=config.entropy,
        )
        batch = _matrices(self.data, members, flat.device)
        logprobs = _spread(flat, batch.filled)
        weights = _weights(batch, config)
        result = policy_loss(
            config.loss,
            logprobs,
            old_logprobs=batch.denominator,
            advantages=batch.advantages,
            mask=batch.completion_mask,
            settings=_loss_settings(config),
            weights=weights,
        )
        numerator = loss_numerator(result.loss, batch.completion_mask, aggregation=config.aggregation)
        kl = _kl(logprobs, batch, config)
        total = numerator
        if kl is not None and config.kl_coef > 0:
            kl_numerator = loss_numerator(kl, batch.completion_mask, aggregation=config.aggregation)
            total = numerator + config.kl_coef * kl_numerator
            sums.kl_numerator += float(kl_numerator.detach())
        self.trainer.backward(total / denominator, last=micro_batch.last)
        sums.num_micro_batches += 1
        sums.policy_numerator += float(numerator.detach())
        with torch.no_grad():
            _collect(sums, batch, result, _Extras(kl, weights, entropy))
            terms = result.loss if kl is None else result.loss + config.kl_coef * kl
            bad = ~torch.isfinite(torch.where(batch.completion_mask, terms, 0.0)).all(dim=-1)
            places: list[int] = cast("Any", bad.nonzero()[:, 0]).tolist()
            sums.nonfinite_rows += [members[i] for i in places]
            if self.settings.keep_tokens:
                _keep(sums, batch, logprobs, result, kl)


@dataclass(frozen=True, slots=True)
class _Extras:
    """Matrices that a step may lack: KL, off-policy weights, (N,) entropies."""

    kl: Tensor | None
    weights: Tensor | None
    entropy: Tensor | None


def _kl(logprobs: Tensor, batch: _Matrices, config: UpdateConfig) -> Tensor | None:
    if batch.reference is None:
        return None
    kl = token_kl(logprobs, batch.reference, estimator=config.kl_estimator, mask=batch.completion_mask)
    if not config.kl_times_ratio:
        return kl
    log_ratio = torch.where(batch.completion_mask, logprobs - batch.denominator, 0.0)
    return kl * torch.exp(within_limit(log_ratio))


def _loss_settings(config: UpdateConfig) -> LossSettings:
    names = ("clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative", "ratio_cap")
    return LossSettings(**{name: getattr(config, name) for name in names})


def _weights(batch: _Matrices, config: UpdateConfig) -> Tensor | None:
    if config.correction == "none":
        return None
    assert batch.old is not None and batch.rollout is not None
    return correction_weights(
        batch.old,
        batch.rollout,
        batch.completion_mask,
        correction=config.correction,
        level=config.correction_level,
        cap=config.correction_cap,
        floor=config.correction_floor,
    )


def _matrices(data: TrainingRows, members: list[int], device: torch.device) -> _Matrices:
    lengths = [len(data.rows.completion_ids[row]) for row in members]
    width = max(lengths)
    filled = np.arange(width)[None, :] < np.array(lengths)[:, None]
    mask = np.zeros_like(filled)
    for place, row in enumerate(members):
        mask[place, : lengths[place]] = data.rows.completion_masks[row]

    def matrix(column: Sequence[FloatVector | None]) -> Tensor | None:
        if any(column[row] is None for row in members):
            return None
        values = np.zeros(filled.shape, dtype=np.float32)
        values[filled] = np.concatenate(cast("list[FloatVector]", [column[row] for row in members]))
        return _from_numpy(values).to(device)

    advantages, denominator = matrix(data.advantages), matrix(data.denominator_logprobs)
    assert advantages is not None and denominator is not None
    return _Matrices(
        rows=members,
        filled=_from_numpy(filled).to(device),
        completion_mask=_from_numpy(mask).to(device),
        advantages=advantages,
        denominator=denominator,
        old=matrix(data.old_logprobs),
        rollout=matrix(data.rows.rollout_logprobs),
        reference=matrix(data.ref_logprobs),
    )


def _spread(flat: Tensor, filled: Tensor) -> Tensor:
    """Return (N,) values as a (B, T) matrix, 0 where there is no token."""
    return torch.zeros(filled.shape, dtype=flat.dtype, device=flat.device).masked_scatter(filled, flat)


def _collect(sums: StepSums, batch: _Matrices, result: TokenLoss, extras: _Extras) -> None:
    mask = batch.completion_mask
    ratio = result.ratio.expand_as(mask)[mask].double()
    if not ratio.numel():
        return
    sums.num_tokens += ratio.numel()
    sums.ratio_sum += float(ratio.sum())
    sums.ratio_max = max(sums.ratio_max, float(ratio.max()))
    sums.ratio_min = min(sums.ratio_min, float(ratio.min()))
    sums.clipped_low += int(result.clipped_low.sum())
    sums.clipped_high += int(result.clipped_high.sum())
    if extras.kl is not None:
        sums.kl_sum += float(extras.kl.detach()[mask].double().sum())
    if extras.weights is not None:
        sums.correction_sum += float(extras.weights[mask].double().sum())
    if extras.entropy is not None:
        sums.entropy_sum += float(extras.entropy[mask[batch.filled]].double().sum())


def _keep(sums: StepSums, batch: _Matrices, logprobs: Tensor, result: TokenLoss, kl: Tensor | None) -> None:
    parts = {
        "logprobs": logprobs.detach(),
        "ratio": result.ratio.expand_as(logprobs),
        "clipped": (result.clipped_low | result.clipped_high).expand_as(logprobs),
        "token_loss": result.loss.detach(),
    }
    if kl is not None:
        parts["kl"] = kl.detach()
    arrays = {name: part.cpu().numpy() for name, part in parts.items()}
    lengths: list[int] = cast("Any", batch.filled.sum(dim=-1)).tolist()
    for place, row in enumerate(batch.rows):
        sums.tokens[row] = {name: array[place, : lengths[place]] for name, array in arrays.items()}


def learning_rate(config: UpdateConfig, global_step: int) -> float:
    """Return the rate of a 0-based global step: linear warmup, then constant, linear or cosine down to the end.

    Args:
        config: lr, schedule, warmup_steps, total_steps, lr_end_fraction
        global_step: steps taken before this one in the whole run
    """
    if global_step < config.warmup_steps:
        return config.lr * (global_step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    assert config.total_steps is not None
    span = max(1, config.total_steps - config.warmup_steps)
    progress = min(1.0, (global_step - config.warmup_steps) / span)
    shape = 1 - progress if config.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.lr_end_fraction + (1 - config.lr_end_fraction) * shape)
