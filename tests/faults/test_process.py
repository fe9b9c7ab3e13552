"""A run that is killed or asked to stop at any moment continues to the same files."""

import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome, done, ended, is_committed, manifest, start
from processes_of import is_running, wait_until

QUICKSTART = Path(__file__).parents[2] / "pipelines/quickstart.yaml"
MANY_SHARDS = ("rollout", "--policy", "builtin:tiny", "--group-size", 2, "--limit", 40, "--max-new-tokens", 28)
MANY_SHARDS = (*MANY_SHARDS, "--seed", 3, "--set", "rollout.prompts_per_shard=1")


def run_pipeline(run_dir: Path) -> tuple[object, ...]:
    return ("run", QUICKSTART, "--iterations", 3, "--run-dir", run_dir, "--set", "prompts.path=builtin:addition")


def digests(run_dir: Path) -> dict[str, str]:
    """Return every manifest's content digest and every published policy's weights digest."""
    found = {
        str(place.parent.relative_to(run_dir)): manifest(place.parent)["content_digest"]
        for place in run_dir.glob("iter-*/*/_MANIFEST.json")
    }
    for place in run_dir.glob("policies/v*/grpoctl_policy.json"):
        from grpoctl.inputs.policies import open_policy

        found[str(place.parent.relative_to(run_dir))] = open_policy(str(place.parent)).weights_digest
    return found


def wait_for(path: Path, process: Any) -> None:
    wait_until(lambda: path.exists() or process.poll() is not None, str(path))
    assert path.exists(), process.communicate()


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of a run that nobody disturbed."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    done(*run_pipeline(run_dir))
    return digests(run_dir)


def progress(run_dir: Path) -> int:
    return len(list(run_dir.rglob("*.json")))


@pytest.mark.slow
def test_runs_killed_at_ten_random_moments_end_as_the_uninterrupted_one(
    empty: Path, uninterrupted: dict[str, str]
) -> None:
    """Each kill comes a random moment after a file was written; a run that gets through is followed by one more."""
    assert len(uninterrupted) == 3 * 4 + 3
    moments = random.Random(57)
    kills = 0
    for number in range(10):
        run_dir = empty / f"run{number}"
        code = None
        while code is None:
            before = progress(run_dir)
            process = start(*run_pipeline(run_dir))
            while process.poll() is None and progress(run_dir) == before:
                time.sleep(0.01)
            try:
                code = process.wait(timeout=moments.uniform(0.0, 0.6) if kills < 10 else None)
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
            _, err = process.communicate()
        assert code == 0, err
        assert digests(run_dir) == uninterrupted
        if kills == 10:
            break
    assert kills == 10


def interrupted(number: int, *command: object, out: str = "rollouts") -> tuple[Any, Outcome]:
    process = start(*command)
    wait_for(Path(out) / "_shards/00000.json", process)
    process.send_signal(number)
    return process, ended(process)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_stage_keeps_its_shards_and_continues(empty: Path, number: int, code: int) -> None:
    _, outcome = interrupted(number, *MANY_SHARDS)
    assert outcome.code == code, outcome.err
    assert "finished shards are kept, rerun to continue" in outcome.error
    assert not is_committed("rollouts")
    kept = sorted(Path("rollouts/_shards").iterdir())
    assert 1 <= len(kept) < 40
    times = {place: place.stat().st_mtime_ns for place in kept}
    done(*MANY_SHARDS)
    assert {place: place.stat().st_mtime_ns for place in kept} == times
    done(*MANY_SHARDS, "--out", "whole")
    assert manifest("rollouts")["content_digest"] == manifest("whole")["content_digest"]


def test_a_stopped_stage_says_so_in_json(empty: Path) -> None:
    _, outcome = interrupted(signal.SIGTERM, *MANY_SHARDS, "--json")
    assert outcome.code == 143
    assert outcome.record["exit_code"] == 143


SLEEPY = """
import os, pathlib, time
def sleepy(completion):
    pathlib.Path({started!r}).write_text(str(os.getpid()))
    time.sleep(5)
    return float(len(completion))
"""


def test_a_second_signal_stops_at_once(work: Path) -> None:
    """The reward takes 80 s for the only shard; the first signal lets it go on, the second doesn't."""
    started = work / "started"
    Path("reward.py").write_text(SLEEPY.format(started=str(started)))
    process = start("score", "--reward", "reward.py:sleepy", "--out", "new")
    wait_for(started, process)
    process.send_signal(signal.SIGTERM)
    assert "stopping after the current shard" in process.stderr.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    outcome = ended(process)
    assert outcome.code == 143, outcome.err
    assert "stopped at once" in outcome.err
    assert not is_committed("new")
    assert not is_running(int(started.read_text()))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_continues_to_the_same_files(
    empty: Path, uninterrupted: dict[str, str], number: int, code: int
) -> None:
    run_dir = empty / "run"
    process = start(*run_pipeline(run_dir))
    wait_for(run_dir / "iter-000000/rollouts/_MANIFEST.json", process)
    process.send_signal(number)
    outcome = ended(process)
    assert outcome.code == code, outcome.err
    done(*run_pipeline(run_dir))
    assert digests(run_dir) == uninterrupted
