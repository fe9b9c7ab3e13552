"""What an update trains on: rows with their advantages, dealt to mini-batches by identity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from grpoctl.algorithms.seeds import identity_order
from grpoctl.artifacts.artifact import Artifact
from grpoctl.artifacts.lineage import require_same_rows
from grpoctl.engines.base import FloatVector
from grpoctl.errors import GateFailed, InputRefused, UsageError
from grpoctl.settings.jobs import UpdateJob
from grpoctl.stages.token_rows import TOKEN_COLUMNS, TokenRows, float_lists, token_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """All rows of an update's inputs, joined and verified.

    Args:
        rows: token ids, masks and the sampler's log-probabilities
        advantages: (B) per-token advantages as (T,) arrays; None where the row has none
        denominator_logprobs: (B) what the ratio divides by, by token; None where the row has none
        old_logprobs: (B) recomputed by the training framework, where there are any
        ref_logprobs: (B) reference log-probabilities, or None where there are none at all
        trainable: rows with an advantage and at least one token under the mask, in order
    """

    rows: TokenRows
    advantages: list[FloatVector | None]
    denominator_logprobs: list[FloatVector | None]
    old_logprobs: list[FloatVector | None]
    ref_logprobs: list[FloatVector | None]
    trainable: list[int]


def load_training_rows(
    job: UpdateJob, rollouts: Artifact, scores: Artifact, logprobs: Artifact | None, *, vocab_size: int
) -> TrainingRows:
    """Read and join rollouts, scores and logprobs.

    Raises:
        InputRefused: rows that don't match, columns that are missing, arrays of unequal lengths.
    """
    table = rollouts.read(TOKEN_COLUMNS)
    rows = token_rows(table, rollouts, vocab_size=vocab_size)
    empty: list[FloatVector | None] = [None] * len(rows.sample_ids)
    old_logprobs, reference = empty, empty
    if logprobs is not None:
        computed = logprobs.read()
        require_same_rows(rows.sample_ids, cast("list[str]", computed["sample_id"].to_pylist()), logprobs.url)
        old_logprobs = float_lists(computed["old_logprobs"])
        reference = float_lists(computed["ref_logprobs"])
        _check_lengths(rows, old_logprobs, f"{logprobs.url}: old_logprobs")
        _check_lengths(rows, reference, f"{logprobs.url}: ref_logprobs")
    advantages = _advantages(rows, scores)
    denominator = old_logprobs if job.update.old == "old_logprobs" else rows.rollout_logprobs
    trainable = [i for i, mask in enumerate(rows.completion_masks) if advantages[i] is not None and bool(mask.any())]
    _require(
        trainable, denominator, f"update.old: {job.update.old}", "run `grpoctl logprob --policy …` and give --logprobs"
    )
    if job.update.kl_coef > 0:
        _require(
            trainable, reference, "update.kl_coef above 0", "run `grpoctl logprob --reference …` and give --logprobs"
        )
    return TrainingRows(
        rows=rows,
        advantages=advantages,
        denominator_logprobs=denominator,
        old_logprobs=old_logprobs,
        ref_logprobs=reference,
        trainable=trainable,
    )


def _require(trainable: Sequence[int], column: Sequence[FloatVector | None], who: str, remedy: str) -> None:
    if any(column[row] is None for row in trainable):
        raise InputRefused(f"{who} needs log-probabilities that aren't there; {remedy}")


def _check_lengths(rows: TokenRows, column: Sequence[FloatVector | None], name: str) -> None:
    for i, values in enumerate(column):
        if values is not None and len(values) != len(rows.completion_ids[i]):
            raise InputRefused(
                f"{name}: {rows.sample_ids[i]} has {len(values)} values for {len(rows.completion_ids[i])} tokens: recompute"
            )


def _advantages(rows: TokenRows, scores: Artifact) -> list[FloatVector | None]:
    table = scores.read(["sample_id", "advantage", "token_advantages"])
    require_same_rows(rows.sample_ids, cast("list[str]", table["sample_id"].to_pylist()), scores.url)
    by_token = float_lists(table["token_advantages"])
    _check_lengths(rows, by_token, f"{scores.url}: token_advantages")
    result: list[FloatVector | None] = []
    for ids, scalar, tokens in zip(rows.completion_ids, table["advantage"].to_pylist(), by_token, strict=True):
        if scalar is None:
            result.append(None)
        else:
            result.append(tokens if tokens is not None else np.full(len(ids), scalar, dtype=np.float32))
    return result


def mini_batches(
    data: TrainingRows, job: UpdateJob, *, digest: str, group_size: int, epoch: int
) -> Iterator[list[int]]:
    """Yield the rows of each optimizer step of one epoch.

    Groups stay whole unless shuffle is `completions`; the order depends on (rollouts digest, seed, epoch) alone.

    Raises:
        UsageError: mini_batch_size isn't a multiple of the group size.
        GateFailed: nothing is left to train on.
    """
    groups = _groups(data, drop_flat=job.update.groups_without_signal == "drop")
    if not groups:
        raise GateFailed(f"{job.scores}: no group has a non-zero advantage; nothing to train on")
    size = job.update.mini_batch_size
    if job.update.shuffle == "completions":
        rows = [row for members in groups.values() for row in members]
        keys = [data.rows.sample_ids[row] for row in rows]
        order = identity_order(keys, "completions", digest, job.seed, epoch)
        step = size or len(rows)
        for start in range(0, len(rows), step):
            yield sorted(rows[i] for i in order[start : start + step])
        return
    if size is not None and size % group_size:
        raise UsageError(
            f"update.mini_batch_size: {size} is not a multiple of the group size {group_size}; "
            "choose one, or set update.shuffle: completions"
        )
    names = list(groups)
    order = list(range(len(names)))
    if job.update.shuffle == "groups":
        order = identity_order(names, "groups", digest, job.seed, epoch)
    step = len(names) if size is None else size // group_size
    for start in range(0, len(names), step):
        yield [row for i in order[start : start + step] for row in groups[names[i]]]


def _groups(data: TrainingRows, *, drop_flat: bool) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for row in data.trainable:
        groups.setdefault(data.rows.group_ids[row], []).append(row)
    if not drop_flat:
        return groups
    return {name: rows for name, rows in groups.items() if any(np.any(data.advantages[row]) for row in rows)}


def has_signal(data: TrainingRows) -> bool:
    """Return whether any trainable row has a non-zero advantage."""
    return any(np.any(data.advantages[row]) for row in data.trainable)


def num_mini_batches(data: TrainingRows, job: UpdateJob, *, group_size: int) -> int:
    """Return the optimizer steps of one epoch."""
    groups = _groups(data, drop_flat=job.update.groups_without_signal == "drop")
    size = job.update.mini_batch_size
    if size is None:
        return 1
    if job.update.shuffle == "completions":
        return math.ceil(sum(map(len, groups.values())) / size)
    return math.ceil(len(groups) / (size // group_size or 1))
