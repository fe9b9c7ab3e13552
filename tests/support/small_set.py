"""The fixtures of the fault tests: one small iteration made by the five commands, to be copied and then damaged."""

import shutil
from pathlib import Path

import pytest
from command_line import done

SAMPLING = ("--group-size", 4, "--limit", 4, "--max-new-tokens", 28, "--seed", 3)
"""Four prompts, four samples each: small, and one group has differing rewards."""


@pytest.fixture(scope="session")
def small_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one small iteration made by the five commands; tests copy it and never write there."""
    folder = tmp_path_factory.mktemp("small_set")
    done("rollout", "--policy", "builtin:tiny", *SAMPLING, "--out", folder / "rollouts")
    given = ("--rollouts", folder / "rollouts")
    done("score", *given, "--reward", "accuracy", "--out", folder / "scores")
    done("logprob", *given, "--policy", "builtin:tiny", "--reference", "builtin:tiny", "--out", folder / "logprobs")
    given = (*given, "--scores", folder / "scores", "--logprobs", folder / "logprobs")
    done("update", *given, "--policy", "builtin:tiny", "--lr", "1e-4", "--out", folder / "update")
    done("sync", "--update", folder / "update", "--to", folder / "policies")
    return folder


@pytest.fixture
def work(small_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory: a copy of the small set, where a test may damage what it likes."""
    folder = tmp_path / "work"
    shutil.copytree(small_set, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
