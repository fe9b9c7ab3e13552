"""How far the sampler's log-probabilities lie from the recomputed ones: sums per shard, one summary per artifact.

Two engines never agree to the last bit. A gap that is large, or large at one kind of place (the first token, the end token),
says that the sampler wasn't the declared policy: stale weights, another temperature, another template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from grpoctl.engines.base import FloatVector, TokenIds
from grpoctl.engines.tokenizer import Tokenizer
from grpoctl.errors import GateFailed
from grpoctl.stages.token_rows import TokenRows

POSITIONS: Final = (0, 1, 8, 32, 128, 512, 2048)
"""First positions of the buckets that gaps are grouped in."""
CLASSES: Final = ("end", "number", "word", "space", "other")
BINS: Final = np.linspace(-9, 2, 111)
"""Edges in powers of ten: a percentile over all shards, to a quarter of its size, without keeping every token."""


def gap_sums(rows: TokenRows, old: Sequence[FloatVector], tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return sums over |rollout_logprobs − old_logprobs| of one shard, or None where it has no token.

    Raises:
        GateFailed: a recomputed log-probability isn't finite.
    """
    used = [i for i, kept in enumerate(rows.rollout_logprobs) if kept is not None and len(kept)]
    if not used:
        return None
    kept = np.concatenate(cast("list[FloatVector]", [rows.rollout_logprobs[i] for i in used])).astype(np.float64)
    gaps = np.abs(kept - np.concatenate([old[i] for i in used]))
    if not np.isfinite(gaps).all():
        raise GateFailed(
            f"{int((~np.isfinite(gaps)).sum())} recomputed log-probabilities are not finite; suspect bad weights"
        )
    ids = np.concatenate([rows.completion_ids[i] for i in used])
    places = np.concatenate([np.arange(len(rows.completion_ids[i])) for i in used])
    buckets = np.searchsorted(POSITIONS, places, side="right") - 1
    histogram, _ = np.histogram(np.log10(np.maximum(gaps, 1e-9)), bins=BINS)
    return {
        "sum": float(gaps.sum()),
        "count": len(gaps),
        "max": float(gaps.max()),
        "max_at": _place_of(int(gaps.argmax()), rows, used),
        "log10_histogram": {str(i): int(n) for i, n in enumerate(histogram) if n},
        "by_position": _grouped(gaps, buckets, [str(first) for first in POSITIONS]),
        "by_class": _grouped(gaps, _classes(ids, tokenizer), CLASSES),
    }


def _place_of(number: int, rows: TokenRows, used: Sequence[int]) -> str:
    """Return which row and token the n-th gap of the used rows belongs to."""
    for i in used:
        length = len(rows.completion_ids[i])
        if number < length:
            return f"{rows.sample_ids[i]}, token {number}"
        number -= length
    raise IndexError(number)


def likely_causes(stats: dict[str, Any]) -> str:
    """Return what fits a gap that is too large, from where it is large."""
    by_position, by_class = stats["rollout_gap_by_position"], stats["rollout_gap_by_class"]
    mean = stats["rollout_gap_mean"]
    causes: list[str] = []
    if by_position.get("0", 0.0) > 3 * mean:
        causes.append("another chat template, prompt or position ids (it is largest at the first token)")
    if by_class.get("end", 0.0) > 3 * mean:
        causes.append("an end token that the sampler bans or forces (it is largest there)")
    if stats["rollout_gap_max"] > 100 * mean:
        causes.append("a few rows alone: weights that changed while they were sampled, or another engine's rows")
    causes += [
        "stale weights, or others",
        "another temperature or truncation",
        "penalties or bans of the sampler's own",
    ]
    causes.append("a lower precision than rollout.dtype says")
    return "; ".join(causes)


def _grouped(
    gaps: npt.NDArray[np.float64], groups: npt.NDArray[np.intp], names: Sequence[str]
) -> dict[str, list[float]]:
    counts = np.bincount(groups, minlength=len(names))
    sums = np.bincount(groups, weights=gaps, minlength=len(names))
    return {name: [float(sums[i]), int(counts[i])] for i, name in enumerate(names) if counts[i]}


def _classes(ids: TokenIds, tokenizer: Tokenizer) -> npt.NDArray[np.intp]:
    distinct, inverse = np.unique(ids, return_inverse=True)
    texts = tokenizer.decode_many([np.array([token], dtype=np.int32) for token in distinct])
    kinds = [
        "end" if int(token) in tokenizer.eos_ids else _class(text) for token, text in zip(distinct, texts, strict=True)
    ]
    return np.array([CLASSES.index(kind) for kind in kinds])[inverse]


def _class(text: str) -> str:
    stripped = text.strip()
    if not stripped:
        return "space"
    if any(character.isdigit() for character in stripped):
        return "number"
    return "word" if any(character.isalpha() for character in stripped) else "other"


def gap_summary(shards: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Return the artifact's gap: mean, p99 and largest, means by first position of a bucket and by token class, nats."""
    found = [shard for shard in shards if shard is not None]
    count = sum(shard["count"] for shard in found)
    if not count:
        return {"rollout_gap_mean": None, "rollout_gap_p99": None, "rollout_gap_max": None}
    histogram = np.zeros(len(BINS) - 1)
    for shard in found:
        for place, number in shard["log10_histogram"].items():
            histogram[int(place)] += number
    p99 = float(10 ** BINS[1 + int(np.searchsorted(np.cumsum(histogram), 0.99 * count))])
    return {
        "rollout_gap_mean": sum(shard["sum"] for shard in found) / count,
        "rollout_gap_p99": p99,
        "rollout_gap_max": max(shard["max"] for shard in found),
        "rollout_gap_max_at": max(found, key=lambda shard: shard["max"]).get("max_at"),
        "rollout_gap_by_position": _means(found, "by_position"),
        "rollout_gap_by_class": _means(found, "by_class"),
    }


def _means(shards: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    totals: dict[str, list[float]] = {}
    for shard in shards:
        for key, (value, count) in shard[name].items():
            total = totals.setdefault(key, [0.0, 0.0])
            total[0] += value
            total[1] += count
    return {key: value / count for key, (value, count) in totals.items()}
