"""Every process that we start ends with us, with all that it started, and says how it ended."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes_of import is_running, wait_until

from grpoctl.processes.child import Child, how_it_ended
from grpoctl.processes.guardian import TOO_MANY_PROCESSES

FAMILY = """
import os, pathlib, sys, time
place = pathlib.Path(sys.argv[1])
if os.fork() == 0:
    os.setsid()  # a session of its own, as a daemon has
    if os.fork() == 0:
        (place / "grandchild").write_text(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
(place / "child").write_text(str(os.getpid()))
{rest}
"""


def family(folder: Path, rest: str = "time.sleep(600)") -> Child:
    return Child([sys.executable, "-c", FAMILY.format(rest=rest), str(folder)])


def pids(folder: Path) -> list[int]:
    files = [folder / "child", folder / "grandchild"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), "the family's start")
    return [int(file.read_text()) for file in files]


def test_a_kill_takes_the_whole_tree(tmp_path: Path) -> None:
    child = family(tmp_path)
    started = pids(tmp_path)
    assert child.code() is None
    assert child.kill() == -signal.SIGKILL
    assert not any(is_running(pid) for pid in started)


def test_what_a_process_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    rest = "\nwhile not (place / 'grandchild').exists(): time.sleep(0.01)\nsys.exit(7)"
    child = family(tmp_path, rest)
    assert child.wait(120) == 7
    _, grandchild = pids(tmp_path)
    assert not is_running(grandchild)
    assert child.kill() == 7


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(1)", "sys.exit(0)"])
def test_a_child_follows_a_starter_that_ends_in_any_way(tmp_path: Path, ending: str) -> None:
    script = f"""
import os, pathlib, signal, sys, time
sys.path[:0] = {[str(Path(__file__).parents[1] / "support")]!r}
from grpoctl.processes.child import Child
Child([sys.executable, "-c", {FAMILY.format(rest="time.sleep(600)")!r}, {str(tmp_path)!r}])
while not all((pathlib.Path({str(tmp_path)!r}) / name).exists() for name in ("child", "grandchild")):
    time.sleep(0.01)
{ending}
"""
    subprocess.run([sys.executable, "-c", script], check=False, timeout=300)
    started = pids(tmp_path)
    wait_until(lambda: not any(is_running(pid) for pid in started), "the end of the family")


def test_a_child_follows_a_guardian_that_is_killed(tmp_path: Path) -> None:
    child = family(tmp_path)
    started = pids(tmp_path)
    child._process.kill()
    wait_until(lambda: not is_running(started[0]), "the end of the child")
    assert child.kill() == -signal.SIGKILL
    os.kill(started[1], signal.SIGKILL)  # nobody is left who would


def test_a_signal_is_passed_on_and_its_end_told(tmp_path: Path) -> None:
    plain = Child([sys.executable, "-c", "import time; time.sleep(600)"])
    plain.send(signal.SIGTERM)
    assert plain.wait(120) == -signal.SIGTERM
    handled = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
    handled += "print(flush=True)\ntime.sleep(600)"
    child = Child([sys.executable, "-c", handled], stdout=subprocess.PIPE)
    child.stdout.readline()
    child.send(signal.SIGTERM)
    assert child.wait(120) == 3
    assert child.kill() == 3


def test_a_signal_to_the_group_reaches_what_the_child_started(tmp_path: Path) -> None:
    both = (
        "import signal, subprocess, sys\nsignal.signal(signal.SIGTERM, lambda *_: None)\n"
        "sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1], sys.argv[2]]))"
    )
    inner = (
        "import pathlib, signal, sys, time\nplace = pathlib.Path(sys.argv[1])\n"
        "def heard(*_): place.with_suffix('.heard').touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, heard)\nplace.touch()\ntime.sleep(600)"
    )
    child = Child([sys.executable, "-c", both, inner, str(tmp_path / "ready")])
    wait_until((tmp_path / "ready").exists, "the start of what the child started")
    child.send(signal.SIGTERM, group=True)
    wait_until((tmp_path / "ready.heard").exists, "the signal")
    child.kill()


def test_too_many_processes_end_the_child(tmp_path: Path) -> None:
    many = "import subprocess, sys, time\nfor _ in range(6): subprocess.Popen(['sleep', '600'])\ntime.sleep(600)"
    child = Child([sys.executable, "-c", many], max_processes=4)
    assert child.wait(120) == TOO_MANY_PROCESSES
    assert how_it_ended(TOO_MANY_PROCESSES) == "it started too many processes and was killed"
    child.kill()


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    child = Child(["/nowhere/program"], stderr=subprocess.PIPE)
    assert child.wait(120) == 127
    assert child._process.stderr is not None
    assert b"/nowhere/program can't be started: No such file or directory" in child._process.stderr.read()
    child.kill()


def test_the_ends_of_a_child_s_pipes_are_seen_at_once() -> None:
    """The guardian holds none of them: a child that closes its output is read to the end while it lives."""
    child = Child(
        [sys.executable, "-c", "import os, time; os.write(1, b'all'); os.close(1); time.sleep(600)"],
        stdout=subprocess.PIPE,
    )
    assert child.stdout.read() == b"all"
    assert child.code() is None
    child.kill()


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_starter_without_a_standard_stream_keeps_its_children(closed: int) -> None:
    script = (
        "import sys\nfrom grpoctl.processes.child import Child\n"
        "child = Child([sys.executable, '-c', 'raise SystemExit(5)'])\ncode = child.wait(120)\nchild.kill()\nsys.exit(code)"
    )
    words = ["sh", "-c", f'exec "$0" -c "$1" {closed}<&-', sys.executable, script]
    assert subprocess.run(words, check=False).returncode == 5


def test_a_copy_of_the_lifeline_holds_nothing_up(tmp_path: Path) -> None:
    child = family(tmp_path)
    started = pids(tmp_path)
    copy = os.dup(child._lifeline)  # as any fork of ours without exec has
    assert child.kill() == -signal.SIGKILL
    assert not any(is_running(pid) for pid in started)
    os.close(copy)


def test_a_command_meets_its_signals_as_a_new_program_does() -> None:
    words = [shutil.which("grep") or "grep", "-E", "Sig(Ign|Blk|Cgt)", "/proc/self/status"]
    plain = subprocess.run(words, check=True, capture_output=True).stdout
    child = Child(words, stdout=subprocess.PIPE)
    assert child.stdout.read() == plain
    child.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_right_after_the_start_counts(number: int) -> None:
    for _ in range(5):
        child = Child(["sleep", "600"])
        child.send(number)
        assert child.wait(120) == -number
        child.kill()
