"""Another interpreter that is asked for results line by line and kept between questions: engines pin torch differently.

We write one JSON line and read one back. The program at the other end is a module of ours in that environment; a failure
comes back as the error that it was, with its exit code.
"""

from __future__ import annotations

import json
import select
import subprocess
from pathlib import Path
from typing import Any, Final

from grpoctl.errors import Interrupted, TryAgain, UsageError
from grpoctl.processes.child import Child
from grpoctl.processes.stop import StopFlag
from grpoctl.processes.wire import error_of, is_error

POLL_SECONDS: Final = 0.2
CLOSE_SECONDS: Final = 10.0


class Interpreter:
    """One child in another environment, started at the first question."""

    def __init__(self, python: str, *, module: str) -> None:
        self.python = python
        self._module = module
        self._child: Child | None = None

    def ask(self, request: dict[str, Any], *, what: str, stop: StopFlag) -> dict[str, Any]:
        """Return the answer to a request.

        Args:
            request: goes over as JSON
            what: is asked for, in messages
            stop: a signal to us is passed on

        Raises:
            GrpoctlError: as it was raised there.
            Interrupted: we were asked to stop before it could be, or it ended of that.
            TryAgain: the child died.
        """
        stop.check()
        child = self._start()
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            line = b""
        else:
            line = self._line(child, stop)
        if not line:
            child.wait(CLOSE_SECONDS)  # its output has ended, and so will it
            code = child.kill()
            self._child = None
            if stop.signal_number is not None:
                message = "stopped; finished shards are kept, rerun to continue"
                raise Interrupted(message, signal_number=stop.signal_number)
            raise TryAgain(f"{what}: {self.python} ended with status {code}; finished shards are kept: rerun")
        answer = json.loads(line)
        if is_error(answer):
            raise error_of(answer)
        return answer

    def _start(self) -> Child:
        if self._child is None:
            if not Path(self.python).is_file():
                raise UsageError(
                    f"runtime.python: {self.python} is not there; expected the interpreter of an environment"
                )
            command = [self.python, "-m", self._module]
            self._child = Child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._child

    def _line(self, child: Child, stop: StopFlag) -> bytes:
        """Wait for the child's line, passing on a request to stop."""
        passed_on = False
        while True:
            ready, _, _ = select.select([child.stdout], [], [], POLL_SECONDS)
            if ready:
                return child.stdout.readline()
            if stop.signal_number is not None and not passed_on:
                child.send(stop.signal_number)
                passed_on = True

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.stdin.close()
            self._child.wait(CLOSE_SECONDS)
            self._child.kill()
            self._child = None
