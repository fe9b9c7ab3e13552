"""Fitting a reward model to pairs of answers: Bradley–Terry loss, AdamW, the whole model or its head alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpoctl.algorithms.preference import bradley_terry_loss
from grpoctl.engines.base import OptimizerSettings, TokenIds, padded_width
from grpoctl.engines.torch.adamw import clipped_step, torch_adamw
from grpoctl.engines.value_head.model import RewardModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PairIds:
    """The ids of two whole texts, the better one first."""

    chosen: TokenIds
    rejected: TokenIds

    @property
    def num_tokens(self) -> int:
        """Size of both as padded rows, tokens."""
        return padded_width(len(self.chosen)) + padded_width(len(self.rejected))


class PreferenceTrainer:
    """A reward model being fitted; a frozen backbone runs once for each text."""

    def __init__(self, model: RewardModel, settings: OptimizerSettings, *, head_only: bool, budget: int) -> None:
        self.model = model
        self.head_only = head_only
        self.budget = budget
        self._grad_clip = settings.grad_clip
        self._kept: dict[bytes, Tensor] = {}
        model.head = model.head.clone().requires_grad_()
        model.backbone.requires_grad_(not head_only)
        parameters = [model.head] if head_only else [model.head, *model.backbone.parameters()]
        self._parameters = parameters
        self._optimizer = torch_adamw(parameters, settings)

    def step(self, pairs: Sequence[PairIds], lr: float) -> tuple[float, float]:
        """Take one step on the mean loss of the pairs; return that loss and the gradient's norm before clipping.

        Where either isn't finite nothing is changed.
        """
        total = 0.0
        for part in self._parts(pairs):
            chosen, rejected = self._rewards(part)
            loss = bradley_terry_loss(chosen, rejected).sum() / len(pairs)
            loss.backward()  # pyright: ignore[reportUnknownMemberType]  torch leaves its arguments untyped
            total += float(loss.detach())
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        clipped_step(self._optimizer, self._parameters, norm, lr=lr, grad_clip=self._grad_clip)
        return total, float(norm)

    @torch.no_grad()
    def accuracy(self, pairs: Sequence[PairIds]) -> float:
        """Return the share of pairs whose chosen text has the higher reward; a tie isn't one."""
        right = 0
        for part in self._parts(pairs):
            chosen, rejected = self._rewards(part)
            right += int((chosen > rejected).sum())
        return right / len(pairs)

    def _parts(self, pairs: Sequence[PairIds]) -> Iterator[list[PairIds]]:
        """Yield the pairs in parts whose texts, padded, stay within the budget; a pair is never split."""
        part: list[PairIds] = []
        size = 0
        for pair in sorted(pairs, key=lambda pair: -pair.num_tokens):
            if part and size + pair.num_tokens > self.budget:
                yield part
                part, size = [], 0
            part.append(pair)
            size += pair.num_tokens
        if part:
            yield part

    def _rewards(self, pairs: Sequence[PairIds]) -> tuple[Tensor, Tensor]:
        rows = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        features = self._frozen(rows) if self.head_only else self.model.features(rows, budget=self.budget)
        rewards = self.model.rewards(features)
        return rewards[: len(pairs)], rewards[len(pairs) :]

    def _frozen(self, rows: Sequence[TokenIds]) -> Tensor:
        """Return features that no step can change, each text's computed once."""
        new = {key: row for row in rows if (key := row.tobytes()) not in self._kept}
        if new:
            with torch.no_grad():
                values = self.model.features(list(new.values()), budget=self.budget)
            self._kept.update(zip(new, values, strict=True))
        return torch.stack([self._kept[row.tobytes()] for row in rows])
