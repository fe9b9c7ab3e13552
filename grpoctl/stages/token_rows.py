"""Rollout rows as arrays for the training framework: checked once, here, before any forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from grpoctl.artifacts.artifact import Artifact
from grpoctl.engines.base import FloatVector, TokenIds
from grpoctl.errors import InputRefused

TOKEN_COLUMNS = [
    "sample_id",
    "group_id",
    "prompt_ids",
    "completion_ids",
    "completion_mask",
    "rollout_logprobs",
    "status",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """B rows of a rollouts artifact or of one of its shards.

    Args:
        sample_ids: (B)
        group_ids: (B), groups standing together
        prompt_ids: (B) ids
        completion_ids: (B) ids; empty where the row failed
        completion_masks: (B) bool by token
        rollout_logprobs: (B) nats by token; None where the row failed
    """

    sample_ids: list[str]
    group_ids: list[str]
    prompt_ids: list[TokenIds]
    completion_ids: list[TokenIds]
    completion_masks: list[npt.NDArray[np.bool_]]
    rollout_logprobs: list[FloatVector | None]


def token_rows(table: pa.Table, rollouts: Artifact, *, vocab_size: int) -> TokenRows:
    """Turn rollouts into arrays.

    Raises:
        InputRefused: ids, mask and log-probabilities of unequal lengths, ids outside the vocabulary, or a group in pieces.
    """
    sample_ids = cast("list[str]", table["sample_id"].to_pylist())
    group_ids = cast("list[str]", table["group_id"].to_pylist())
    failed = [status == "failed" for status in table["status"].to_pylist()]
    prompts: list[TokenIds] = _arrays(table["prompt_ids"], np.int32)
    completions: list[TokenIds] = _arrays(table["completion_ids"], np.int32)
    masks: list[npt.NDArray[np.bool_]] = _arrays(table["completion_mask"], np.bool_)
    logprobs: list[Any] = _arrays(table["rollout_logprobs"], np.float32)
    require_whole_groups(group_ids, rollouts)
    for row, sample_id in enumerate(sample_ids):
        if failed[row]:
            completions[row], masks[row] = np.zeros(0, np.int32), np.zeros(0, np.bool_)
            continue
        lengths = {len(completions[row]), len(masks[row]), -1 if logprobs[row] is None else len(logprobs[row])}
        if len(lengths) > 1:
            raise InputRefused(
                f"{rollouts.url}: {sample_id}: {len(completions[row])} completion_ids, {len(masks[row])} mask entries and "
                f"{'no' if logprobs[row] is None else len(logprobs[row])} rollout_logprobs; they must be one per token"
            )
        for name, ids in (("prompt_ids", prompts[row]), ("completion_ids", completions[row])):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                bad = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
                raise InputRefused(
                    f"{rollouts.url}: {sample_id}: {name} holds id {bad}, the model has {vocab_size} embeddings; "
                    "rollouts and policy don't belong together"
                )
    return TokenRows(
        sample_ids=sample_ids,
        group_ids=group_ids,
        prompt_ids=prompts,
        completion_ids=completions,
        completion_masks=masks,
        rollout_logprobs=[None if failed[row] else values for row, values in enumerate(logprobs)],
    )


def require_whole_groups(
    group_ids: list[str], rollouts: Artifact, earlier: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Refuse rows whose groups don't stand together, or stood in an earlier shard; return all groups so far.

    Raises:
        InputRefused: a group in several places.
    """
    closed = set(earlier)
    for number, current in enumerate(group_ids):
        if number and current == group_ids[number - 1]:
            continue
        if current in closed:
            raise InputRefused(
                f"{rollouts.url}: group {current} stands in several places; rows of a group must be together: sample anew"
            )
        closed.add(current)
    return frozenset(closed)


def float_lists(column: pa.ChunkedArray[Any]) -> list[FloatVector | None]:
    """Return a list column as float32 arrays, None where null."""
    return _arrays(column, np.float32)


def _arrays(column: pa.ChunkedArray[Any], dtype: type[np.generic]) -> list[Any]:
    """Return the rows of a list column as views of its one values buffer, None where null."""
    array = cast("pa.Array[Any] | pa.ChunkedArray[Any]", column.combine_chunks())
    if isinstance(array, pa.ChunkedArray):
        array = cast(
            "pa.Array[Any]",
            pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], type=array.type),
        )
    if pa.types.is_null(array.type):
        return [None] * len(array)
    lists = cast("Any", array)  # a list array
    offsets = lists.offsets.to_numpy()
    values = np.asarray(lists.values.to_numpy(zero_copy_only=False), dtype=dtype)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return [values[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(array))]
