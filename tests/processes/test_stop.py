"""A signal counts whenever it comes: also while libraries are being imported, which swallow exceptions."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import done, ended, is_committed, rows, start

from grpoctl.errors import Interrupted
from grpoctl.processes.interpreter import Interpreter
from grpoctl.processes.local_ranks import run_ranks
from grpoctl.processes.stop import StopFlag

ROLLOUT = ("rollout", "--policy", "builtin:tiny", "--group-size", 2, "--limit", 2, "--max-new-tokens", 8)
SWALLOWING = """
import builtins, importlib, os, signal, sys
from grpoctl.processes.stop import STOP
real = builtins.__import__
def importing(name, *rest, **more):
    if name == {name!r} and not importing.sent:
        importing.sent = True
        try:
            os.kill(os.getpid(), {number})
        except BaseException:
            pass  # as a weak reference's callback or a module's own bare except does
    return real(name, *rest, **more)
importing.sent = False
builtins.__import__ = importing
from grpoctl.cli.main import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("name", ["pydantic", "pyarrow", "transformers", "torch"])
def test_a_signal_during_an_import_is_not_lost(empty: Path, name: str, number: int, code: int) -> None:
    words = [sys.executable, "-c", SWALLOWING.format(name=name, number=int(number)), *map(str, ROLLOUT)]
    result = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == code, result.stderr
    assert not is_committed("rollouts")


@pytest.mark.parametrize("name", ["pydantic", "pyarrow", "transformers"])
def test_a_kill_during_an_import_leaves_nothing_in_the_way(empty: Path, name: str) -> None:
    words = [sys.executable, "-c", SWALLOWING.format(name=name, number=int(signal.SIGKILL)), *map(str, ROLLOUT)]
    assert subprocess.run(words, capture_output=True, check=False).returncode == -signal.SIGKILL
    done(*ROLLOUT)
    assert len(rows("rollouts")) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_command_that_only_looks_ends_it(empty: Path, number: int) -> None:
    """Commands without shards or steps to wait for end at once."""
    os.mkfifo("slow.yaml")
    process = start("plan", "slow.yaml")
    with open("slow.yaml", "w"):  # opened: the command is reading it
        process.send_signal(number)
        assert ended(process).code in (-number, 128 + number)


TWICE = """
import builtins, os
real = builtins.__import__
def importing(name, *rest, **more):
    if name == "pydantic" and not importing.sent:
        importing.sent = True
        for _ in range(2):
            os.kill(os.getpid(), {number})
    return real(name, *rest, **more)
importing.sent = False
builtins.__import__ = importing
from grpoctl.cli.main import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_two_signals_during_an_import_end_with_a_message(empty: Path, number: int, code: int) -> None:
    words = [sys.executable, "-c", TWICE.format(number=int(number)), *map(str, ROLLOUT)]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: stopped") and "Traceback" not in result.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_command_without_a_standard_stream_keeps_its_exit_code(empty: Path, closed: str) -> None:
    command = f'"$0" -m grpoctl example-data --out data.parquet --rows 4 {closed} || exit 9; '
    command += f'"$0" -m grpoctl rollout --prompts nowhere.parquet --out r {closed}'
    assert subprocess.run(["sh", "-c", command, sys.executable], check=False).returncode == 3


def test_a_request_that_a_launcher_repeats_is_one_request() -> None:
    flag = StopFlag()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        flag.install(is_passed_on=True)
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with pytest.raises(Interrupted, match="stopped; "):
        flag.check()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_before_the_ranks_or_the_interpreter_start_is_a_stop(number: int) -> None:
    flag = StopFlag()
    flag.signal_number = number
    with pytest.raises(Interrupted):
        run_ranks("update", ["--dry-run"], 2, stop=flag)
    with pytest.raises(Interrupted):
        Interpreter(sys.executable, module="grpoctl.stages.serve").ask({}, what="update", stop=flag)
