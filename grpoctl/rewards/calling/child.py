"""The parent's end of one worker child: start it, exchange messages without ever blocking, kill it with all it started."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpoctl.processes.child import Child, how_it_ended

LOG_BYTES = 1024 * 1024
MAX_PROCESSES = 256
"""Processes that one child may have below it before it is killed."""
_TAIL_BYTES = 2000
_CHUNK_BYTES = 256 * 1024
_EXIT_SECONDS = 1.0
_SECRET_NAME = re.compile(
    r"SECRET|TOKEN(?!IZ)|PASSW|PASSPHRASE|CREDENTIAL|(^|_|API|ACCESS|AUTH)KEYS?(_|$)|^AWS_|^AZURE_|^GOOGLE_APPLICATION|SSH_AUTH",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_BOOT = """import os, signal, sys; sys.path[:] = {path!r}
def answer(to): return [signal.signal(number, to) for number in (signal.SIGINT, signal.SIGTERM)]
answer(lambda *_: None)
os.register_at_fork(after_in_child=lambda: answer(signal.SIG_DFL))
from grpoctl.rewards.calling.child_main import main; main({command}, {result})"""
"""Deaf to a signal that a supervisor sends to the whole job, which would count as the row's crash: we are who ends it.
What user code starts isn't deaf.
"""


def scrubbed_environment(environment: Mapping[str, str], *, keep: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment without what looks like a secret: by its name, or a URL with a password in it.

    Args:
        environment: the variables.
        keep: names to pass on all the same.
    """
    clean = {
        name: value
        for name, value in environment.items()
        if name in keep or not (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
    }
    return {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **clean}


class OutputLog:
    """What the children print: the first MiB goes to a file, the rest is dropped with one line that says so."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._left = LOG_BYTES

    def write(self, printed: bytes) -> None:
        """Append captured bytes while there is room."""
        if self._path is None or self._left <= 0:
            return
        kept = printed[: self._left]
        self._left -= len(kept)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(kept)
            if self._left <= 0:
                said = f"[grpoctl: output of the reward functions beyond {LOG_BYTES >> 20} MiB is dropped]"
                file.write(f"\n{said}\n".encode())


class WorkerLink:
    """One running child."""

    def __init__(self, log: OutputLog, *, environment: Mapping[str, str], max_processes: int) -> None:
        self.loaded: set[str] = set()
        """Names of the rewards that this child has loaded."""
        self.called: set[str] = set()
        """Names of those that have answered, or should have: their libraries are imported."""
        self.output_closed = False
        """The child and all that it started have closed their stdout and stderr."""
        self._log = log
        self._tail = b""
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._start(environment, max_processes)

    def _start(self, environment: Mapping[str, str], max_processes: int) -> None:
        command_read, self.command_fd = os.pipe()
        self.result_fd, result_write = os.pipe()
        self.output_fd, output_write = os.pipe()
        boot = _BOOT.format(
            path=[entry or os.getcwd() for entry in sys.path],
            command=command_read,
            result=result_write,
        )
        try:
            self._child = Child(
                [sys.executable, "-c", boot],
                environment=environment,
                stdout=output_write,
                stderr=output_write,
                pass_fds=(command_read, result_write),
                max_processes=max_processes,
                expendable=True,
            )
        finally:
            for fd in (command_read, result_write, output_write):
                os.close(fd)
        for fd in (self.command_fd, self.result_fd, self.output_fd):
            os.set_blocking(fd, False)

    @property
    def has_outgoing(self) -> bool:
        """Whether a message waits for room in the pipe."""
        return bool(self._outgoing)

    def post(self, *message: Any) -> None:
        """Queue a message."""
        body = pickle.dumps(message)
        self._outgoing += struct.pack("!Q", len(body)) + body
        self.pump()

    def pump(self) -> None:
        """Write as much of the queue as the pipe takes now."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self.command_fd, memoryview(self._outgoing)[:_CHUNK_BYTES])]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it died; the end of its results says so
            self._outgoing.clear()

    def messages(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages that have arrived, and whether the child's end is closed."""
        closed = self._read_into(self.result_fd, self._incoming)
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        try:
            return [json.loads(line) for line in lines], closed
        except ValueError:  # user code wrote into our pipe: as good as dead
            return [], True

    def drain_output(self) -> None:
        """Move what the child printed to the log."""
        printed = bytearray()
        self.output_closed = self._read_into(self.output_fd, printed)
        if printed:
            self._log.write(bytes(printed))
            self._tail = (self._tail + printed)[-_TAIL_BYTES:]

    def _read_into(self, fd: int, buffer: bytearray) -> bool:
        """Read at most a few chunks, so that a child that never stops printing does not hold up the others."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(4):
                chunk = os.read(fd, _CHUNK_BYTES)
                if not chunk:
                    return True
                buffer += chunk
        return False

    def has_ended(self) -> bool:
        """Whether the child is gone, even where something that it started still holds its pipes open."""
        return self._child.code() is not None

    def close(self) -> None:
        """Let the child end by itself for a second, then kill it."""
        self.post("exit")
        self.kill(is_ending=True)

    def kill(self, *, is_ending: bool) -> str:
        """Kill the child and everything it started; return how it ended, with the last lines it printed.

        Args:
            is_ending: the child is about to end by itself; give it a second, so that it can say how.
        """
        if is_ending:
            self._child.wait(_EXIT_SECONDS)
        code = self._child.kill()
        os.close(self.command_fd)
        self.drain_output()
        os.close(self.result_fd)
        os.close(self.output_fd)
        return f"{how_it_ended(code)}{self._last_lines()}"

    def _last_lines(self) -> str:
        shown = self._tail.decode("utf-8", "backslashreplace").strip()
        return f"; it printed last:\n{shown}" if shown else ""
