"""Which of several processes of one stage this is, by the variables that torchrun, deepspeed and grpoctl itself set."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Final, NoReturn

RANK_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STARTED_BY: Final = "GRPOCTL_STARTED_BY"
"""Set in the processes that `runtime.num_processes` starts: the id of the one that started them and speaks for them."""


def is_launched() -> bool:
    """Return whether a launcher started this process as one of a group, be it a group of one."""
    return all(name in os.environ for name in RANK_VARIABLES)


def rank() -> int:
    """Return this process's number in its group, 0 without one."""
    return int(os.environ["RANK"]) if is_launched() else 0


def world_size() -> int:
    """Return the number of processes of the group, 1 without one."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def has_speaker() -> bool:
    """Return whether the process that started this one prints results and errors in its place."""
    return STARTED_BY in os.environ


def open_standard_streams() -> None:
    """Put the null device where standard input, output or error is closed, lest the next file or pipe takes its number."""
    opened = os.open(os.devnull, os.O_RDWR)
    while opened <= 2:
        opened = os.dup(opened)
    os.close(opened)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def end(code: int) -> NoReturn:
    """End this process at once, after what was registered for its end has run.

    The interpreter's own teardown is left out: libraries' threads (gloo's, now and then pyarrow's) abort there, with all
    work done and said.
    """
    try:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  there is no public name
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # whoever read it has gone, or it is closed
                stream.flush()
    finally:
        os._exit(code)
