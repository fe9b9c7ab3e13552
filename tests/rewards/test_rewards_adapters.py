"""Every signature gets what its home gives it, and what it returns comes back as outcomes."""

from __future__ import annotations

from pathlib import Path

import pytest
from reward_fixtures.reward_samples import sample

from grpoctl.errors import UsageError
from grpoctl.rewards.calling.pool import RewardPool
from grpoctl.rewards.resolve.reference import resolve_reward

USER = Path(__file__).parent / "reward_fixtures" / "user_rewards.py"
MESSAGES = [{"role": "user", "content": "q"}]


def scored(function, rows, *, kwargs=None, pool=None):
    reference = resolve_reward(f"{USER}:{function}", kwargs=kwargs)
    with RewardPool([reference], num_workers=1, timeout_seconds=30, **(pool or {})) as running:
        outcomes = running.score(function, rows)
    assert [o.error for o in outcomes] == [None] * len(rows)
    return outcomes


def rewards(function, rows, **given):
    return [o.reward for o in scored(function, rows, **given)]


def rows(*completions, **given):
    return [sample(c, index=i, **given) for i, c in enumerate(completions)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [("newcomer", [1.0, 0.0]), ("decorated", [2.0, 0.0]), ("judge", [1.0, 0.0]), ("positional_only", [1.0, 0.0])],
)
def test_a_row_function_gets_fields_and_columns_by_name(function, expected):
    assert rewards(function, rows("4", "5", source={"answer": "4", "unused": 1})) == expected


def test_a_row_function_may_take_the_whole_sample():
    assert rewards("typed", rows("abc", source={"a": 1})) == [3.0]
    [outcome] = scored("typed", rows("abc"))
    assert (outcome.status, outcome.reward) == ("unscorable", None)


def test_an_optional_parameter_takes_its_column_where_there_is_one():
    assert rewards("keyword_only", rows("x")) == [3.0]
    assert rewards("keyword_only", rows("x", source={"level": 5})) == [5.0]
    assert rewards("keyword_only", rows("x", source={"level": 5}), kwargs={"level": 7}) == [7.0]


def test_double_star_takes_all_fields_and_columns():
    assert rewards("everything", rows("x", source={"a": 1, "b": 2})) == [7.0 + 2]


def test_trl_completions_are_texts_for_text_prompts():
    outcomes = scored("trl_style", rows("4", "5", source={"answer": "4", "level": 1}), pool={"iteration": 3})
    assert [o.reward for o in outcomes] == [5.0, 5.0]
    assert [o.extras for o in outcomes] == [
        {"seen": "4", "share": 0.25, "more": "level"},
        {"seen": "5", "share": 0.25, "more": "level"},
    ]


def test_trl_completions_are_message_lists_for_message_prompts_and_none_is_unscorable():
    given = [
        sample("4", index=0, prompt=MESSAGES, source={"answer": "4"}),
        sample("5", index=1, prompt=MESSAGES, source={"answer": ""}, num_tokens=9),
    ]
    outcomes = scored("trl_style", given)
    assert [(o.status, o.reward) for o in outcomes] == [("ok", 2.0), ("unscorable", None)]
    assert [o.extras["seen"] for o in outcomes] == ["assistant:4", "assistant:5"]


def test_async_trl_functions_are_awaited():
    assert rewards("trl_async", rows("4", "5", source={"answer": "4"})) == [1.0, 0.0]


def test_a_factory_gets_its_arguments_once():
    assert rewards("make_length_reward", rows("abc", "abcd"), kwargs={"limit": 3}) == [1.0, 0.0]


def test_verl_gets_its_four_arguments_from_nested_columns():
    source = {
        "data_source": "gsm8k",
        "reward_model": {"ground_truth": "4", "style": "rule"},
        "extra_info": {"split": "test"},
    }
    outcomes = scored("verl_style", rows("4", "5", source={**source, "bonus": 100.0}))
    assert [o.reward for o in outcomes] == [1.0, 0.0]
    assert outcomes[0].extras == {"source": "gsm8k", "info": '["num_turns", "rollout_reward_scores", "split"]'}


def test_verl_falls_back_to_flat_columns_and_takes_bound_arguments():
    assert rewards("verl_style", rows("4", source={"data_source": "d", "answer": "4"}), kwargs={"bonus": 0.5}) == [1.5]
    assert rewards("verl_style", rows("4", source={"data_source": "d", "ground_truth": "4", "answer": "no"})) == [1.0]
    assert rewards("partial", rows("4", source={"data_source": "d", "answer": "4"})) == [2.0]


def test_async_verl_functions_get_nothing_but_the_four():
    assert rewards("verl_async", rows("4", source={"data_source": "d", "answer": "4", "level": 3})) == [1.0]


def test_verl_batch_gets_plurals():
    outcomes = scored("verl_batch_style", rows("4", "5", "4", source={"data_source": "d", "answer": "4"}))
    assert [(o.reward, o.extras["n"]) for o in outcomes] == [(1.0, 3.0), (0.0, 3.0), (1.0, 3.0)]


def test_openrlhf_gets_prompt_and_completion_as_one_text():
    outcomes = scored("openrlhf_style", rows("4", "5", source={"label": "4"}))
    assert [o.reward for o in outcomes] == [1.0, 0.0]
    assert outcomes[0].extras == {"scores": 0.5, "length": 2.0}
    templated = rows("4", prompt=MESSAGES, prompt_text="<user>q<assistant>", source={"label": "4"})
    assert scored("openrlhf_style", templated)[0].extras["length"] == len("<user>q<assistant>4")


def test_several_rewards_share_a_pool_and_names_must_differ():
    references = [resolve_reward(f"{USER}:newcomer"), resolve_reward(f"{USER}:decorated"), resolve_reward("accuracy")]
    given = rows("<answer>4</answer>", source={"answer": "4"})
    with RewardPool(references, num_workers=2, timeout_seconds=30) as pool:
        assert [pool.score(r.name, given)[0].reward for r in references] == [0.0, 0.0, 1.0]
    with pytest.raises(UsageError, match="two are named 'accuracy'; give one another name"):
        RewardPool([resolve_reward("accuracy"), resolve_reward("builtin:accuracy")], num_workers=1, timeout_seconds=1)


def test_no_rows_give_no_outcomes():
    assert scored("newcomer", []) == []
