"""Every seed and every order as a function of identity: nothing to restore when a run resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

SEED_BITS = 63
"""Seeds fit a signed 64-bit integer, the narrowest type that samplers and Parquet share."""


def identity_seed(*identity: str | int) -> int:
    """Return a seed in [0, 2⁶³) that depends on the identity alone.

    Args:
        identity: what names the thing, such as run seed, iteration, prompt id, sample index
    """
    return int.from_bytes(_digest(identity)[:8], "big") >> (64 - SEED_BITS)


def identity_order(keys: Sequence[str], *identity: str | int) -> list[int]:
    """Return a permutation of range(len(keys)) that depends on the identity and the set of keys, not on their order.

    Args:
        keys: distinct names of the things to shuffle
        identity: what names this shuffle, such as dataset digest, seed, epoch
    """
    return sorted(range(len(keys)), key=lambda i: (_digest((*identity, keys[i])), keys[i]))


def _digest(identity: Sequence[str | int]) -> bytes:
    parts = (f"{type(part).__name__}:{len(str(part))}:{part}" for part in identity)
    return hashlib.sha256("|".join(parts).encode()).digest()
