"""The built-in rewards against values worked out by hand."""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_fixtures.reward_samples import sample

from grpoctl.errors import InputRefused, UsageError
from grpoctl.rewards.builtin.gsm8k import last_number, marked_number
from grpoctl.rewards.builtin.registry import builtin_function
from grpoctl.rewards.calling.pool import RewardPool
from grpoctl.rewards.resolve.reference import resolve_reward

FIXTURES = Path(__file__).parent / "reward_fixtures"


def reward(name, completion="", *, answer=None, ids=None, **options):
    source = {} if answer is None else {"answer": answer}
    return builtin_function(name, options)(sample(completion, source=source, ids=ids))


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("<answer>85</answer>", "85", 1.0),
        ("words <answer> 85\n</answer> more", " 85 ", 1.0),
        ("<answer>85</answer>", 85, 1.0),
        ("<answer>85</answer>", 85.0, 1.0),
        ("<answer>0.5</answer>", 0.5, 1.0),
        ("<answer>85</answer>", "86", 0.0),
        ("<answer>85", "85", 0.0),
        ("85", "85", 0.0),
        ("<answer>1</answer><answer>85</answer>", "85", 0.0),
        ("</answer>85<answer>", "85", 0.0),
        ("<answer></answer>", "", 1.0),
    ],
)
def test_accuracy_compares_what_stands_in_the_only_answer_tag(completion, answer, expected):
    assert reward("accuracy", completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<answer>85</answer>", 1.0),
        ("<think>7+8=15,4+3+1=8</think><answer>85</answer>", 1.0),
        ("<think></think><answer>85</answer>", 1.0),
        ("<answer>85</answer>\n", 0.0),
        ("<answer> 85</answer>", 0.0),
        ("<think>a<b</think><answer>85</answer>", 0.0),
        ("so <answer>85</answer>", 0.0),
    ],
)
def test_strict_accuracy_matches_the_whole_completion(completion, expected):
    assert reward("accuracy", completion, answer="85", strict=True) == expected


@pytest.mark.parametrize(
    ("completion", "free", "with_think"),
    [
        ("<answer>1</answer>", 1.0, 0.0),
        ("<think>a\nb</think>\n<answer>1</answer>\n", 1.0, 1.0),
        ("<think>a</think> so <answer>1</answer>", 0.0, 0.0),
        ("<answer>1</answer><think>a</think>", 0.0, 0.0),
        ("<think>a<answer>1</answer></think>", 0.0, 0.0),
        ("<think><think>a</think><answer>1</answer>", 0.0, 0.0),
        ("<answer>1</answer> done", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_format_wants_the_blocks_in_order_and_nothing_else(completion, free, with_think):
    assert reward("format", completion) == free
    assert reward("format", completion, require_think=True) == with_think


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so #### 18", "18"),
        ("#### 1,234,567", "1234567"),
        ("#### $1,450.50 dollars", "1450.50"),
        ("#### -3", "-3"),
        ("A: 3 + 4 = 7.", "7"),
        ("A:\n\n 12 apples", "12"),
        ("#### 5\nQ: next one with 9?", "5"),
        ("#### 1 then #### 2", "2"),
        ("the answer is 18", None),
        ("MLA: 7", None),
        ("#### none", None),
        ("####", None),
    ],
)
def test_the_final_number_follows_the_last_marker(text, expected):
    assert marked_number(text) == (None if expected is None else Decimal(expected))


@given(st.integers(-(10**12), 10**12))
def test_a_number_reads_the_same_with_and_without_thousands_separators(number):
    assert last_number(f"about {number:,} in all") == last_number(f"x {number} y") == Decimal(number)


def test_gsm8k_compares_by_value_and_reads_both_forms_of_reference():
    assert reward("gsm8k", "#### 1,234.0", answer="1234") == 1.0
    assert reward("gsm8k", "#### 18", answer="She has 16-3=13 eggs.\n#### 18") == 1.0
    assert reward("gsm8k", "#### 13", answer="She has 16-3=13 eggs.\n#### 18") == 0.0
    assert reward("gsm8k", "18", answer="18") == 0.0
    assert reward("gsm8k", "#### 18", answer="eighteen") is None


def test_every_gsm8k_solution_scores_itself_and_no_neighbour():
    rows = [json.loads(line) for line in (FIXTURES / "gsm8k_sample.jsonl").read_text().splitlines()]
    assert len(rows) == 21
    for row, other in itertools.pairwise(rows):
        assert reward("gsm8k", row["answer"], answer=row["answer"]) == 1.0
        same = row["answer"].rpartition("#### ")[2] == other["answer"].rpartition("#### ")[2]
        assert reward("gsm8k", row["answer"], answer=other["answer"]) == float(same)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (10, 0.0), (11, -0.1), (15, -0.5), (20, -1.0), (99, -1.0)]
)
def test_length_falls_linearly_from_the_target_to_twice_the_target(num_tokens, expected):
    assert reward("length", ids=[1] * num_tokens, target=10) == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (101, -1.0)])
