"""Watch over one process and everything it starts, and kill all of it: forked, daemonised or in sessions of their own.

Linux only does this fully (child subreaper, /proc). Elsewhere the process group is killed and no more is promised.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

TOO_MANY_PROCESSES = 222
"""Exit code of a guardian that ended its worker for starting too many processes."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.1
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
        with contextlib.suppress(OSError):
            children.extend(int(word) for word in Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    return children


def kill_descendants(pid: int) -> None:
    """Kill everything below `pid` and reap what is ours; returns when none is left or after ten seconds.

    Processes are stopped before they are killed, so that a fork bomb cannot outrun the scan.
    """
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


def fork_guarded(command_fd: int, *, close_in_guardian: tuple[int, ...], max_processes: int) -> None:
    """Fork; return in the child, the worker. The caller itself stays behind as its guardian and never returns.

    The guardian kills the worker and all that it started when the last writer of `command_fd` is gone (the parent closed it
    or died), when there are more than `max_processes` of them, or when the worker ended. It then ends as the worker did.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guardian = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:  # it died before the line above
            os._exit(1)
        _be_expendable()
        return
    for fd in close_in_guardian:
        os.close(fd)
    _guard(worker, command_fd, max_processes)


def _guard(worker: int, command_fd: int, max_processes: int) -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(command_fd, 0)  # no events asked for: only the hang-up, which always comes
    poll.register(wake_read, select.POLLIN)
    while True:
        ready = poll.poll(_POLL_SECONDS * 1000)
        if any(fd == wake_read for fd, _ in ready):
            os.read(wake_read, 4096)
        status = _ended(worker)
        hung_up = any(fd == command_fd for fd, _ in ready)
        crowded = status is None and not hung_up and len(descendants(os.getpid())) > max_processes
        if status is not None or hung_up or crowded:
            if status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker, signal.SIGKILL)
            kill_descendants(os.getpid())
            _end_as(TOO_MANY_PROCESSES << 8 if crowded else signal.SIGKILL if status is None else status)


def _ended(worker: int) -> int | None:
    """Return the worker's wait status once it has ended; reaps orphans on the way."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in (0, worker):
            return status if pid else None


def _end_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _be_expendable() -> None:
    """No core dumps, and first in line when memory runs out."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
