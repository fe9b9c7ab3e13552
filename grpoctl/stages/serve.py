"""The other end of an interpreter that runs stages for a pipeline: jobs in, results out, a line each.

The very function behind the command runs. Standard output is moved to standard error first, so that nothing an engine
prints gets between the lines.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from grpoctl.errors import GrpoctlError
from grpoctl.processes.logs import set_up_logging
from grpoctl.processes.stop import STOP
from grpoctl.processes.wire import error_record
from grpoctl.stages.registry import stage_named

if TYPE_CHECKING:
    from grpoctl.stages.context import Context


def serve(lines: TextIO, answers: TextIO) -> None:
    """Answer every line."""
    from grpoctl.stages.context import Context

    context = Context(quiet=True, stop=STOP)
    for line in lines:
        answers.write(json.dumps(_answer(json.loads(line), context)) + "\n")
        answers.flush()


def _answer(request: dict[str, Any], context: Context) -> dict[str, Any]:
    from grpoctl.stages.stage import run

    stage = stage_named(request["stage"])
    try:
        return run(stage, stage.job.model_validate_json(json.dumps(request["job"])), context).record()
    except GrpoctlError as error:
        return error_record(error)


def main() -> None:
    """Serve jobs from standard input until it closes."""
    STOP.install(is_passed_on=True)  # before anything heavy is imported
    set_up_logging(verbose=False)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
