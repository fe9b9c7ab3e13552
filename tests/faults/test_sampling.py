"""What a sampler may hand over, and what becomes of groups with a failed member."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Outcome, assert_refused, done, grpoctl, is_committed, manifest, rows, tree
from damage import rewrite_rows

from grpoctl.engines.base import Sample, SampleRequest, SamplingSettings
from grpoctl.engines.registry import SamplingEngine

END = 1
ENGINE = "grpoctl.engines.hf.engine.ENGINE"


def sample(ids: Sequence[int], logprobs: Sequence[float] | None = None, *, reason: str = "stop") -> Sample:
    values = [-0.5] * len(ids) if logprobs is None else logprobs
    return Sample(completion_ids=np.array(ids, np.int32), logprobs=np.array(values, np.float32), finish_reason=reason)


def never(*_: object) -> Any:
    raise AssertionError("nothing is left to sample")


Engine = Callable[[Callable[[int], Sample]], None]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Put a made-up engine in the sampler's place, which answers by the request's number."""

    def install(answer: Callable[[int], Sample]) -> None:
        class MadeUp:
            name = "made up"
            reproducible = True

            def __init__(self) -> None:
                self.numbers: dict[int, int] = {}  # by seed, so that a request asked again gets the same answer

            def sample(self, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Sample]:
                for request in requests:
                    self.numbers.setdefault(request.seed, len(self.numbers))
                return [answer(self.numbers[request.seed]) for request in requests]

        monkeypatch.setattr(ENGINE, SamplingEngine(sampler=lambda *_: MadeUp()))

    return install


def rollout(*more: object) -> Outcome:
    return grpoctl("rollout", "--policy", "builtin:tiny", "--group-size", 4, "--limit", 3, "--max-new-tokens", 8, *more)


def one_bad(bad: Sample) -> Callable[[int], Sample]:
    """Answer rows 0, 1, 2 … with different texts, and row 5 (group 1, member 1) with `bad`."""
    return lambda number: bad if number == 5 else sample([40 + number, 50, END])


