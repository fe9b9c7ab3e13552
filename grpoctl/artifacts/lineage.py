"""Joining sidecar artifacts to their rollouts: the same shards, the same rows, verified and never assumed."""

from __future__ import annotations

from collections.abc import Sequence

from grpoctl.artifacts.artifact import Artifact
from grpoctl.errors import InputRefused


def require_same_rows(expected: Sequence[str], found: Sequence[str], url: str) -> None:
    """Refuse a sidecar shard whose sample_ids aren't those of the rollouts, in order.

    Raises:
        InputRefused: with the first difference.
    """
    if list(expected) == list(found):
        return
    if len(expected) != len(found):
        raise InputRefused(f"{url}: {len(found)} rows, the rollouts' shard has {len(expected)}; recompute it")
    place = next(i for i, (ours, theirs) in enumerate(zip(expected, found, strict=True)) if ours != theirs)
    raise InputRefused(f"{url}: row {place} is {found[place]}, the rollouts have {expected[place]}; recompute it")


def require_made_from(sidecar: Artifact, rollouts: Artifact) -> None:
    """Refuse a sidecar artifact that was made from other rollouts.

    Raises:
        InputRefused: its lineage names another content digest.
    """
    parent = next((p for p in sidecar.manifest.parents if p.role == "rollouts"), None)
    if parent is None or parent.content_digest != rollouts.manifest.content_digest:
        made_from = parent.url if parent else "unknown rollouts"
        raise InputRefused(
            f"{sidecar.url}: was made from {made_from}, not from the content of {rollouts.url}; recompute it"
        )
