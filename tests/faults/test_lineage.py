"""Artifacts and policies that don't belong together are refused, naming both."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome, assert_refused, done, grpoctl, is_committed, manifest, rows, tree
from damage import edit_json, policy_copy, rewrite_rows, scaled_weights
from small_set import SAMPLING

Rows = list[dict[str, Any]]
LOGPROB = ("logprob", "--policy", "builtin:tiny", "--out", "new")
UPDATE = ("update", "--policy", "builtin:tiny", "--logprobs", "logprobs", "--lr", "1e-4", "--out", "new")
SCORE = ("score", "--reward", "accuracy", "--out", "new")


def refused(command: tuple[object, ...], code: int = 3, **parts: str) -> Outcome:
    """Run a command that must be refused and must change nothing."""
    before = tree(".")
    outcome = grpoctl(*command)
    assert_refused(outcome, code, **parts)
    assert tree(".") == before
    return outcome


def in_pieces(found: Rows) -> None:
    found[0], found[8] = found[8], found[0]


@pytest.mark.parametrize("command", [LOGPROB, UPDATE, SCORE])
def test_a_group_in_pieces_is_refused(work: Path, command: tuple[object, ...]) -> None:
    rewrite_rows("rollouts", in_pieces)
    rewrite_rows("scores", in_pieces)
    rewrite_rows("logprobs", in_pieces)
    refused(
        command, where="rollouts", found=r"group \S+@0", expected="together|order", todo="sample anew|rerun|together"
    )


def test_a_group_in_two_shards_is_refused(work: Path) -> None:
    done("rollout", "--policy", "builtin:tiny", *SAMPLING, "--set", "rollout.prompts_per_shard=2", "--out", "two")
    assert [len({row["group_id"] for row in rows("two")[start : start + 8]}) for start in (0, 8)] == [2, 2]
    first = rows("two")[0]["group_id"]

    def move(found: Rows) -> None:
        found[3]["group_id"] = first

    rewrite_rows("two", move, index=1)
    outcome = grpoctl("score", "--rollouts", "two", *SCORE[1:])
    assert_refused(outcome, 3, where="two", found=first, expected="together", todo="sample anew")
    assert not is_committed("new")


@pytest.mark.parametrize("flag", ["--policy", "--reference"])
def test_logprob_refuses_another_tokenizer(work: Path, flag: str) -> None:
    policy = policy_copy(work / "other", tokenizer={"pad_token": "<|im_end|>"})
    outcome = refused(("logprob", flag, policy, "--out", "new"), where="other", found="tokenizer", expected="rollouts")
    theirs = manifest("rollouts")["policy"]["tokenizer_digest"][:12]
    assert theirs in outcome.error


def test_update_refuses_another_tokenizer(work: Path) -> None:
    policy = policy_copy(work / "other", template="{{ messages }}")
    command = ("update", "--policy", policy, "--logprobs", "logprobs", "--out", "new")
    refused(command, where="other", found="tokenizer", expected="rollouts", todo="one tokenizer")


@pytest.mark.parametrize("command", [LOGPROB, UPDATE])
@pytest.mark.parametrize(("column", "bad"), [("completion_ids", 320), ("prompt_ids", 9999), ("completion_ids", -5)])
def test_a_token_id_outside_the_vocabulary_is_refused_by_row(
    work: Path, command: tuple[object, ...], column: str, bad: int
) -> None:
    def change(found: Rows) -> None:
        found[6][column][0] = bad

    rewrite_rows("rollouts", change)
    refused(command, where=r"rollouts: \S+:1@0#2", found=f"{column}.*id {bad}", expected="320", todo="belong together")


def test_a_model_whose_embeddings_are_not_its_configs_is_refused(work: Path) -> None:
    policy = policy_copy(work / "other", config={"vocab_size": 330})
    command = ("rollout", "--policy", policy, "--limit", 2, "--group-size", 2, "--out", "new")
    refused(command, where="other", found="320|shape|size", expected="330", todo=".")


def test_old_logprobs_under_another_policy_than_sampled_are_refused(work: Path) -> None:
    policy = scaled_weights(work / "other", 0.5)
    outcome = refused(
        ("logprob", "--policy", policy, "--out", "new"), where="other", found="weights", todo="name that policy"
    )
    assert manifest("rollouts")["policy"]["weights_digest"][:12] in outcome.error


def test_the_reference_is_recorded_by_its_weights_and_another_one_is_a_conflict(work: Path) -> None:
    policy = scaled_weights(work / "other", 0.5)
    done("logprob", "--reference", policy, "--out", "new")
    assert manifest("new")["reference"]["weights_digest"] != manifest("logprobs")["reference"]["weights_digest"]
    refused(("logprob", "--reference", "builtin:tiny", "--out", "new"), 5, where="new", found="reference", todo="--out")


def test_kl_without_reference_logprobs_is_refused(work: Path) -> None:
    done("logprob", "--policy", "builtin:tiny", "--out", "old_only")
    command = ("update", "--policy", "builtin:tiny", "--logprobs", "old_only", "--kl-coef", 0.1, "--out", "new")
    refused(command, found="kl_coef", expected="ref_logprobs", todo="logprob --reference")


def test_logprobs_of_other_rollouts_are_refused(work: Path) -> None:
    done("rollout", "--policy", "builtin:tiny", *SAMPLING, "--seed", 4, "--out", "others")
    done("logprob", "--rollouts", "others", "--policy", "builtin:tiny", "--out", "their_logprobs")
    done("score", "--rollouts", "others", "--reward", "accuracy", "--out", "their_scores")
    command = ("update", "--policy", "builtin:tiny", "--out", "new")
    refused((*command, "--logprobs", "their_logprobs"), where="their_logprobs", found="others", expected="rollouts")
    command = (*command, "--logprobs", "logprobs", "--scores", "their_scores")
    refused(command, where="their_scores", found="others", expected="rollouts", todo="recompute")


@pytest.mark.parametrize("artifact", ["scores", "logprobs"])
def test_sidecar_rows_in_another_order_are_refused(work: Path, artifact: str) -> None:
    def swap(found: Rows) -> None:
        found[0], found[1] = found[1], found[0]

    rewrite_rows(artifact, swap)
    refused(UPDATE, where=artifact, found="row 0.*#1", expected="#0", todo="recompute")


def test_rollouts_of_an_older_policy_are_refused(work: Path) -> None:
    command = ("update", "--policy", "policies", "--logprobs", "logprobs", "--out", "new")
    done("rollout", "--policy", "builtin:tiny", *SAMPLING, "--seed", 4, "--out", "stale")
    done("score", "--rollouts", "stale", "--reward", "format", "--out", "stale_scores")
    stale = (*command[:3], "--rollouts", "stale", "--scores", "stale_scores", "--out", "new")
    refused(
        stale, where="stale", found="version 0", expected="version 1", todo="max_staleness.*0.*sample anew or raise"
    )
    allowed = (*stale, "--set", "update.max_staleness=1")
    refused(allowed, found="old_logprobs", expected="log-probabilities", todo="logprob --policy")
    done(*allowed, "--set", "update.old=rollout_logprobs")


def test_rollouts_of_a_newer_policy_are_refused(work: Path) -> None:
    done("rollout", "--policy", "policies", *SAMPLING, "--out", "newer")
    done("score", "--rollouts", "newer", "--reward", "format", "--out", "newer_scores")
    command = ("update", "--policy", "builtin:tiny", "--rollouts", "newer", "--scores", "newer_scores", "--out", "new")
    allowed = (*command, "--set", "update.max_staleness=5")
    refused(allowed, where="newer", found="version 1", expected="version 0", todo="sample anew|name")


def test_two_policies_under_one_version_are_refused(work: Path) -> None:
    policy = scaled_weights(work / "other", 0.5)
    command = ("update", "--policy", policy, "--logprobs", "logprobs", "--out", "new")
    refused(command, where="rollouts", found="sampled from weights", expected="other", todo="two policies")


def shifted(by: float) -> Callable[[Rows], None]:
    def change(found: Rows) -> None:
        for row in found:
            row["rollout_logprobs"] = [value - by for value in row["rollout_logprobs"]]

    return change


def test_a_gap_between_sampler_and_trainer_warns_then_stops(work: Path) -> None:
    limits = ("--set", "logprob.gap_warn=0.05", "--set", "logprob.gap_limit=0.15")
    rewrite_rows("rollouts", shifted(0.1))
    outcome = grpoctl("logprob", "--policy", "builtin:tiny", "--out", "newer")
    assert_refused(
        outcome, 4, where="newer", found="0.1 nats", expected="limit 0.001", todo="gap_limit.*declared policy"
    )
    outcome = done(*LOGPROB, *limits)
    assert "differ by 0.1 nats" in outcome.err
    assert is_committed("new")
    rewrite_rows("rollouts", shifted(0.1))
    outcome = grpoctl("logprob", "--policy", "builtin:tiny", *limits, "--out", "newest")
    assert_refused(
        outcome, 4, where="newest", found="0.2 nats", expected="limit 0.15", todo="gap_limit.*declared policy"
    )
    assert not is_committed("newest")


def test_a_few_wrong_rows_cannot_hide_in_a_mean(work: Path) -> None:
    def one_row(found: Rows) -> None:
        found[5]["rollout_logprobs"][0] -= 0.1

    rewrite_rows("rollouts", one_row)
    limits = ("--set", "logprob.gap_limit=0.05", "--set", "logprob.gap_max_limit=0.02")
    outcome = grpoctl("logprob", "--policy", "builtin:tiny", *limits, "--out", "newer")
    assert_refused(
        outcome, 4, where=r"1@0#1, token 0", found="0.1 nats", expected="limit 0.02", todo="a few rows alone"
    )
    assert grpoctl("logprob", "--policy", "builtin:tiny", "--out", "newer").code == 4
    done("logprob", "--policy", "builtin:tiny", "--out", "newer", "--set", "logprob.gap_limit=0.05")


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        (lambda row: [row[0] - 1.0, *row[1:]], "another chat template, prompt or position ids"),
        (lambda row: [*row[:-1], row[-1] - 1.0], "an end token that the sampler bans or forces"),
        (lambda row: [value - 0.1 for value in row], "stale weights, or others; another temperature"),
    ],
)
def test_a_gap_s_message_names_what_fits(work: Path, changed: Callable[[list[float]], list[float]], cause: str) -> None:
    def change(found: Rows) -> None:
        for row in found:
            row["rollout_logprobs"] = changed(row["rollout_logprobs"])

    rewrite_rows("rollouts", change)
    assert_refused(grpoctl("logprob", "--policy", "builtin:tiny", "--out", "newer"), 4, todo=cause)


@pytest.mark.parametrize("command", [LOGPROB, UPDATE])
@pytest.mark.parametrize("column", ["completion_ids", "completion_mask", "rollout_logprobs"])
def test_columns_of_unequal_lengths_are_refused_by_row(work: Path, command: tuple[object, ...], column: str) -> None:
    def shorten(found: Rows) -> None:
        found[9][column] = found[9][column][:-1]

    rewrite_rows("rollouts", shorten)
    refused(
        command,
        where=r"rollouts: \S+:2@0#1",
        found=r"\d+ completion_ids, \d+ mask.*\d+ rollout",
        expected="one per token",
    )


@pytest.mark.parametrize("column", ["old_logprobs", "ref_logprobs"])
def test_logprobs_of_another_length_are_refused_by_row(work: Path, column: str) -> None:
    def shorten(found: Rows) -> None:
        found[9][column] = found[9][column][:-1]

    rewrite_rows("logprobs", shorten)
    refused(UPDATE, where=rf"logprobs: {column}: \S+:2@0#1", found="values", expected="tokens", todo="recompute")


WRONG = [
    (("rollout", "--prompts", "scores", "--out", "new"), "scores", "prompt"),
    (("rollout", "--policy", "scores", "--out", "new"), "scores", "policy"),
    (("score", "--rollouts", "logprobs", "--reward", "accuracy", "--out", "new"), "logprobs", "rollouts"),
    (("logprob", "--rollouts", "scores", "--policy", "builtin:tiny", "--out", "new"), "scores", "rollouts"),
    (("update", "--scores", "rollouts", "--out", "new"), "rollouts", "scores"),
    (("update", "--logprobs", "scores", "--out", "new"), "scores", "logprobs"),
    (("update", "--logprobs", "logprobs", "--resume-from", "scores", "--out", "new"), "scores", "steps|update"),
    (("sync", "--update", "rollouts", "--to", "new"), "rollouts", "steps|update"),
]


@pytest.mark.parametrize(("command", "given", "wanted"), WRONG)
def test_another_kind_of_artifact_is_refused(work: Path, command: tuple[str, ...], given: str, wanted: str) -> None:
    refused(command, where=given, found="holds|artifact", expected=wanted, todo=".")


def test_a_folder_without_a_manifest_is_refused(work: Path) -> None:
    (work / "rollouts/_MANIFEST.json").unlink()
    refused(LOGPROB, where="rollouts", found="without a manifest", expected="committed", todo="rerun the stage")
    refused(
        ("logprob", "--rollouts", "nowhere", "--policy", "builtin:tiny", "--out", "new"),
        where="nowhere",
        found="nothing",
    )


NEWER = [{"table_version": 99}, {"manifest_schema": 99}, {"table": "dreams"}, {"a_new_field": 1, "manifest_schema": 2}]


@pytest.mark.parametrize("change", NEWER)
def test_a_newer_schema_names_the_version_needed(work: Path, change: dict[str, Any]) -> None:
    edit_json(Path("rollouts/_MANIFEST.json"), lambda content: content.update(change, grpoctl_version="99.0"))
    refused(
        LOGPROB,
        where="rollouts/_MANIFEST.json",
        found="written by grpoctl 99.0",
        expected="this is|needs",
        todo="upgrade",
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"table": "rollouts"}', "\x00\x01"])
def test_a_damaged_manifest_is_refused(work: Path, text: str) -> None:
    Path("rollouts/_MANIFEST.json").write_text(text)
    refused(
        LOGPROB,
        where="rollouts/_MANIFEST.json",
        found="not JSON|JSON without|not a manifest|version",
        todo="rerun|upgrade",
    )


def test_truncated_sampling_is_refused_for_training_unless_allowed(work: Path) -> None:
    done("rollout", "--policy", "builtin:tiny", *SAMPLING, "--set", "rollout.top_p=0.9", "--out", "nucleus")
    done("score", "--rollouts", "nucleus", "--reward", "format", "--out", "s")
    command = ("update", "--rollouts", "nucleus", "--scores", "s", "--policy", "builtin:tiny", "--out", "new")
    command = (*command, "--set", "update.old=rollout_logprobs")
    refused(command, where="nucleus", found="top_p 0.9", expected="policy's", todo="allow_truncated_sampling")
    done(*command, "--set", "update.allow_truncated_sampling=true")
    assert json.loads(Path("new/_MANIFEST.json").read_text())["sampling"]["top_p"] == 0.9
