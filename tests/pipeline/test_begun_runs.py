"""A run that an earlier grpoctl began goes on: the same fingerprints, its artifacts read, its lock accepted."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import done, manifest, tree

BEGUN = Path(__file__).parents[1] / "data/begun_run"
UPDATE_FINGERPRINT = "e74745e1af3c310079708daa52de95600d6736bcafd61c216bf27616254d1c1f"
"""What the earlier version gave the update that it hadn't taken yet."""


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the begun run: its first iteration is sampled, scored and recomputed, not updated."""
    shutil.copytree(BEGUN, tmp_path / "begun")
    monkeypatch.chdir(tmp_path / "begun")
    return Path("run/iter-000000")


def test_its_finished_stages_are_done_and_its_update_is_taken(begun: Path) -> None:
    before = tree(begun)
    done("run", "pipeline.yaml")
    after = tree(begun)
    assert {name: digest for name, digest in after.items() if name in before} == before
    assert manifest(begun / "update")["fingerprint"] == UPDATE_FINGERPRINT
    assert json.loads(Path("run/policies/CURRENT").read_text())["version"] == 1


def test_each_stage_by_itself_finds_its_work_done(begun: Path) -> None:
    rollouts = ("--rollouts", begun / "rollouts")
    config = ("--config", "pipeline.yaml")
    for words in (
        ("rollout", *config, "--out", begun / "rollouts", "--json"),
        ("score", *rollouts, *config, "--out", begun / "scores", "--json"),
        (
            "logprob",
            *rollouts,
            "--policy",
            "builtin:tiny",
            "--reference",
            "builtin:tiny",
            "--out",
            begun / "logprobs",
            "--json",
        ),
    ):
        assert done(*words).record["state"] == "already_done"
    given = (*rollouts, "--scores", begun / "scores", "--logprobs", begun / "logprobs")
    planned = done("update", *given, *config, "--out", begun / "update", "--dry-run", "--json").record
    assert planned["facts"]["fingerprint"] == UPDATE_FINGERPRINT