def test_overlong_is_dapo_s_equation_13(num_tokens, expected):
    assert reward("overlong", ids=[1] * num_tokens, max_tokens=100, buffer_tokens=20) == expected


@pytest.mark.parametrize(
    ("ids", "n", "expected"),
    [([1, 2, 3, 4], 2, 0.0), ([5, 5, 5, 5, 5], 2, -0.75), ([1, 2, 1, 2], 2, -1 / 3), ([1, 2], 3, 0.0), ([], 3, 0.0)],
)
def test_repetition_is_minus_the_share_of_repeated_ngrams(ids, n, expected):
    assert reward("repetition", ids=ids, n=n) == pytest.approx(expected, abs=1e-15)


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 5))
def test_repetition_stays_within_its_range(ids, n):
    assert -1.0 < reward("repetition", ids=ids, n=n) <= 0.0


@given(st.text(alphabet="<>/answerthik 0\n", max_size=200))
def test_text_rewards_are_zero_or_one_for_any_text(completion):
    for name, options in (("accuracy", {}), ("accuracy", {"strict": True}), ("format", {}), ("gsm8k", {})):
        answer = None if name == "format" else "1"
        assert reward(name, completion, answer=answer, **options) in (0.0, 1.0)


@pytest.mark.parametrize(
    "piece", ["<answer>", "</answer><answer>", "<think>", "#### ", "A:", "1,111,", "-", "$1.", "9" * 50]
)
@pytest.mark.timeout(60)  # quadratic work on this would take hours
def test_text_rewards_are_linear_in_hostile_text(piece):
    completion = piece * (400_000 // len(piece))
    for name, answer in (("accuracy", "1"), ("format", None), ("gsm8k", "1")):
        reward(name, completion, answer=answer)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "accuracy",
            {"colum": "x"},
            r"unknown option 'colum' \(did you mean column\?\); it takes column='answer', strict=False",
        ),
        ("length", {}, "option 'target' is required; it takes target"),
        ("length", {"target": 0}, "option target is 0; expected an integer of at least 1"),
        ("length", {"target": True}, "option target is True; expected an integer"),
        ("overlong", {"max_tokens": 10, "buffer_tokens": 20}, "buffer_tokens 20 is above max_tokens 10"),
        ("accuracy", {"strict": "yes"}, "option strict is 'yes'; expected true or false"),
        ("gsm8k", {"column": 3}, "option column is 3; expected the name of a column"),
    ],
)
def test_a_wrong_option_is_refused(name, options, message):
    with pytest.raises(UsageError, match=message):
        resolve_reward(name, kwargs=options)


def test_defaults_are_part_of_the_reference():
    assert resolve_reward("accuracy").kwargs == {"column": "answer", "strict": False}
    assert resolve_reward("repetition", kwargs={"n": 4}).kwargs == {"n": 4}


def test_a_null_reference_is_refused_before_any_call():
    rows = [
        sample("<answer>1</answer>", index=i, source={"gold": {"value": gold}}) for i, gold in enumerate(["1", None])
    ]
    reference = resolve_reward("accuracy", kwargs={"column": "gold.value"})
    with RewardPool([reference], num_workers=1, timeout_seconds=1) as pool:
        assert [o.reward for o in pool.score("accuracy", rows[:1])] == [1.0]
        with pytest.raises(InputRefused, match=r"reward accuracy \(accuracy\): gold.value is null in row p0@0#1"):
            pool.score("accuracy", rows)
