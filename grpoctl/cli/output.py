"""What a command says: a few lines or one JSON line on stdout, an error on stderr with its exit code."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

import typer

from grpoctl.errors import GrpoctlError, PeerFailed
from grpoctl.extras import missing_extras
from grpoctl.processes import fatal, launcher
from grpoctl.processes.logs import set_up_logging
from grpoctl.processes.wire import error_record

WORDS = {"done": "done", "already_done": "already done", "partial": "shards are missing", "planned": "would run"}
"""A stage's state as a person reads it."""


def guarded(body: Callable[[dict[str, Any]], None], values: dict[str, Any]) -> None:
    """Run a command's body; an expected failure becomes a message on stderr, its exit code, and the JSON line."""
    set_up_logging(verbose=values.get("verbose", False))
    fatal.register(functools.partial(_tell, values=values, stream=sys.stdout))  # stages have it redirected
    try:
        with missing_extras():
            body(values)
    except GrpoctlError as error:
        _tell(error, values)
        raise typer.Exit(error.exit_code) from error


def _tell(error: GrpoctlError, values: dict[str, Any], stream: TextIO | None = None) -> None:
    told_elsewhere = launcher.has_speaker() or (isinstance(error, PeerFailed) and launcher.rank() > 0)
    if not told_elsewhere:
        print(f"error: {error}", file=sys.stderr, flush=True)
    emit(error_record(error), values, stream)


def emit(record: dict[str, Any], values: dict[str, Any], stream: TextIO | None = None) -> None:
    """Print the record as one JSON line where --json asks for it, and write it where --result-file does."""
    line = json.dumps(record)
    if launcher.rank() and not launcher.has_speaker():
        return  # started by torchrun: the first process speaks
    if values.get("json"):
        print(line, file=stream, flush=True)
    if values.get("result_file"):
        Path(values["result_file"]).write_text(line + "\n")


def stage_lines(record: dict[str, Any]) -> Iterator[str]:
    """Yield a stage's result as a person reads it."""
    yield f"{record['stage']}: {WORDS[record['state']]} → {record['out']}"
    if "rows" in record:
        rows = record["rows"]
        counts = ", ".join(f"{rows[name]} {name}" for name in ("ok", "skipped", "failed") if rows[name])
        yield f"  rows: {counts or 0}"
    for name, value in record["facts"].items():
        if isinstance(value, dict):
            yield f"  {name}: " + ", ".join(
                f"{key} {_short(item)}" for key, item in cast("dict[str, Any]", value).items()
            )
        elif value is not None:
            yield f"  {name}: {_short(value)}"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
