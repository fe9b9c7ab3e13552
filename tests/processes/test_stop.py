"""A signal counts whenever it comes: also while libraries are being imported, which swallow exceptions."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import done, ended, is_committed, rows, start

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
