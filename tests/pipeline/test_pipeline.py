"""The cycle: it learns, resumes, branches off, keeps to the settings it began with, and runs on any store."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from addition import QUICKSTART

from grpoctl.artifacts.artifact import read_manifest
from grpoctl.errors import Conflict, UsageError
from grpoctl.inputs.policies import open_policy
from grpoctl.pipeline.report import reward_curve, status_lines
from grpoctl.pipeline.run import Origin, Pipeline
from grpoctl.settings.jobs import PipelineConfig
from grpoctl.settings.load import load_job
from grpoctl.stages.context import Context
from grpoctl.stages.registry import artifact_folders

SMALL = ("rollout.prompts_per_iteration=4", "rollout.group_size=4", "update.mini_batch_size=8", "iterations=2")


def digests(run_dir: Path | str) -> dict[str, str]:
    found = {}
    for iteration in range(2):
        for folder in artifact_folders().values():
            artifact = read_manifest(f"{run_dir}/iter-{iteration:06d}/{folder}")
            assert artifact is not None, folder
            found[f"{iteration}/{folder}"] = artifact.manifest.content_digest
    found["policy"] = open_policy(f"{run_dir}/policies/v000002").weights_digest
    return found


def test_a_run_is_a_function_of_its_settings(run_pipeline: Callable[..., Pipeline], tmp_path: Path) -> None:
    run_pipeline(f"run_dir={tmp_path}/a", *SMALL)
    run_pipeline(f"run_dir={tmp_path}/b", *SMALL, "runtime.micro_batch_tokens=4096", "runtime.keep_states=1")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    run_pipeline(f"run_dir={tmp_path}/c", *SMALL, "seed=3")
    assert digests(tmp_path / "a") != digests(tmp_path / "c")


def test_a_run_on_a_store_without_renames_equals_the_local_one(
    run_pipeline: Callable[..., Pipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPOCTL_CACHE", str(tmp_path / "cache"))
    run_pipeline(f"run_dir={tmp_path}/local", *SMALL)
    run_pipeline(f"run_dir=memory://{tmp_path.name}/run", *SMALL)
    assert digests(tmp_path / "local") == digests(f"memory://{tmp_path.name}/run")


@pytest.mark.parametrize("lost", ["scores", "logprobs", "update"])
def test_a_lost_artifact_is_made_again_exactly(
    run_pipeline: Callable[..., Pipeline], tmp_path: Path, lost: str
) -> None:
    run_pipeline(f"run_dir={tmp_path}/a", *SMALL)
    before = digests(tmp_path / "a")
    shutil.rmtree(tmp_path / f"a/iter-000001/{lost}")
    run_pipeline(f"run_dir={tmp_path}/a", *SMALL)
    assert digests(tmp_path / "a") == before


def test_more_iterations_continue_where_the_files_end(run_pipeline: Callable[..., Pipeline], tmp_path: Path) -> None:
    run_pipeline(f"run_dir={tmp_path}/a", *SMALL, "iterations=1")
    told: list[str] = []
    run_pipeline(f"run_dir={tmp_path}/a", *SMALL, tell=told.append)
    assert [line.endswith("(already done)") for line in told] == [True, False]
    run_pipeline(f"run_dir={tmp_path}/b", *SMALL)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    lines = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1]


def test_an_edited_file_cannot_change_a_begun_iteration(run_pipeline: Callable[..., Pipeline], tmp_path: Path) -> None:
    run_pipeline(f"run_dir={tmp_path}/a", *SMALL, "iterations=1")
    with pytest.raises(Conflict, match=r"update.lr: 0.0001 → 0.002.*--accept-changes"):
        run_pipeline(f"run_dir={tmp_path}/a", *SMALL, "update.lr=2e-3")
    run_pipeline(f"run_dir={tmp_path}/a", *SMALL, "update.lr=2e-3", accept_changes=True)
    first, second = (read_manifest(f"{tmp_path}/a/iter-00000{i}/update") for i in (0, 1))
    assert first is not None and second is not None
    assert (first.manifest.config["update"]["lr"], second.manifest.config["update"]["lr"]) == (1e-4, 2e-3)


def test_a_stage_reruns_into_a_new_run_and_leaves_the_old_one(
    run_pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    run_pipeline(f"run_dir={tmp_path}/old", *SMALL)
    before = digests(tmp_path / "old")
    origin = Origin.parse(f"{tmp_path}/old/iter-000001/score")
    run_pipeline(f"run_dir={tmp_path}/new", *SMALL, "score.advantages=dr_grpo", origin=origin)
    run_pipeline(f"run_dir={tmp_path}/new", *SMALL, "score.advantages=dr_grpo")
    assert digests(tmp_path / "old") == before
    again = load_job(
        PipelineConfig, flags={}, sets=[f"run_dir={tmp_path}/new", *SMALL], file=QUICKSTART, environment={}
    )
    planned = list(Pipeline(config=again, context=Context(quiet=True)).plan())  # without --from, as it goes on
    assert planned and all(" done " in line for line in planned), planned
    assert sorted(path.name for path in (tmp_path / "new/iter-000001").iterdir()) == ["lock.json", "scores", "update"]
    assert not (tmp_path / "new/iter-000000").exists()
    scores = read_manifest(f"{tmp_path}/new/iter-000001/scores")
    assert scores is not None
    assert scores.manifest.parents[0].url == f"{tmp_path}/old/iter-000001/rollouts"
    assert open_policy(f"{tmp_path}/new/policies").version == 2


def test_from_names_a_stage_of_an_iteration() -> None:
    assert Origin.parse("runs/x/iter-000003/score") == Origin(run_dir="runs/x", iteration=3, stage="score")
    with pytest.raises(UsageError, match="expected RUN_DIR/iter-000003/STAGE"):
        Origin.parse("runs/x/score")


def test_old_optimizer_states_are_dropped_and_policies_kept(
    run_pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    run_pipeline(f"run_dir={tmp_path}/a", *SMALL, "runtime.keep_states=1")
    assert not (tmp_path / "a/iter-000000/update/trainer_state").exists()
    assert (tmp_path / "a/iter-000001/update/trainer_state").exists()
    assert open_policy(f"{tmp_path}/a/policies/v000001").version == 1


def test_status_and_curve_say_what_is_there(run_pipeline: Callable[..., Pipeline], tmp_path: Path) -> None:
    pipeline = run_pipeline(f"run_dir={tmp_path}/a", *SMALL)
    lines = list(status_lines(f"{tmp_path}/a"))
    assert len(lines) == 3
    assert "rollout:done logprob:done score:done update:done" in lines[0]
    assert lines[2] == "published: v000002"
    curve = reward_curve(pipeline.metrics).splitlines()
    assert len(curve) == 3
    assert f"{pipeline.metrics[0]['reward_mean']:.3f}" in curve[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [17, 1, 2, 3, 4])
def test_every_seed_learns(run_pipeline: Callable[..., Pipeline], tmp_path: Path, seed: int) -> None:
    metrics = run_pipeline(f"run_dir={tmp_path}/a", f"seed={seed}").metrics
    start, end = metrics[0]["reward_mean"], metrics[-1]["reward_mean"]
    assert end > 0.85 or end >= start + 0.6, f"{start} → {end}"
    assert all(row["first_ratio_max_gap"] == 0.0 for row in metrics)
    assert all(row["rollout_gap_max"] <= 1e-4 for row in metrics)
