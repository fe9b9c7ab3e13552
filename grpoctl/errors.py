"""The errors a user can cause or meet, each with the exit code that schedulers act on.

A message is one line: where, what was found, what was expected, what to do next. Every other exception is a bug in
grpoctl and keeps its traceback (exit code 1).
"""

from __future__ import annotations


class GrpoctlError(Exception):
    """Base of all expected failures; `exit_code` is the process's exit code."""

    exit_code = 1


class UsageError(GrpoctlError):
    """A flag, a config file or a missing extra is wrong; nothing was run."""

    exit_code = 2


class InputRefused(GrpoctlError):
    """An input artifact, model or data file is not what the stage needs."""

    exit_code = 3


class GateFailed(GrpoctlError):
    """A check on the numbers failed; continuing would train on the wrong thing."""

    exit_code = 4


class Conflict(GrpoctlError):
    """The output exists already and was made from something else."""

    exit_code = 5


class PluginFailed(GrpoctlError):
    """A user's reward function or plugin failed beyond its error budget."""

    exit_code = 6


class TryAgain(GrpoctlError):
    """A passing fault (memory, disk, network, engine): finished shards are kept, a rerun continues."""

    exit_code = 75


class Interrupted(GrpoctlError):
    """A signal asked to stop; finished shards are kept, a rerun continues (130 for SIGINT, 143 for SIGTERM)."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class PeerFailed(GrpoctlError):
    """Another process of the same stage failed; carries that one's exit code."""

    def __init__(self, message: str, *, exit_code: int = 75) -> None:
        super().__init__(message)
        self.exit_code = exit_code
