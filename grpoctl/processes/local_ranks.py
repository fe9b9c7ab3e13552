"""Run a command in several processes of this machine: start them, pass signals on, and speak for them.

Each gets the variables that torchrun would set, so there is one path for all launchers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from grpoctl.errors import GrpoctlError, Interrupted, PeerFailed
from grpoctl.processes import launcher
from grpoctl.processes.child import Child
from grpoctl.processes.stop import StopFlag
from grpoctl.processes.wire import error_of, is_error

POLL_SECONDS: Final = 0.05
GRACE_SECONDS: Final = 15.0
"""How long the others may take to notice that a process failed."""
KEPT_VARIABLES: Final = ("GRPOCTL_CACHE",)
WORST_FIRST: Final = (1, 2, 3, 4, 5, 6, 130, 143, 75)
"""Which of several exit codes tells what happened: 75 is also what the others get when one dies."""


def run_ranks(stage: str, words: Sequence[str], count: int, *, stop: StopFlag) -> dict[str, Any]:
    """Run a stage's command line in `count` processes and return the first one's JSON record.

    Args:
        stage: the command
        words: its arguments, which say the whole job
        count: processes
        stop: a signal to us is passed on

    Raises:
        GrpoctlError: a process failed; of the kind and with the message and exit code of the one that tells most.
    """
    with tempfile.TemporaryDirectory(prefix="grpoctl-") as folder:
        records = [Path(folder) / f"{rank}.json" for rank in range(count)]
        port = free_port()
        children: list[Child] = []
        try:
            for rank, record in enumerate(records):
                stop.check()
                said = [sys.executable, "-m", "grpoctl", stage, *words, "--json", "--result-file", str(record)]
                children.append(Child(said, environment=_variables(rank, count, port), stdout=subprocess.DEVNULL))
            _wait(children, stop)
        finally:
            ended = [child.kill() for child in children]
        codes = [_exit_code(code, record, stop) for code, record in zip(ended, records, strict=True)]
        if any(codes):
            raise _failure(stage, codes, records, stop)
        return json.loads(records[0].read_bytes())


def _variables(rank: int, count: int, port: int) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("GRPOCTL_") or name in KEPT_VARIABLES
    }
    kept.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    return kept | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        launcher.STARTED_BY: str(os.getpid()),
    }


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(children: Sequence[Child], stop: StopFlag) -> None:
    """Return when all have ended, or a while after one failed."""
    passed_on, failed_at = False, None
    while any(child.code() is None for child in children):
        if stop.signal_number is not None and not passed_on:
            passed_on = True
            for child in children:
                child.send(stop.signal_number)
        if failed_at is None and any(child.code() not in (None, 0) for child in children):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
            return
        time.sleep(POLL_SECONDS)


def _exit_code(code: int, record: Path, stop: StopFlag) -> int:
    """Return the exit code; a process that was killed (by the kernel, for memory) asks to be tried again.

    One that was stopped before it could say so has stopped. One that has said it is done is done, even where a library's
    threads abort it while it exits (gloo's do, at times).
    """
    if code >= 0:
        return code
    done = record.is_file() and not is_error(json.loads(record.read_bytes()))
    if stop.signal_number == -code and not done:
        return 128 - code
    return 0 if done else 75


def _failure(stage: str, codes: Sequence[int], records: Sequence[Path], stop: StopFlag) -> GrpoctlError:
    """Return the error of the process that tells what happened, as it said it."""
    failed = [rank for rank, code in enumerate(codes) if code]

    def telling(rank: int) -> tuple[int, bool, int]:
        place = WORST_FIRST.index(codes[rank]) if codes[rank] in WORST_FIRST else 0
        told = json.loads(records[rank].read_bytes()).get("kind") if records[rank].is_file() else None
        return place, told in (None, PeerFailed.__name__), rank  # among equals the one that isn't just another's victim

    worst = min(failed, key=telling)
    if not records[worst].is_file():
        if stop.signal_number is not None and codes[worst] == 128 + stop.signal_number:
            return Interrupted("stopped; rerun to continue", signal_number=stop.signal_number)
        message = f"{stage}: process {worst} of {len(codes)} ended without a message (see above); nothing was committed"
        return PeerFailed(message, exit_code=codes[worst])
    return error_of(json.loads(records[worst].read_bytes()))
