"""Runs started from what isn't there, and pipeline files edited after they began."""

import shutil
from pathlib import Path

from command_line import assert_refused, done, grpoctl, manifest, tree
from damage import flip_bit
from pipeline_file import edited, run


def test_an_unknown_stage_or_iteration_to_start_from_is_refused(small_pipeline: Path) -> None:
    done("run", "p.yaml", "--iterations", 1)
    before = tree("run")
    outcome = run("--from", "run/iter-000000/scoring", "--run-dir", "new")
    assert_refused(outcome, 2, where="--from", found="scoring", expected="rollout, logprob, score, update")
    outcome = run("--from", "run/iter-000007/score", "--run-dir", "new")
    assert_refused(outcome, 2, where="run/iter-000007", found="iterations is 2", expected="last one is 1", todo="raise")
    assert not Path("new").exists()
    outcome = run("--from", "run/iter-000007/score", "--run-dir", "new", "--iterations", 9)
    assert_refused(outcome, 3, where="run/", found="nothing|no |not found", todo=".")
    assert_refused(run("--from", "run/iter-000000/score"), 2, where="--from", todo="--run-dir")
    assert tree("run") == before


def test_a_pipeline_edited_after_it_began_is_a_conflict_that_shows_the_change(small_pipeline: Path) -> None:
    done("run", "p.yaml")
    before = tree("run")
    edited(small_pipeline, "lr: 1e-4", "lr: 2e-4")
    outcome = run("--iterations", 3)
    assert_refused(
        outcome,
        5,
        where="iter-000000/lock.json",
        found="update.lr: 0.0001",
        expected="→ 0.0002",
        todo="--run-dir.*--accept-changes",
    )
    assert tree("run") == before
    outcome = done("run", "p.yaml", "--iterations", 3, "--accept-changes")
    assert "iteration 0 keeps the settings it began with" in outcome.err
    kept = {name: digest for name, digest in before.items() if name.startswith("iter-") and "trainer_state" not in name}
    assert kept.items() <= tree("run").items()
    rates = [manifest(f"run/iter-00000{i}/update")["config"]["update"]["lr"] for i in range(3)]
    assert rates == [1e-4, 1e-4, 2e-4]


def test_settings_that_change_no_result_may_change(small_pipeline: Path) -> None:
    done("run", "p.yaml", "--iterations", 1)
    edited(small_pipeline, "num_threads: 1", "num_threads: 1, micro_batch_tokens: 512")
    edited(small_pipeline, "iterations: 2", "iterations: 1")
    assert "already done" in run().out


def test_a_run_whose_published_policy_was_damaged_stops(small_pipeline: Path) -> None:
    done("run", "p.yaml", "--iterations", 1)
    flip_bit(Path("run/policies/v000001/model.safetensors"))
    before = tree("run")
    assert_refused(
        run(), 3, where="policies/v000001", found="weights differ", expected="digest", todo="damaged or edited"
    )
    assert before.items() <= tree("run").items()


def test_an_artifact_lost_from_a_finished_run_is_made_again(small_pipeline: Path) -> None:
    done("run", "p.yaml")
    before = manifest("run/iter-000001/scores")["content_digest"]
    shutil.rmtree("run/iter-000001/scores")
    done("run", "p.yaml")
    assert manifest("run/iter-000001/scores")["content_digest"] == before


def test_a_run_directory_that_is_a_file_is_refused(small_pipeline: Path) -> None:
    Path("run").write_text("mine")
    assert_refused(run(), 3, where="run", found="folder|[Nn]ot a directory", todo=".")
    assert Path("run").read_text() == "mine"


def test_status_of_another_folder_is_refused(small_pipeline: Path) -> None:
    assert_refused(grpoctl("status", "."), 3, where=r"\.", found="no iter-", expected="run_dir")
    assert_refused(grpoctl("status", "nowhere"), 3, where="nowhere", found="no iter-", expected="run_dir")


def test_rolling_back_to_a_version_that_never_was_is_refused(small_pipeline: Path) -> None:
    done("run", "p.yaml", "--iterations", 2)
    before = tree("run")
    outcome = grpoctl("sync", "--to", "run/policies", "--rollback", 7)
    assert_refused(outcome, 3, where="run/policies/v000007", found="no such published version", todo="see the folders")
    assert tree("run") == before
    done("sync", "--to", "run/policies", "--rollback", 1)
    assert '"v000001"' in Path("run/policies/CURRENT").read_text()
