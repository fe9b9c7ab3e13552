"""Nothing to train on, numbers that explode, work left behind."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome, assert_refused, done, grpoctl, is_committed, manifest, rows, tree
from damage import flip_bit, replace, rewrite_rows, without_manifest

Rows = list[dict[str, Any]]
UPDATE = ("update", "--policy", "builtin:tiny", "--logprobs", "logprobs", "--lr", "1e-4")


def update(*more: object, out: str = "new") -> Outcome:
    return grpoctl(*UPDATE, "--out", out, *more)


def mask_all(found: Rows) -> None:
    for row in found:
        row["completion_mask"] = [False] * len(row["completion_mask"])


def test_an_update_without_a_token_to_train_on_fails(work: Path) -> None:
    rewrite_rows("rollouts", mask_all)
    before = tree("rollouts")
    outcome = update()
    assert outcome.code == 4
    assert "mask" in outcome.error or "nothing" in outcome.error
    assert not is_committed("new")
    assert tree("rollouts") == before


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_masked_rows_add_nothing_whatever_the_micro_batches(work: Path, aggregation: str) -> None:
    def mask_some(found: Rows) -> None:
        mask_all(found[4:12])

    rewrite_rows("rollouts", mask_some)
    given = ("--aggregation", aggregation)
    assert update(*given, "--micro-batch-tokens", 1, out="small").code == 0
    assert update(*given, out="whole").code == 0
    small, whole = rows("small")[0], rows("whole")[0]
    assert small["num_micro_batches"] > whole["num_micro_batches"]
    assert small["num_sequences"] == whole["num_sequences"] == 8
    for name in ("loss_denominator", "loss", "policy_loss_numerator", "grad_norm", "entropy"):
        assert small[name] == pytest.approx(whole[name], rel=1e-6, abs=1e-7)


def test_a_step_without_tokens_is_counted_and_the_others_are_taken(work: Path) -> None:
    def mask_first_group(found: Rows) -> None:
        mask_all(found[:4])

    rewrite_rows("rollouts", mask_first_group)
    Path("reward.py").write_text("def by_length(completion):\n    return float(len(completion) % 5)\n")
    done("score", "--reward", "reward.py:by_length", "--out", "by_length")
    assert update("--scores", "by_length", "--mini-batch-size", 4, "--set", "update.shuffle=none").code == 0
    steps = rows("new")
    assert sum(step["num_sequences"] for step in steps) == 12
    assert all(step["status"] in ("ok", "no_tokens") for step in steps)


def test_groups_of_equal_rewards_alone_give_nothing_to_learn(work: Path) -> None:
    Path("reward.py").write_text("def constant(completion):\n    return 1.0\n")
    given = ("--reward", "reward.py:constant", "--set", "score.fail_if_all_equal=never", "--out", "constant")
    done("score", *given)
    assert_refused(update("--scores", "constant"), 4, where="constant", found="0 %", todo="group_size|reward")
    assert not is_committed("new")


def test_exploding_numbers_stop_the_update_and_save_the_rows(work: Path) -> None:
    before = tree("rollouts") | tree("scores")
    given = ("--lr", "1e30", "--mini-batch-size", 4)
    outcome = update(*given)
    assert_refused(
        outcome, 4, where="new", found="non-finite", expected="max_nonfinite_steps allows 0", todo="nonfinite"
    )
    assert not is_committed("new")
    saved = json.loads(Path("new/_nonfinite.json").read_text())
    assert set(saved) <= {row["sample_id"] for row in rows("rollouts")}
    assert saved
    assert tree("rollouts") | tree("scores") == before
    assert update("--mini-batch-size", 4).code == 0


def test_a_row_with_a_broken_log_probability_is_named(work: Path) -> None:
    def break_one(found: Rows) -> None:
        found[6]["rollout_logprobs"][0] = math.nan

    rewrite_rows("rollouts", break_one)
    name = rows("rollouts")[6]["sample_id"]
    outcome = update("--set", "update.old=rollout_logprobs")
    assert outcome.code in (3, 4)
    assert name in outcome.error
    assert not is_committed("new")


def test_allowed_non_finite_steps_are_skipped_and_counted(work: Path) -> None:
    def break_one(found: Rows) -> None:
        found[6]["old_logprobs"][0] = math.nan

    rewrite_rows("logprobs", break_one)
    outcome = update("--mini-batch-size", 4, "--set", "update.max_nonfinite_steps=1", "--set", "update.shuffle=none")
    assert outcome.code in (0, 3), outcome.err
    if outcome.code == 3:
        assert rows("rollouts")[6]["sample_id"] in outcome.error
        return
    steps = rows("new")
    assert [step["status"] for step in steps].count("nonfinite") == 1
    skipped = next(step for step in steps if step["status"] == "nonfinite")
    assert skipped["skipped_ids"] == [rows("rollouts")[6]["sample_id"]]
    assert manifest("new")["stats"]["num_skipped_steps"] == 1


def test_a_policy_that_became_infinite_is_not_committed(work: Path) -> None:
    outcome = update("--lr", "1e36")
    assert_refused(outcome, 4, where="new", found="not finite", expected="nothing committed", todo=r"lower update\.lr")
    assert not is_committed("new")


def test_work_left_by_a_killed_update_is_ignored(work: Path) -> None:
    whole = manifest("update")
    shutil.copytree("update", "half")
    without_manifest("half")
    weights = Path("half/policy/model.safetensors")
    replace(weights, weights.read_bytes()[:1000])
    Path("half/.tmp-update-abc").mkdir()
    Path("half/.tmp-update-abc/model.safetensors").write_bytes(b"half")
    done(*UPDATE, "--out", "half")
    assert manifest("half")["content_digest"] == whole["content_digest"]
    done("sync", "--update", "half", "--to", "elsewhere")


def test_work_left_by_another_update_is_a_conflict(work: Path) -> None:
    without_manifest("update")
    before = tree("update")
    outcome = update("--lr", "2e-4", out="update")
    assert_refused(outcome, 5, where="update", found="unfinished shards of other work", todo="another --out or remove")
    assert tree("update") == before


def test_the_newest_committed_policy_counts_not_a_half_published_one(work: Path) -> None:
    half = Path("policies/v000002")
    shutil.copytree("policies/v000001", half)
    (half / "grpoctl_policy.json").unlink()
    replace(half / "model.safetensors", b"half")
    done("rollout", "--policy", "policies", "--limit", 2, "--group-size", 2, "--max-new-tokens", 28, "--out", "next")
    assert manifest("next")["policy"]["version"] == 1


def test_the_same_rollouts_are_never_trained_on_twice(work: Path) -> None:
    before = tree(".")
    outcome = grpoctl("update", "--policy", "policies", "--logprobs", "logprobs", "--lr", "1e-4", "--out", "again")
    assert_refused(outcome, 5, where="policies", found="trained on rollouts already", todo="sample anew")
    assert tree(".") == before
    outcome = grpoctl("update", "--policy", "update", "--logprobs", "logprobs", "--lr", "1e-4", "--out", "again")
    assert_refused(outcome, 5, where="update", found="already", todo="sample anew")


LIMITS = [
    ("update.max_kl=1e-12", "kl"),
    ("update.max_ratio=1.0000001", "ratio_max"),
    ("update.max_grad_norm=1e-6", "grad_norm"),
]


@pytest.mark.parametrize(("limit", "name"), LIMITS)
def test_a_step_beyond_a_limit_stops_the_update(work: Path, limit: str, name: str) -> None:
    outcome = update("--mini-batch-size", 4, "--lr", "1e-2", "--epochs", 3, "--set", limit)
    assert_refused(outcome, 4, where="new", found=f"{name} is", expected="limit", todo="nothing committed")
    assert not is_committed("new")


def test_a_mini_batch_that_splits_groups_is_refused(work: Path) -> None:
    outcome = update("--mini-batch-size", 6)
    assert_refused(
        outcome, 2, where="mini_batch_size", found="6", expected="multiple of the group size 4", todo="shuffle"
    )
    assert not is_committed("new")


def test_a_damaged_optimizer_state_is_refused(work: Path) -> None:
    given = ("--policy", "policies", "--limit", 4, "--group-size", 4, "--max-new-tokens", 28, "--seed", 9)
    done("rollout", *given, "--iteration", 1, "--out", "r1")
    Path("reward.py").write_text("def by_length(completion):\n    return float(len(completion) % 5)\n")
    done("score", "--rollouts", "r1", "--reward", "reward.py:by_length", "--out", "s1")
    command = ("update", "--rollouts", "r1", "--scores", "s1", "--policy", "policies", "--resume-from", "update")
    command = (*command, "--set", "update.old=rollout_logprobs", "--lr", "1e-4", "--out", "u1")
    flip_bit(Path("update/trainer_state/optimizer.safetensors"))
    before = tree(".")
    outcome = grpoctl(*command)
    assert_refused(
        outcome, 3, where="optimizer.safetensors", found="another content", expected="manifest", todo="restore it"
    )
    assert tree(".") == before
    shutil.rmtree("update/trainer_state")
    outcome = grpoctl(*command)
    assert_refused(outcome, 3, where="trainer_state", found="missing", expected="manifest", todo="rerun")


def test_resuming_from_another_line_of_policies_is_refused(work: Path) -> None:
    outcome = update("--resume-from", "update")
    assert_refused(outcome, 3, where="update", found="version 1", expected="builtin:tiny")
    assert not is_committed("new")


def test_a_batch_without_signal_is_passed_on_where_that_is_asked_for_and_training_goes_on(work: Path) -> None:
    """27: it stops by default; `pass_on` commits the same weights as the next version, state and schedule as they were."""
    Path("reward.py").write_text("def same(completion):\n    return 1.0\n")
    flat = ("--reward", "reward.py:same", "--set", "score.fail_if_all_equal=never")
    done("score", *flat, "--out", "flat")
    assert_refused(
        update("--scores", "flat", out="stopped"), 4, found="0 % of groups", todo="update.without_signal=pass_on"
    )
    assert not is_committed("stopped")
    facts = done(
        *UPDATE, "--scores", "flat", "--set", "update.without_signal=pass_on", "--out", "same", "--json"
    ).record
    assert facts["facts"]["num_steps"] == facts["facts"]["global_step"] == 0
    assert rows("same") == []
    record = json.loads(Path("same/policy/grpoctl_policy.json").read_text())
    assert record["version"] == 1 and len(record["consumed"]) == 1
    done("sync", "--update", "same", "--to", "published")
    sampling = ("--policy", "published", "--limit", 4, "--group-size", 4, "--max-new-tokens", 28)
    done("rollout", *sampling, "--out", "next")
    done("logprob", "--rollouts", "next", "--policy", "published", "--out", "next-logprobs")
    done("score", "--rollouts", "next", *flat, "--out", "next-flat")
    again = ("--policy", "published", "--rollouts", "next", "--logprobs", "next-logprobs", "--resume-from", "same")
    done("update", *again, "--scores", "next-flat", "--set", "update.without_signal=pass_on", "--out", "same-again")
    ours, theirs = (
        json.loads(Path(f"{name}/policy/grpoctl_policy.json").read_text()) for name in ("same-again", "same")
    )
    assert ours["weights_digest"] == ours["parent_digest"] == theirs["weights_digest"] and ours["version"] == 2
    Path("by_length.py").write_text("def by_length(completion):\n    return float(len(completion) % 5)\n")
    done("score", "--rollouts", "next", "--reward", "by_length.py:by_length", "--out", "next-scores")
    done("update", *again, "--scores", "next-scores", "--lr", "1e-4", "--out", "moved")
    assert rows("moved")[0]["global_step"] == 1


def test_an_update_is_one_shard(work: Path) -> None:
    assert_refused(update("--shards", "3/7"), 2, where="--shards", found="cut into 1;")
    assert update("--shards", "0/1").code == 0
