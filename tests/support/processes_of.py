"""Looking at a process and what it has started, from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from grpoctl.processes.tree import descendants

PATIENCE_SECONDS = 120.0
"""On a machine that is busy with other work; nothing here is timed."""


def is_running(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def below(pid: int) -> list[int]:
    """Return the living processes below one."""
    return [child for child in descendants(pid) if is_running(child)]


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Return once a condition holds.

    Raises:
        AssertionError: it doesn't, for long.
    """
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < give_up, f"{what}: not within {PATIENCE_SECONDS:g} s"
        time.sleep(0.02)
