"""Start a process that never outlives us: stage interpreters, local ranks, servers and reward workers are all started here.

A guardian stands between (guardian.py). When we end, be it by kill −9, its lifeline breaks and it kills the process and
everything that the process started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from grpoctl.processes import guardian
from grpoctl.processes.guardian import END, GROUP, TOO_MANY_PROCESSES
from grpoctl.processes.tree import descendants

KILL_SECONDS: Final = 15.0
"""How long a whole tree may take to be gone after it is killed."""
Stream = int | IO[Any] | None


class Child:
    """A running process of ours with all that it starts."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        pass_fds: Sequence[int] = (),
        max_processes: int = 0,
        expendable: bool = False,
    ) -> None:
        """Start a command.

        Args:
            command: program and arguments; one that can't be started ends with 127
            environment: its variables; ours by default
            stdin: as subprocess has it; nothing by default
            stdout: as subprocess has it
            stderr: as subprocess has it
            pass_fds: descriptors that it keeps
            max_processes: it is killed when there are more below it; 0 for no limit
            expendable: the first to go when memory runs out
        """
        held, self._lifeline = _pipe()
        limits = [str(held), str(os.getpid()), str(max_processes), str(int(expendable))]
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(guardian.__file__)), *limits, *command],
                env=None if environment is None else dict(environment),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(held, *pass_fds),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(held)

    @property
    def stdin(self) -> IO[bytes]:
        """Its standard input, where that was asked for."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """Its standard output, where that was asked for."""
        assert self._process.stdout is not None
        return self._process.stdout

    def code(self) -> int | None:
        """Return the exit code, minus the signal's number where one ended it, None while it runs."""
        return self._process.poll()

    def send(self, number: int, *, group: bool = False) -> None:
        """Send it a signal; with `group` its whole process group."""
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._lifeline, bytes([number + (GROUP if group else 0)]))

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit code, None where it still runs after so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> int:
        """Kill it with everything that it started, and wait; return the exit code."""
        if self._lifeline >= 0:
            with contextlib.suppress(OSError):  # it has ended
                os.write(self._lifeline, bytes([END]))  # closing isn't enough: a fork of ours may hold a copy
            os.close(self._lifeline)
            self._lifeline = -1
        if self.wait(KILL_SECONDS) is None:
            for process in (*descendants(self._process.pid), self._process.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
        code = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        return code


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe, neither of them numbered as a standard stream: a guardian puts those elsewhere."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


def how_it_ended(code: int) -> str:
    """Return in words what an exit code tells."""
    if code == TOO_MANY_PROCESSES:
        return "it started too many processes and was killed"
    if code >= 0:
        return f"its process exited with code {code}"
    try:
        return f"its process was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was killed by signal {-code}"
