"""Which of several processes of one stage this is, by the variables that torchrun, deepspeed and grpoctl itself set."""

from __future__ import annotations

import atexit
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


def end(code: int) -> NoReturn:
    """End this process at once, after what was registered for its end has run.

    The interpreter's own teardown is left out: libraries' threads (gloo's, now and then pyarrow's) abort there, with all
    work done and said.
    """
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  there is no public name
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
