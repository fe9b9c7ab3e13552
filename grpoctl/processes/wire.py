"""A failure as JSON and back, with its kind and its exit code: what a process of ours says to the one that started it."""

from __future__ import annotations

from typing import Any

from grpoctl import errors
from grpoctl.errors import GrpoctlError


def error_record(error: GrpoctlError) -> dict[str, Any]:
    """Return an error as the record that `--json` prints."""
    return {"state": "error", "error": str(error), "kind": type(error).__name__, "exit_code": error.exit_code}


def is_error(record: dict[str, Any]) -> bool:
    """Return whether a record tells of a failure."""
    return record.get("state") == "error"


def error_of(record: dict[str, Any]) -> GrpoctlError:
    """Return the error that a record tells of: of its kind, with its message and its own exit code."""
    kind: type[GrpoctlError] = getattr(errors, record["kind"], GrpoctlError)
    error = kind.__new__(kind)
    Exception.__init__(error, record["error"])
    error.exit_code = int(record["exit_code"])
    return error
