"""Running grpoctl as a user does and reading what it says: in this process for speed, or as a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner

from grpoctl.cli.main import build

Tree = dict[str, str]
"""Path within a folder → sha256 of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        """The result of --json: stdout must hold one JSON line and nothing else."""
        lines = self.out.splitlines()
        assert len(lines) == 1, f"expected one line on stdout, found {lines}"
        return json.loads(lines[0])

    @property
    def error(self) -> str:
        """The message of a refusal, which is one line."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, f"expected one line starting with 'error: ', found: {self.err}"
        return lines[0]


def grpoctl(*arguments: object) -> Outcome:
    """Run a command in this process; an exception that isn't an expected failure comes through as it is."""
    words = [str(argument) for argument in arguments]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        result = CliRunner().invoke(build(words[0]), words)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(code=result.exit_code, out=result.stdout, err=result.stderr)


def done(*arguments: object) -> Outcome:
    """Run a command that must succeed."""
    outcome = grpoctl(*arguments)
    assert outcome.code == 0, outcome.err
    return outcome


def start(*arguments: object, environment: Mapping[str, str] | None = None, prefix: tuple[str, ...] = ()) -> Any:
    """Start a command as a process of its own."""
    words = [*prefix, sys.executable, "-m", "grpoctl", *map(str, arguments)]
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )


def ended(process: Any) -> Outcome:
    """Wait for a started command."""
    out, err = process.communicate(timeout=300)
    return Outcome(code=process.returncode, out=out, err=err)


def assert_refused(outcome: Outcome, code: int, **parts: str) -> None:
    """Check the exit code and that the one-line message holds every part (where, found, expected, todo) as a pattern."""
    assert outcome.code == code, f"exit {outcome.code}, expected {code}: {outcome.err or outcome.out}"
    for part, pattern in parts.items():
        assert re.search(pattern, outcome.error), f"{part} ({pattern!r}) isn't in: {outcome.error}"


def tree(folder: Path | str) -> Tree:
    """Return every file below a folder by its digest, to prove that a refusal changed nothing."""
    root = Path(folder)
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def manifest(artifact: Path | str) -> dict[str, Any]:
    """Return a committed artifact's manifest."""
    return json.loads((Path(artifact) / "_MANIFEST.json").read_text())


def is_committed(artifact: Path | str) -> bool:
    """Return whether an artifact exists, which is when its manifest does."""
    return (Path(artifact) / "_MANIFEST.json").exists()


def part(artifact: Path | str, index: int = 0) -> Path:
    """Return a shard's part file, by the manifest."""
    return Path(artifact) / manifest(artifact)["shards"][index]["part"]


def rows(artifact: Path | str) -> list[dict[str, Any]]:
    """Return all rows of an artifact, by the manifest."""
    count = len(manifest(artifact)["shards"])
    return [row for index in range(count) for row in pq.read_table(part(artifact, index)).to_pylist()]


def write_prompts(path: Path | str, columns: Mapping[str, Any]) -> Path:
    """Write a user's prompt file."""
    pq.write_table(pa.table(dict(columns)), path)
    return Path(path)
