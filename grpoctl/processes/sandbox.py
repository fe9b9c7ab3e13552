"""Run an untrusted Python program inside bubblewrap: no network, no files but its own, bounded time, memory and output."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from typing import IO

from grpoctl.errors import UsageError
from grpoctl.processes.tree import descendants

_MAX_PROCESSES = 64
_MAX_OUTPUT_BYTES = 1024 * 1024
_POLL_SECONDS = 0.02

# Runs inside. The program comes through a file that is closed before it starts, and so does the word that proves that it ran
# to its end: a program that exits early cannot pass. Limits are set here, when the right to raise them again is gone.
_RUNNER = """
import json, os, resource, sys
with open(int(sys.argv[1])) as file:
    job = json.load(file)
for limit, value in ((resource.RLIMIT_AS, job["memory"]), (resource.RLIMIT_CPU, job["seconds"]),
                     (resource.RLIMIT_FSIZE, job["output"]), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (value, value))
def run(job, write=os.write):
    word, source = job.pop("word"), job.pop("source")
    exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
    write(2, ("\\n" + word).encode())
run(job)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """What a program did."""

    finished: bool
    """It ran to its last line: no exception, no early exit, no limit hit."""
    exit_code: int
    """0 also after an early `sys.exit()`."""
    output: str
    """Its standard output, up to 1 MiB."""
    error: str
    """The end of its standard error, or the limit that ended it."""


def require_sandbox() -> None:
    """Check that bubblewrap is there and may create namespaces.

    Raises:
        UsageError: it is not, with what to install or allow; programs never run on the bare host instead.
    """
    if shutil.which("bwrap") is None:
        raise UsageError(
            "reward code: bubblewrap (bwrap) is not installed, and programs never run on the bare host; "
            "run: apt-get install bubblewrap (or dnf install bubblewrap)"
        )
    failure = _probe_failure()
    if failure:
        raise UsageError(
            f"reward code: bubblewrap cannot make a sandbox here: {failure}; programs never run on the bare host. "
            "Allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; in docker: --security-opt seccomp=unconfined)"
        )


@cache
def _probe_failure() -> str:
    done = subprocess.run([*_sandbox(), "-c", "pass"], capture_output=True, text=True, timeout=30, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")


def _sandbox() -> list[str]:
    """Return the command line up to the interpreter: a read-only system, its own /tmp, no network, no other processes."""
    python = os.path.realpath(sys.executable)
    shared = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", sys.base_prefix, os.path.dirname(python)]
    binds = [word for path in dict.fromkeys(shared) for word in ("--ro-bind-try", path, path)]
    return [
        "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv",
        *binds, "--proc", "/proc", "--dev", "/dev", "--size", str(64 * 1024 * 1024), "--tmpfs", "/tmp", "--chdir", "/tmp",
        python, "-I", "-S",
    ]  # fmt: skip


def run_python(source: str, *, stdin: str, timeout_seconds: float, memory_bytes: int) -> SandboxResult:
    """Run a program with the given standard input in a fresh sandbox."""
    word = secrets.token_hex(16)
    job = {"source": source, "word": word, "memory": memory_bytes, "seconds": int(timeout_seconds) + 2}
    with contextlib.ExitStack() as stack:
        given, stdin_file, output, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        _fill(given, json.dumps({**job, "output": _MAX_OUTPUT_BYTES}))
        _fill(stdin_file, stdin)
        command = [*_sandbox(), "-c", _RUNNER, str(given.fileno())]
        process = subprocess.Popen(
            command, stdin=stdin_file, stdout=output, stderr=errors, pass_fds=[given.fileno()], start_new_session=True
        )
        limit = _limit_hit(process, timeout_seconds)
        shown = _tail(errors)
        output.seek(0)
        text = output.read(_MAX_OUTPUT_BYTES).decode("utf-8", "replace")
    return SandboxResult(
        finished=not limit and shown.endswith(word),
        exit_code=process.returncode,
        output=text,
        error=limit or shown.removesuffix(word).strip(),
    )


def _limit_hit(process: subprocess.Popen[bytes], timeout_seconds: float) -> str:
    """Wait for the end or for a limit, then kill; return the limit, or an empty text."""
    give_up = time.monotonic() + timeout_seconds
    limit = ""
    try:
        while process.poll() is None and not limit:
            if time.monotonic() > give_up:
                limit = "no end within its time"
            elif len(descendants(process.pid)) > _MAX_PROCESSES:
                limit = f"started more than {_MAX_PROCESSES} processes"
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # takes the whole process namespace with it
            process.wait()
    return limit


def _fill(file: IO[bytes], text: str) -> None:
    file.write(text.encode("utf-8", "replace"))
    file.seek(0)


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 2000))
    return file.read().decode("utf-8", "replace")
