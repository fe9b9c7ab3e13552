"""The program between us and every process that we start: it ends that process's whole tree when we end, however we end.

Run as a file by a bare interpreter, so it imports nothing of ours but the file beside it. Its arguments: the descriptor of
the lifeline (a pipe whose other end we hold), the limits, and the command. A byte on the lifeline is a signal for the
command (from 128 on: for its process group), or END; the lifeline's end is ours. It ends as the command ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from grpoctl.processes.tree import (
    adopt_orphans,
    be_expendable,
    descendants,
    die_with_parent,
    kill_descendants,
    open_descriptors,
)

TOO_MANY_PROCESSES = 222
"""Exit code where the command was ended for starting too many processes."""
NOT_STARTED = 127
"""Exit code where the command can't be started."""
GROUP = 128
"""Added to a signal that is meant for the command's process group."""
END = 0
"""The byte that asks for the end of the command and all below it."""
TICK_SECONDS = 0.1
MEANT_FOR_THE_COMMAND = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHANGED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Ignored by this interpreter, but not by those that started it."""


def main() -> None:
    """Start the command and follow it; never returns."""
    lifeline, parent, max_processes, expendable = map(int, sys.argv[1:5])
    adopt_orphans()
    guardian = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_THE_COMMAND)  # until both know what to do with them
    command = os.fork()
    if command == 0:
        os.close(lifeline)
        os.setsid()
        _answer_signals_as_a_new_program()
        die_with_parent(guardian)
        if expendable:
            be_expendable()
        _become(sys.argv[5:])
    _let_go_of_all_but(lifeline)
    _follow(command, lifeline, parent, max_processes)


def _answer_signals_as_a_new_program() -> None:
    for number in CHANGED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, MEANT_FOR_THE_COMMAND)


def _become(words: list[str]) -> None:
    try:
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"{words[0]} can't be started: {error.strerror}\n".encode())
        os._exit(NOT_STARTED)


def _let_go_of_all_but(lifeline: int) -> None:
    """Close what the command has inherited, so that the ends of its pipes are seen; be deaf to signals meant for it."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    for number in open_descriptors():
        if number > 2 and number != lifeline:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(number)
    for number in MEANT_FOR_THE_COMMAND:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, MEANT_FOR_THE_COMMAND)


def _follow(command: int, lifeline: int, parent: int, max_processes: int) -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(lifeline, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll(TICK_SECONDS * 1000)]
        if wake_read in ready:
            os.read(wake_read, 4096)
        status = _ended(command)
        alone = os.getppid() != parent or (lifeline in ready and not _pass_on(lifeline, command))
        crowded = status is None and max_processes and len(descendants(os.getpid())) > max_processes
        if status is not None or alone or crowded:
            kill_descendants(os.getpid(), group=command)
            _end_as(TOO_MANY_PROCESSES << 8 if crowded else signal.SIGKILL if status is None else status)


def _pass_on(lifeline: int, command: int) -> bool:
    """Send on the signals that came; return False at the lifeline's end."""
    try:
        wanted = os.read(lifeline, 64)
    except BlockingIOError:
        return True
    if END in wanted:
        return False
    for byte in wanted:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or became another user's
            os.killpg(command, byte - GROUP) if byte >= GROUP else os.kill(command, byte)
    return bool(wanted)


def _ended(command: int) -> int | None:
    """Return the command's wait status once it has ended; reaps orphans on the way."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return signal.SIGKILL
        if pid in (0, command):
            return status if pid else None


def _end_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
