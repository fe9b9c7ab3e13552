"""A run whose stages have interpreters of their own: nothing of it lives on when the run is killed or told to stop."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import done, ended, is_committed, manifest, start
from pipeline_file import edited
from processes_of import below, is_running, wait_until

SHARDS = Path("run/iter-000000/rollouts/_shards")


@pytest.fixture
def pipeline(small_pipeline: Path) -> Path:
    """Forty shards sampled by an interpreter of its own."""
    edited(small_pipeline, "prompts_per_iteration: 4,", "prompts_per_iteration: 40, prompts_per_shard: 1,")
    edited(
        small_pipeline,
        "runtime: {num_threads: 1}",
        f"runtime: {{num_threads: 1, python: {{rollout: {sys.executable}}}}}",
    )
    return small_pipeline


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stage_s_interpreter_ends_with_its_run(pipeline: Path, number: int) -> None:
    process = start("run", pipeline, "--iterations", 1)
    wait_until(lambda: (SHARDS / "00000.json").exists() or process.poll() is not None, "the first shard")
    assert process.poll() is None, ended(process)
    started = below(process.pid)
    assert len(started) >= 2  # the guardian and the interpreter
    process.send_signal(number)
    outcome = ended(process)
    assert outcome.code == (-number if number == signal.SIGKILL else 128 + number), outcome.err
    wait_until(lambda: not any(is_running(pid) for pid in started), "the end of the interpreter")
    kept = sorted(SHARDS.iterdir())
    assert 1 <= len(kept) < 40
    assert not is_committed("run/iter-000000/rollouts")
    assert sorted(SHARDS.iterdir()) == kept
    done("run", pipeline, "--iterations", 1)
    assert manifest("run/iter-000000/rollouts")["rows"]["ok"] == 160


def test_local_ranks_end_with_their_stage(work: Path) -> None:
    words = ("update", "--logprobs", "logprobs", "--lr", "1e-4", "--out", "new", "--set", "runtime.num_processes=2")
    process = start(*words, environment={"GLOO_SOCKET_IFNAME": "lo"})
    ranks: list[int] = []

    def both_run() -> bool:
        ranks[:] = [pid for pid in below(process.pid) if b"--result-file" in _command(pid)]
        return len(ranks) >= 4 or process.poll() is not None  # each with its guardian

    wait_until(both_run, "two ranks")
    if process.poll() is None:
        process.kill()
    ended(process)
    wait_until(lambda: not any(is_running(pid) for pid in ranks), "the end of the ranks")


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_an_error_of_a_stage_s_interpreter_is_the_run_s(pipeline: Path, tmp_path: Path) -> None:
    """A peer's exit 1 (a bug there) stays 1; it isn't 75, which asks to be tried again."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'grpoctl.stages.serve' in ' '.join(sys.orig_argv):\n"
        "    import grpoctl.stages.rollout as rollout\n"
        "    from dataclasses import replace\n"
        "    from grpoctl.errors import PeerFailed\n"
        "    def fail(*_): raise PeerFailed('process 1 of 2 ended without a message', exit_code=1)\n"
        "    rollout.STAGE = replace(rollout.STAGE, compute=fail)\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "grpoctl", "run", str(pipeline)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert "process 1 of 2 ended without a message" in result.stderr
