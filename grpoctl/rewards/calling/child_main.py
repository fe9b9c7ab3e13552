"""The child process that runs user code: reads commands from one pipe, answers line by line on another.

It never touches the parent's stdout or stderr: both are a third pipe, captured by the parent. Results are JSON, so nothing
that user code returns is unpickled in the parent.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from grpoctl.errors import PluginFailed
from grpoctl.rewards.builtin.registry import builtin_function
from grpoctl.rewards.calling.call import BATCH_SIGNATURES, BoundReward, RewardCall
from grpoctl.rewards.calling.http_endpoint import HttpReward
from grpoctl.rewards.calling.outcome import text
from grpoctl.rewards.resolve.target import Target, TargetMissing, described_target, load_target
from grpoctl.rewards.sample import RewardOutcome


def main(command_fd: int, result_fd: int) -> None:
    """Serve commands until the parent closes the pipe."""
    faulthandler.enable()  # a segfault leaves its Python stack in the log
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    os.set_inheritable(command_fd, False)
    os.set_inheritable(result_fd, False)
    with os.fdopen(command_fd, "rb") as commands:
        _Rewards(result_fd).serve(commands)


class _Rewards:
    def __init__(self, result_fd: int) -> None:
        self._result_fd = result_fd
        self._pid = os.getpid()
        self._rewards: dict[str, BoundReward | HttpReward] = {}
        self._signatures: dict[str, str] = {}

    def serve(self, commands: BinaryIO) -> None:
        while header := commands.read(8):
            verb, *arguments = pickle.loads(commands.read(struct.unpack("!Q", header)[0]))
            try:
                if verb == "load":
                    self._load(*arguments)
                elif verb == "describe":
                    self._describe(*arguments)
                elif verb == "score":
                    self._score(*arguments)
                else:
                    return
            except PluginFailed as error:
                self._send({"kind": "refused", "message": str(error)})

    def _load(self, call: RewardCall) -> None:
        if call.kind == "http":
            self._rewards[call.name] = HttpReward(call.name, call.ref, call.timeout_seconds)
        elif call.kind == "builtin":
            self._rewards[call.name] = BoundReward(call, builtin_function(call.target.attribute, call.kwargs))
        else:
            try:
                with _ImportErrors(call.ref):
                    self._rewards[call.name] = BoundReward(call, load_target(call.target, call.kwargs))
            except TargetMissing as missing:
                raise PluginFailed(f"reward {call.ref}: it is gone; the module now has {missing.names}") from missing
        self._signatures[call.name] = call.signature
        self._send({"kind": "loaded"})

    def _describe(self, ref: str, target: Target, kwargs: Mapping[str, Any]) -> None:
        try:
            with _ImportErrors(ref):
                self._send({"kind": "described", **described_target(target, kwargs)})
        except TargetMissing as missing:
            self._send({"kind": "missing", "names": missing.names})

    def _score(self, name: str, pickled_samples: Sequence[bytes]) -> None:
        reward = self._rewards[name]
        self._send({"kind": "began"})
        if self._signatures[name] in BATCH_SIGNATURES:
            # unpickled one by one: no two samples share an object that the function could change
            outcome = reward.batch([pickle.loads(pickled) for pickled in pickled_samples])
            self._stay_single()
            if isinstance(outcome, RewardOutcome):
                self._send({"kind": "failed", **_fields(outcome)})
                return
            for row in outcome:
                self._send({"kind": "row", **_fields(row)})
        elif isinstance(reward, BoundReward):
            for pickled in pickled_samples:
                row = reward.row(pickle.loads(pickled))
                self._stay_single()
                self._send({"kind": "row", **_fields(row)})
        self._send({"kind": "done"})

    def _stay_single(self) -> None:
        """End a copy of this process that returned from a user's `os.fork()`."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _send(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self._result_fd, line) :]


class _ImportErrors:
    """Turn whatever importing user code raises into a PluginFailed that names it."""

    def __init__(self, ref: str) -> None:
        self._ref = ref

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, TargetMissing):
            return
        shown = traceback.format_exception_only(type(error), error)[-1].strip()
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        if isinstance(error, SyntaxError):
            where = f" ({error.filename}:{error.lineno})"
        raise PluginFailed(text(f"reward {self._ref}: importing it failed: {shown}{where}")) from error


def _fields(row: RewardOutcome) -> dict[str, Any]:
    return {
        "reward": row.reward,
        "status": row.status,
        "error": row.error,
        "seconds": row.seconds,
        "extras": row.extras,
    }
