"""A stage in an interpreter of its own, kept alive between iterations: engines pin torch differently.

The parent writes one JSON line a job, `{"stage": …, "job": …}`, and reads one back. The child runs the very function behind
the command; its stdout is moved to stderr first, so that nothing an engine prints gets between the lines.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, TextIO

from grpoctl import errors
from grpoctl.artifacts.artifact import read_manifest
from grpoctl.errors import GrpoctlError, Interrupted, TryAgain, UsageError
from grpoctl.settings.fields import Section
from grpoctl.settings.jobs import JOBS
from grpoctl.stages.stage import Context, StageResult

POLL_SECONDS: Final = 0.2
KINDS: Final = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, GrpoctlError) and kind is not Interrupted
}


class StageWorker:
    """The parent's end: one child, started at the first job."""

    def __init__(self, python: str) -> None:
        self.python = python
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, stage: str, job: Section, context: Context) -> StageResult:
        """Run one stage in the child.

        Raises:
            GrpoctlError: of the kind and with the message that the stage raised there.
            TryAgain: the child died.
        """
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        line = json.dumps({"stage": stage, "job": job.model_dump(mode="json")}) + "\n"
        try:
            process.stdin.write(line.encode())
            process.stdin.flush()
        except BrokenPipeError:
            answer = b""
        else:
            answer = self._answer(process, context)
        if not answer:
            code = process.wait()
            self._process = None
            raise TryAgain(f"{stage}: {self.python} ended with status {code}; finished shards are kept: rerun")
        return _result(stage, json.loads(answer))

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            if not Path(self.python).is_file():
                raise UsageError(
                    f"runtime.python: {self.python} is not there; expected the interpreter of an environment"
                )
            command = [self.python, "-m", "grpoctl.processes.interpreter"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], context: Context) -> bytes:
        """Wait for the child's line, passing on a request to stop."""
        assert process.stdout is not None
        passed_on = False
        while True:
            ready, _, _ = select.select([process.stdout], [], [], POLL_SECONDS)
            if ready:
                return process.stdout.readline()
            if context.stop.signal_number is not None and not passed_on:
                process.send_signal(context.stop.signal_number)
                passed_on = True

    def close(self) -> None:
        """End the child."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process = None


def _result(stage: str, answer: dict[str, Any]) -> StageResult:
    if "error" in answer:
        if answer["kind"] == "Interrupted":
            raise Interrupted(answer["error"], signal_number=answer["exit_code"] - 128)
        raise KINDS.get(answer["kind"], GrpoctlError)(answer["error"])
    artifact = read_manifest(answer["out"]) if stage != "sync" else None
    return StageResult(stage=stage, out=answer["out"], state=answer["state"], artifact=artifact, facts=answer["facts"])


def _serve(lines: TextIO, answers: TextIO) -> None:
    from grpoctl.cli.commands import set_up_logging
    from grpoctl.pipeline.run import STAGES

    set_up_logging(verbose=False)
    context = Context(quiet=True)
    context.stop.install()
    for line in lines:
        request = json.loads(line)
        try:
            job = JOBS[request["stage"]].model_validate_json(json.dumps(request["job"]))
            result = STAGES[request["stage"]](job, context)
            answer = {"out": result.out, "state": result.state, "facts": result.facts}
        except GrpoctlError as error:
            answer = {"error": str(error), "kind": type(error).__name__, "exit_code": error.exit_code}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serve jobs from stdin until it closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
