"""A failure crosses a pipe and is what it was: kind, message and exit code."""

import json
import signal
import sys
from pathlib import Path

import pytest

from grpoctl import errors
from grpoctl.errors import GrpoctlError, Interrupted, PeerFailed, TryAgain
from grpoctl.processes.interpreter import Interpreter
from grpoctl.processes.stop import StopFlag
from grpoctl.processes.wire import error_of, error_record, is_error

PLAIN = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, GrpoctlError) and kind not in (Interrupted, PeerFailed)
]
EVERY = [
    *(kind("where: what; do this") for kind in PLAIN),
    Interrupted("stopped", signal_number=signal.SIGINT),
    Interrupted("stopped", signal_number=signal.SIGTERM),
    *(PeerFailed("process 1 of 2 ended", exit_code=code) for code in (1, 3, 75, 139)),
]


@pytest.mark.parametrize("error", EVERY, ids=lambda error: f"{type(error).__name__}-{error.exit_code}")
def test_an_error_comes_back_as_it_was(error: GrpoctlError) -> None:
    record = json.loads(json.dumps(error_record(error)))
    assert is_error(record)
    back = error_of(record)
    assert (type(back), str(back), back.exit_code) == (type(error), str(error), error.exit_code)


def test_a_kind_of_another_version_keeps_message_and_exit_code() -> None:
    back = error_of({"state": "error", "error": "new", "kind": "OfTomorrow", "exit_code": 9})
    assert (type(back), str(back), back.exit_code) == (GrpoctlError, "new", 9)


def test_a_result_is_no_error() -> None:
    assert not is_error({"stage": "score", "state": "done", "facts": {"error": "a fact of this name"}})


@pytest.mark.parametrize("code", [1, 5, 75])
def test_an_error_of_the_stage_interpreter_keeps_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "answering.py").write_text(
        "import json, sys\nfor line in sys.stdin:\n"
        f"    record = {{'state': 'error', 'error': 'a peer ended', 'kind': 'PeerFailed', 'exit_code': {code}}}\n"
        "    print(json.dumps(record), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    interpreter = Interpreter(sys.executable, module="answering")
    try:
        with pytest.raises(PeerFailed, match="a peer ended") as raised:
            interpreter.ask({}, what="update", stop=StopFlag())
        assert raised.value.exit_code == code
    finally:
        interpreter.close()


def test_an_interpreter_that_dies_is_tried_again_and_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying.py").write_text(
        "import json, pathlib, sys\nplace = pathlib.Path(sys.argv[0]).with_suffix('.died')\n"
        "line = sys.stdin.readline()\n"
        "if not place.exists():\n    place.touch()\n    sys.exit(9)\n"
        "print(json.dumps({'state': 'done'}), flush=True)\nsys.stdin.read()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    interpreter = Interpreter(sys.executable, module="dying")
    try:
        with pytest.raises(TryAgain, match=r"update: .* ended with status 9; finished shards are kept"):
            interpreter.ask({}, what="update", stop=StopFlag())
        assert interpreter.ask({}, what="update", stop=StopFlag()) == {"state": "done"}
    finally:
        interpreter.close()
