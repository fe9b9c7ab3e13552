"""Run a stage on several processes of this machine: start them, pass signals on, and speak for them.

Each is the stage's own command with the variables that torchrun would set, so there is one path for all launchers.
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

from grpoctl import errors
from grpoctl.artifacts.artifact import Work, committed
from grpoctl.errors import GrpoctlError, Interrupted, PeerFailed, UsageError
from grpoctl.processes import launcher as launched
from grpoctl.processes.ranks import Ranks
from grpoctl.settings.fields import Section
from grpoctl.settings.runtime import RuntimeConfig
from grpoctl.stages.stage import Context, StageResult, StopFlag

POLL_SECONDS: Final = 0.05
GRACE_SECONDS: Final = 15.0
"""How long the others may take to notice that a process failed."""
KEPT_VARIABLES: Final = ("GRPOCTL_CACHE",)
WORST_FIRST: Final = (1, 2, 3, 4, 5, 6, 130, 143, 75)
"""Which of several exit codes tells what happened: 75 is also what the others get when one dies."""


def needs_processes(num_processes: int, *, engine: str) -> bool:
    """Return whether a stage has to start processes: several are asked for, or its engine needs a group of its own."""
    return not launched.is_launched() and (num_processes > 1 or engine in ("deepspeed", "megatron"))


def data_ranks(engine: str, runtime: RuntimeConfig, ranks: Ranks) -> Ranks:
    """Return the processes among which rows are dealt: those that share a tensor-parallel copy of the model are one.

    Raises:
        UsageError: the processes can't be divided into such blocks.
    """
    size = runtime.megatron.tensor_parallel_size if engine == "megatron" else 1
    if ranks.world_size % size:
        raise UsageError(
            f"runtime.megatron.tensor_parallel_size: {size} doesn't divide the {ranks.world_size} processes "
            "(runtime.num_processes, or those that the launcher started)"
        )
    return ranks.in_blocks(size)


def run_in_processes(stage: str, job: Any, context: Context, work: Work) -> StageResult:
    """Run a stage in `runtime.num_processes` processes and return the first one's result.

    Raises:
        GrpoctlError: a process failed; of the kind and with the message and exit code of the one that tells most.
    """
    count: int = job.runtime.num_processes
    with tempfile.TemporaryDirectory(prefix="grpoctl-") as folder:
        records = [Path(folder) / f"{rank}.json" for rank in range(count)]
        port = _free_port()
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank, record in enumerate(records):
                command = [*_command(stage, job, context), "--json", "--result-file", str(record)]
                variables = _environment(rank, count, port)
                children.append(
                    subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, start_new_session=True)
                )
            _wait(children, context.stop)
        finally:
            for child in children:
                child.kill()
                child.wait()
        codes = [_exit_code(child, record) for child, record in zip(children, records, strict=True)]
        if any(codes):
            raise _failure(stage, codes, records)
        answer = json.loads(records[0].read_bytes())
    return StageResult(
        stage=stage, out=answer["out"], state=answer["state"], artifact=committed(job.out, work), facts=answer["facts"]
    )


def _command(stage: str, job: Section, context: Context) -> list[str]:
    """Return the command line that says the whole job, so that neither files nor variables are read again."""
    command = [sys.executable, "-m", "grpoctl", stage]
    for name, value in job.model_dump(mode="json").items():
        command += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    if context.shards is not None:
        command += ["--shards", f"{context.shards.first}-{context.shards.last}/{context.shards.total}"]
    return command


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
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
        launched.STARTED_BY: str(os.getpid()),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(children: Sequence[subprocess.Popen[bytes]], stop: StopFlag) -> None:
    """Return when all have ended, or a while after one failed."""
    passed_on, failed_at = False, None
    while any(child.poll() is None for child in children):
        if stop.signal_number is not None and not passed_on:
            passed_on = True
            for child in children:
                child.send_signal(stop.signal_number)
        if failed_at is None and any(child.returncode not in (None, 0) for child in children):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
            return
        time.sleep(POLL_SECONDS)


def _exit_code(child: subprocess.Popen[bytes], record: Path) -> int:
    """Return the exit code; a process that was killed (by the kernel, for memory) asks to be tried again.

    One that has said it is done is done, even where a library's threads abort it while it exits (gloo's do, at times).
    """
    if child.returncode >= 0:
        return child.returncode
    done = record.is_file() and "error" not in json.loads(record.read_bytes())
    return 0 if done else 75


def _failure(stage: str, codes: Sequence[int], records: Sequence[Path]) -> GrpoctlError:
    """Return the error of the process that tells what happened, of its kind and with its message."""
    failed = [rank for rank, code in enumerate(codes) if code]

    def telling(rank: int) -> tuple[int, bool, int]:
        place = WORST_FIRST.index(codes[rank]) if codes[rank] in WORST_FIRST else 0
        told = json.loads(records[rank].read_bytes()).get("kind") if records[rank].is_file() else None
        return place, told in (None, PeerFailed.__name__), rank  # among equals the one that isn't just another's victim

    worst = min(failed, key=telling)
    if not records[worst].is_file():
        message = f"{stage}: process {worst} of {len(codes)} ended without a message (see above); nothing was committed"
        return PeerFailed(message, exit_code=codes[worst])
    record = json.loads(records[worst].read_bytes())
    if record["kind"] == "Interrupted":
        return Interrupted(record["error"], signal_number=codes[worst] - 128)
    kind = getattr(errors, record["kind"])
    return PeerFailed(record["error"], exit_code=codes[worst]) if kind is PeerFailed else kind(record["error"])