NAN, INF = float("nan"), float("inf")
BAD = {
    "missing at the end": (sample([40, 50, END], [-0.1, -0.2]), "2 log-probabilities for 3 tokens"),
    "missing altogether": (sample([40, 50, END], []), "0 log-probabilities for 3 tokens"),
    "one too many": (sample([40, END], [-0.1, -0.2, -0.3]), "3 log-probabilities for 2 tokens"),
    "not a number": (sample([40, 50, END], [-0.1, NAN, -0.2]), "not finite; suspect bad weights"),
    "infinite": (sample([40, 50, END], [-0.1, -INF, -0.2]), "not finite; suspect bad weights"),
    "aborted": (
        Sample(
            completion_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), finish_reason="abort", error="x"
        ),
        "x",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_without_its_log_probabilities_fails_and_is_never_given_zeros(
    empty: Path, engine: Engine, name: str
) -> None:
    bad, message = BAD[name]
    engine(one_bad(bad))
    assert rollout("--set", "rollout.failed_budget=0.1").code == 0
    found = rows("rollouts")
    assert found[5]["status"] == "failed"
    assert message in found[5]["error"]
    assert found[5]["rollout_logprobs"] is None
    assert [row["status"] for row in found].count("ok") == 11
    assert manifest("rollouts")["rows"] == {"input": 12, "ok": 11, "skipped": 0, "failed": 1}


@pytest.mark.parametrize("name", BAD)
def test_more_failed_rows_than_the_budget_stop_the_stage(empty: Path, engine: Engine, name: str) -> None:
    engine(one_bad(BAD[name][0]))
    outcome = rollout()
    assert_refused(
        outcome, 4, where="rollouts", found="1 of 12 rows failed", expected="0%", todo="error column|failed_budget"
    )
    assert not is_committed("rollouts")


def test_the_message_about_failed_rows_names_the_first_fault(empty: Path, engine: Engine) -> None:
    engine(one_bad(BAD["not a number"][0]))
    assert "suspect bad weights" in rollout().error


def test_raising_the_budget_commits_the_finished_shards_without_sampling_again(
    empty: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(one_bad(BAD["not a number"][0]))
    assert rollout().code == 4
    monkeypatch.setattr(ENGINE, SamplingEngine(sampler=never))
    assert rollout("--set", "rollout.failed_budget=0.1").code == 0


def test_running_out_of_memory_keeps_the_finished_shards(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hungry:
        name = "hungry"
        reproducible = True
        calls = 0

        def sample(self, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Sample]:
            self.calls += 1
            if self.calls == 2:
                raise MemoryError
            return [sample([40 + number, END]) for number in range(len(requests))]

    monkeypatch.setattr(ENGINE, SamplingEngine(sampler=lambda *_: Hungry()))
    given = ("--set", "rollout.prompts_per_shard=1")
    assert_refused(
        rollout(*given), 75, found="out of memory", expected="kept", todo="rollout_batch_size or rollout.max_new_tokens"
    )
    assert Path("rollouts/_shards/00000.json").exists()
    assert not is_committed("rollouts")
    monkeypatch.setattr(Hungry, "calls", 5)
    assert rollout(*given).code == 0


def test_a_completion_of_the_end_token_alone_is_trained_on(empty: Path, engine: Engine) -> None:
    engine(one_bad(sample([END])))
    assert rollout().code == 0
    row = rows("rollouts")[5]
    assert (row["status"], row["completion"], row["completion_ids"], row["completion_mask"]) == (
        "ok",
        "",
        [END],
        [True],
    )


def test_a_completion_of_no_tokens_is_kept_as_empty_and_carries_no_loss(empty: Path, engine: Engine) -> None:
    engine(one_bad(sample([])))
    assert rollout().code == 0
    assert rows("rollouts")[5]["status"] == "empty"
    assert manifest("rollouts")["stats"]["num_empty"] == 1
    Path("reward.py").write_text("def by_length(completion):\n    return float(len(completion))\n")
    done("score", "--reward", "reward.py:by_length")
    score = rows("scores")[5]
    assert score["reward"] == 0.0
    assert score["advantage"] < 0
    done("update", "--policy", "builtin:tiny", "--set", "update.old=rollout_logprobs", "--lr", "1e-4")
    step = rows("update")[0]
    assert (step["num_sequences"], step["num_tokens"]) == (11, 33)


def test_a_stop_string_at_once_leaves_an_empty_text_with_its_tokens(empty: Path) -> None:
    assert rollout("--set", f"rollout.stop={list('<0123456789')}").code == 0
    for row in rows("rollouts"):
        assert row["completion"] == ""
        assert len(row["completion_ids"]) == len(row["rollout_logprobs"]) >= 1


def test_completions_at_the_limit_are_kept_with_their_reason_and_a_warning(empty: Path) -> None:
    outcome = rollout("--max-new-tokens", 2)
    assert_refused(outcome, 4, where="rollouts", found="100% of completions", expected="limit 95%", todo="raise")
    outcome = rollout("--max-new-tokens", 2, "--set", "rollout.max_truncated_ratio=1")
    assert outcome.code == 0
    assert "100 % of completions hit max_new_tokens" in outcome.err
    assert {(row["finish_reason"], tuple(row["completion_mask"])) for row in rows("rollouts")} == {
        ("length", (True, True))
    }


def test_too_many_completions_at_the_limit_stop_the_stage(empty: Path) -> None:
    outcome = rollout("--max-new-tokens", 2, "--set", "rollout.max_truncated_ratio=0.95")
    assert_refused(outcome, 4, where="rollouts", found="100%", expected="95%", todo="raise rollout.max_new_tokens")
    assert not is_committed("rollouts")


def test_truncated_completions_can_be_masked_or_failed(empty: Path) -> None:
    given = ("--max-new-tokens", 2, "--set", "rollout.max_truncated_ratio=1", "--set")
    assert rollout(*given, "rollout.truncated=mask", "--out", "masked").code == 0
    assert {tuple(row["completion_mask"]) for row in rows("masked")} == {(False, False)}
    outcome = rollout(*given, "rollout.truncated=drop", "--out", "dropped")
    assert_refused(outcome, 4, where="dropped", found="12 of 12", expected="budget", todo="failed_budget")


def test_generated_bytes_that_are_no_text_are_legal_and_the_ids_stay_true(empty: Path, engine: Engine) -> None:
    from grpoctl.engines.tokenizer import load_tokenizer
    from grpoctl.inputs.policies import open_policy

    tokenizer = load_tokenizer(open_policy("builtin:tiny").folder, "builtin:tiny")
    half = int(tokenizer.encode_text("é")[0])  # the first of two bytes
    engine(one_bad(sample([half, END])))
    assert rollout().code == 0
    row = rows("rollouts")[5]
    assert row["completion"] == "\ufffd"
    assert row["completion_ids"] == [half, END]
    assert row["status"] == "ok"


@pytest.fixture
def incomplete(empty: Path, engine: Engine) -> Path:
    """Rollouts of three groups, one with a failed member, and a reward that differs within groups."""
    engine(one_bad(BAD["not a number"][0]))
    assert rollout("--set", "rollout.failed_budget=0.1").code == 0
    Path("reward.py").write_text("def last(completion):\n    return float(ord(completion[0]) % 3)\n")
    return empty


def score(*more: object) -> Outcome:
    return grpoctl("score", "--reward", "reward.py:last", *more)


def test_an_incomplete_group_is_dropped_and_counted_within_a_budget(incomplete: Path) -> None:
    before = tree("rollouts")
    assert_refused(
        score(), 4, where="scores", found="1 of 3 groups are incomplete", expected="10%", todo="incomplete_budget"
    )
    assert not is_committed("scores")
    assert score("--set", "score.incomplete_budget=0.5").code == 0
    assert manifest("scores")["stats"]["num_dropped_groups"] == 1
    found = rows("scores")
    assert [row["advantage"] for row in found[4:8]] == [None] * 4
    assert all(row["advantage"] is not None for row in found[:4] + found[8:])
    assert (found[5]["reward"], found[5]["reward_status"]) == (None, "unscorable")
    assert tree("rollouts") == before


def test_an_incomplete_group_can_be_used_without_its_failed_member(incomplete: Path) -> None:
    assert score("--set", "score.incomplete_groups=use").code == 0
    found = rows("scores")[4:8]
    assert found[1]["advantage"] is None
    assert [row["num_scored_in_group"] for row in found] == [3] * 4
    assert abs(sum(row["advantage"] for row in found if row["advantage"] is not None)) < 1e-9


def test_an_incomplete_group_can_stop_the_stage(incomplete: Path) -> None:
    outcome = score("--set", "score.incomplete_groups=error")
    assert_refused(outcome, 4, where="scores", found="1 group", expected="without a reward", todo="incomplete_groups")
    assert not is_committed("scores")


def test_groups_of_one_need_an_estimator_that_allows_them(empty: Path) -> None:
    outcome = rollout("--group-size", 1)
    assert outcome.code == 0
    assert "group_size 1" in outcome.err
    refused = grpoctl("score", "--reward", "format")
    assert_refused(
        refused, 3, where="rollouts", found="size 1", expected="grpo", todo="--group-size 2.*--advantages none"
    )
    assert not is_committed("scores")
    done("score", "--reward", "format", "--advantages", "none", "--set", "score.fail_if_all_equal=never")


def test_a_group_reduced_to_one_member_gets_no_gradient(work: Path) -> None:
    def fail(found: list[dict[str, Any]]) -> None:
        for row in found[1:4]:
            row.update(status="failed", error="made to fail", rollout_logprobs=None)

    rewrite_rows("rollouts", fail)
    given = ("--reward", "accuracy", "--set", "score.incomplete_groups=use", "--out", "new")
    done("score", "--rollouts", "rollouts", *given)
    assert rows("new")[0]["advantage"] in (None, 0.0)


def test_a_prompt_that_the_engine_makes_no_room_for_is_refused_before_it_starts(prompts_file: Path) -> None:
    given = ("rollout", "--prompts", prompts_file, "--engine", "vllm", "--max-new-tokens", 20, "--dry-run")
    outcome = grpoctl(*given, "--set", "runtime.max_context_tokens=24")
    assert_refused(
        outcome, 2, found="runtime.max_context_tokens: 24, a prompt and its max_new_tokens take", todo="raise it"
    )
    assert grpoctl(*given, "--set", "runtime.max_context_tokens=100").code == 0
