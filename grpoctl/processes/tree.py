"""A process and everything that it starts: found and killed, forked, daemonised or in sessions of their own.

Linux only does this fully (child subreaper, /proc). Elsewhere the process group is killed and no more is promised. Imports
nothing but the standard library, since the guardian of every child does too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 10.0


def descendants(pid: int) -> list[int]:
    """Return the ids of all living processes below `pid`; empty where /proc does not tell."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop())
        found.extend(children)
        waiting.extend(children)
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # the process is gone
        return children
    for thread in threads:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
            children.extend(int(word) for word in file.read().split())
    return children


def kill_descendants(pid: int, *, group: int) -> None:
    """Kill a group and everything below `pid`, and reap what is ours; returns when none is left or after ten seconds.

    Processes are stopped before they are killed, so that a fork bomb cannot outrun the scan.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    give_up = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < give_up:
        for signal_number in (signal.SIGSTOP, signal.SIGKILL):
            for process in descendants(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal_number)
        if not _reap_all():
            return
        time.sleep(0.002)


def _reap_all() -> bool:
    """Reap ended children; tell whether living ones are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def adopt_orphans() -> None:
    """Become the parent of every process below whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


def be_expendable() -> None:
    """No core dumps, and first in line when memory runs out."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def open_descriptors() -> list[int]:
    """Return the numbers of this process's open files; all possible ones where the system doesn't list them."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
