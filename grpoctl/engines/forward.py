"""The one forward that `logprob` and `update` share: a prompt runs once for all its completions in a row.

A row is `[prompt | c1 | … | cG]`. Each completion restarts its positions after the prompt and sees the prompt and itself
only, so its log-probabilities are those of a row of its own. The first token is predicted by the prompt's last position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpoctl.algorithms.token_logprobs import token_logprobs
from grpoctl.engines.base import PolicyModel, TokenIds, Unit, padded_width

_from_numpy: Callable[[npt.NDArray[Any]], Tensor] = cast("Any", torch).from_numpy  # torch leaves its argument untyped
LEAST_POSITIONS = 8
"""Positions handed to the head at least: fewer than four rows meet another matrix kernel, whose last bit differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Units as the tensors of one forward.

    Args:
        input_ids: (B, T) int64, right padded
        position_ids: (B, T) int64
        mask: (B, 1, T, T) bool, or None where every row is one completion and plain causal attention does
        sources: (N,) positions in the flattened (B · T) that predict the targets
        targets: (N,) completion ids, unit by unit, completion by completion
    """

    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor | None
    sources: Tensor
    targets: Tensor


def make_units(
    prompts: Sequence[TokenIds], completions: Sequence[TokenIds], *, policy: PolicyModel, budget: int
) -> list[Unit]:
    """Group consecutive rows of one prompt into units that fit the budget.

    Args:
        prompts: (B) prompt ids by row; equal neighbours are one group
        completions: (B) completion ids by row
        policy: tells whether and up to which length prompts may be shared
        budget: tokens of a forward; a unit stays within it where a single completion does
    """
    limit = budget if policy.max_shared_tokens is None else min(budget, policy.max_shared_tokens)
    units: list[Unit] = []
    rows: list[int] = []
    length = 0

    def flush() -> None:
        if rows:
            parts = tuple(completions[row] for row in rows)
            units.append(Unit(prompt_ids=prompts[rows[0]], completions=parts, rows=tuple(rows)))
            rows.clear()

    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        same = bool(rows) and policy.shares_prompts and np.array_equal(prompts[rows[0]], prompt)
        if not same or length + len(completion) > limit:
            flush()
            length = len(prompt)
        rows.append(row)
        length += len(completion)
    flush()
    return units


def pack(units: Sequence[Unit], device: torch.device) -> Packed:
    """Build the tensors of one forward over the units."""
    width = padded_width(max(unit.num_tokens for unit in units))
    input_ids = np.zeros((len(units), width), dtype=np.int64)
    positions = np.zeros((len(units), width), dtype=np.int64)
    segments = np.full((len(units), width), -1, dtype=np.int32)
    sources: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    for row, unit in enumerate(units):
        start = num_prompt = len(unit.prompt_ids)
        input_ids[row, :start] = unit.prompt_ids
        positions[row, :start] = np.arange(start)
        segments[row, :start] = 0
        for number, ids in enumerate(unit.completions, start=1):
            stop = start + len(ids)
            input_ids[row, start:stop] = ids
            positions[row, start:stop] = num_prompt + np.arange(len(ids))
            segments[row, start:stop] = number
            if len(ids):
                predicting = np.concatenate(([num_prompt - 1], np.arange(start, stop - 1)))
                sources.append(row * width + predicting)
                targets.append(np.asarray(ids, dtype=np.int64))
            start = stop
    return Packed(
        input_ids=_from_numpy(input_ids).to(device),
        position_ids=_from_numpy(positions).to(device),
        mask=None if all(len(unit.completions) == 1 for unit in units) else _mask(segments, device),
        sources=_from_numpy(_concatenate(sources)).to(device),
        targets=_from_numpy(_concatenate(targets)).to(device),
    )


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _mask(segments: np.ndarray, device: torch.device) -> Tensor:
    """Return who sees whom: earlier positions of the prompt and of the own segment; padding sees itself."""
    segment = _from_numpy(segments).to(device)
    query, key = segment[:, :, None], segment[:, None, :]
    width = segment.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    mask = causal & (((key == 0) & (query >= 0)) | (key == query))
    return mask[:, None]


def unit_logprobs(
    policy: PolicyModel, units: Sequence[Unit], *, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return (N,) log-probabilities of all completion tokens of the units, flattened in order, and their entropies."""
    packed = pack(units, policy.device)
    if not packed.targets.numel():
        empty = torch.zeros(0, device=policy.device)
        return empty, empty if with_entropy else None
    run = policy.forward
    count = packed.targets.shape[0]
    logprobs, entropy = run(packed, temperature, with_entropy)
    return logprobs[:count], None if entropy is None else entropy[:count]


def model_logprobs(policy: PolicyModel, units: Sequence[Unit]) -> Tensor:
    """Return (N,) log-probabilities as the model's own logits give them, to hold `unit_logprobs` to."""
    run: Any = policy.forward
    return run(pack(units, policy.device), 1.0, False, by_model=True)[0]


class PackedForward(torch.nn.Module):
    """All that reads weights in one forward: engines that shard them gather what lies inside around the call."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.module = policy.module
        self._policy = policy

    def forward(
        self, packed: Packed, temperature: float, with_entropy: bool, *, by_model: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and entropies, at least LEAST_POSITIONS of them; the spare ones repeat the first.

        `by_model` leaves the output embedding to the model: its log-probabilities at temperature 1, without spare ones.
        """
        policy = self._policy
        if by_model:
            return self._by_model(packed), None
        hidden = policy.hidden(packed.input_ids, packed.position_ids, packed.mask)
        spare = max(0, LEAST_POSITIONS - packed.targets.shape[0])
        sources = torch.cat([packed.sources, packed.sources[:1].expand(spare)])
        targets = torch.cat([packed.targets, packed.targets[:1].expand(spare)])
        return token_logprobs(
            hidden.reshape(-1, hidden.shape[-1])[sources],
            policy.head,
            targets,
            temperature=temperature,
            vocab_size=policy.vocab_size,
            with_entropy=with_entropy,
        )

    def _by_model(self, packed: Packed) -> Tensor:
        logits = self.module(
            input_ids=packed.input_ids, position_ids=packed.position_ids, attention_mask=packed.mask, use_cache=False
        ).logits
        chosen = logits.reshape(-1, logits.shape[-1])[packed.sources, : self._policy.vocab_size]
        return torch.log_softmax(chosen.float(), dim=-1).gather(-1, packed.targets[:, None])[:, 0]
