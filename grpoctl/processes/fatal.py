"""What a process says when a thread of it has to end it at once: the command that runs registers how that is said."""

from __future__ import annotations

import sys
from collections.abc import Callable

from grpoctl.errors import GrpoctlError


def _to_stderr(error: GrpoctlError) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)


_speaker: list[Callable[[GrpoctlError], None]] = [_to_stderr]


def register(speaker: Callable[[GrpoctlError], None]) -> None:
    """Have an error said by `speaker` from now on."""
    _speaker[0] = speaker


def say(error: GrpoctlError) -> None:
    """Say why the process ends."""
    _speaker[0](error)
