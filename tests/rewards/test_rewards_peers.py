"""Reward functions of TRL and verl, unmodified, through the adapters on GSM8K rows: equal to calling them directly.

The packages are wanted for their reward functions only, so they come without their dependencies (verl's pin another torch).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from reward_fixtures.reward_samples import sample

from grpoctl.errors import UsageError
from grpoctl.rewards.calling.pool import RewardPool
from grpoctl.rewards.resolve.reference import check_columns, resolve_reward
from grpoctl.rewards.resolve.source import module_file

FIXTURES = Path(__file__).parent / "reward_fixtures"
INSTALL = (
    "pip install --no-deps trl==1.16.0 verl==0.9.1 math-verify==0.9.0 latex2sympy2_extended==1.11.0 "
    "antlr4-python3-runtime==4.13.2"
)
ROWS = [json.loads(line) for line in (FIXTURES / "gsm8k_sample.jsonl").read_text().splitlines()]
GOLD = [row["answer"].rpartition("#### ")[2].replace(",", "") for row in ROWS]


@pytest.fixture(autouse=True)
def _peers_are_installed():
    missing = [name for name in ("trl", "verl", "math_verify") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.fail(f"{', '.join(missing)} not installed; run: {INSTALL}")


def completions(form):
    """Two thirds right answers, in a peer's form, the rest wrong or without an answer."""
    made = [form.format(gold) for gold in GOLD]
    made[1::3] = [form.format("99999") for _ in made[1::3]]
    made[5] = "I do not know."
    return made


def samples(texts, *, conversational=False, source):
    return [
        sample(
            text,
            index=i,
            prompt=[{"role": "user", "content": row["question"]}] if conversational else row["question"],
            source={key: values[i] for key, values in source.items()},
            ids=list(range(i % 7)) * (1 + i % 3),
        )
        for i, (row, text) in enumerate(zip(ROWS, texts, strict=True))
    ]


def adapted(ref, given, **options):
    reference = resolve_reward(ref, **options)
    check_columns(reference, list(given[0].source))
    with RewardPool([reference], num_workers=1, timeout_seconds=120) as pool:
        outcomes = pool.score(reference.name, given)
    assert [o.error for o in outcomes] == [None] * len(given)
    return reference, outcomes


TRL_FORMS = {
    "accuracy_reward": r"So it is \boxed{{{}}}.",
    "reasoning_accuracy_reward": r"<think>\boxed{{3}}</think> It is \boxed{{{}}}.",
    "think_format_reward": "<think>counting</think>\n{}",
}


@pytest.mark.parametrize("function", TRL_FORMS)
def test_trl_reward_functions_give_what_they_give_directly(function):
    texts = completions(TRL_FORMS[function])
    solutions = [f"${gold}$" for gold in GOLD[:-1]] + ["no formula at all"]
    direct = getattr(importlib.import_module("trl.rewards"), function)
    expected = direct([[{"role": "assistant", "content": text}] for text in texts], solution=solutions)
    given = samples(texts, conversational=True, source={"solution": solutions})
    reference, outcomes = adapted(f"trl.rewards:{function}", given)
    assert reference.signature == "trl"
    assert [o.reward for o in outcomes] == expected
    assert {0.0, 1.0} <= {o.reward for o in outcomes}


def test_trl_s_none_is_unscorable_and_its_extra_columns_arrive():
    given = samples([r"\boxed{1}"] * len(ROWS), conversational=True, source={"solution": ["no formula"] + ["$1$"] * 20})
    _, outcomes = adapted("trl.rewards:accuracy_reward", given)
    assert [o.status for o in outcomes] == ["unscorable"] + ["ok"] * 20
    assert outcomes[0].extras["gold_parsed"] == "[unparseable]"
    assert outcomes[1].extras["solution"] == "$1$"


@pytest.mark.parametrize(
    ("factory", "kwargs"),
    [
        ("get_soft_overlong_punishment", {"max_completion_len": 12, "soft_punish_cache": 8}),
        ("get_repetition_penalty_reward", {"ngram_size": 2, "max_penalty": -1.0}),
        ("get_cosine_scaled_reward", {"max_len": 10}),
    ],
)
def test_trl_reward_factories_are_called_with_the_user_s_arguments(factory, kwargs):
    texts = completions(TRL_FORMS["accuracy_reward"])
    given = samples(texts, conversational=True, source={"solution": [f"${gold}$" for gold in GOLD]})
    direct = getattr(importlib.import_module("trl.rewards"), factory)(**kwargs)
    expected = direct(
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        solution=[s.source["solution"] for s in given],
        completion_ids=[s.completion_ids for s in given],
    )
    reference, outcomes = adapted(f"trl.rewards:{factory}", given, kwargs=kwargs, signature="trl")
    assert reference.target.factory
    assert [o.reward for o in outcomes] == expected
    assert len(set(expected)) > 2


def test_overlong_and_repetition_agree_with_trl_s():
    given = samples(completions("{}"), source={})
    rewards = importlib.import_module("trl.rewards")
    ids = [s.completion_ids for s in given]
    _, overlong = adapted("overlong", given, kwargs={"max_tokens": 12, "buffer_tokens": 8})
    assert [o.reward for o in overlong] == rewards.get_soft_overlong_punishment(12, 8)(completion_ids=ids)
    _, repetition = adapted("repetition", given, kwargs={"n": 2})
    assert [o.reward for o in repetition] == pytest.approx(rewards.get_repetition_penalty_reward(2)(completion_ids=ids))


VERL_FORMS = {
    "gsm8k": "So it is\n#### {}",
    "math_reward": r"So it is \boxed{{{}}}.",
    "math_dapo": "So it is\nAnswer: {}",
    "search_r1_like_qa_em": "<answer> {} </answer>",
}


@pytest.mark.parametrize("module", VERL_FORMS)
def test_verl_reward_functions_give_what_they_give_directly(module):
    path = module_file(f"verl.utils.reward_score.{module}")
    assert path is not None
    truths = [{"target": [gold]} for gold in GOLD] if module == "search_r1_like_qa_em" else list(GOLD)
    texts = completions(VERL_FORMS[module])
    expected = [_direct(path, text, truth) for text, truth in zip(texts, truths, strict=True)]
    source = {"data_source": ["openai/gsm8k"] * len(ROWS), "reward_model": [{"ground_truth": t} for t in truths]}
    reference, outcomes = adapted(f"{path}:compute_score", samples(texts, source=source))
    assert reference.signature == "verl"
    scores = [value["score"] if isinstance(value, dict) else value for value in expected]
    assert [o.reward for o in outcomes] == [float(score) for score in scores]
    assert len(set(scores)) > 1
    if module == "math_dapo":
        assert [o.extras["acc"] for o in outcomes] == [value["acc"] for value in expected]


def _direct(path, text, truth):
    name = f"direct_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name].compute_score(text, truth)


def test_gsm8k_agrees_with_verl_s():
    texts = completions(VERL_FORMS["gsm8k"])
    given = samples(texts, source={"answer": [row["answer"] for row in ROWS]})
    path = module_file("verl.utils.reward_score.gsm8k")
    _, outcomes = adapted("gsm8k", given)
    assert [o.reward for o in outcomes] == [float(_direct(path, t, g)) for t, g in zip(texts, GOLD, strict=True)]


MATH = [
    (r"so \boxed{\frac{1}{2}}", "1/2", 1.0),
    (r"so \boxed{0.5}", r"$\frac{1}{2}$", 1.0),
    (r"so \boxed{\frac{1}{3}}", "1/2", 0.0),
    ("work\n#### 1,234", "1234", 1.0),
    ("work\n#### 18", "She has 16-3=13.\n#### 18", 1.0),
    (r"\boxed{18 \text{ cm}}", "18", 1.0),
    (r"first \boxed{3}, then \boxed{x^2+2x+1}", "$(x+1)^2$", 1.0),
    (r"first \boxed{3}, then \boxed{18}", "18", 1.0),
    (r"first \boxed{18}, then \boxed{3}", "18", 0.0),
    (r"\boxed{1} and \boxed{2}", r"\boxed{2} or \boxed{1}", 1.0),
    ("no formula", "18", 0.0),
    ("the answer is 18", "18", 1.0),
    ("18", "", None),
]


def test_math_compares_expressions_by_value():
    given = [sample(c, index=i, source={"answer": reference}) for i, (c, reference, _) in enumerate(MATH)]
    _, outcomes = adapted("math", given)
    assert [o.reward for o in outcomes] == [expected for _, _, expected in MATH]


def test_math_without_math_verify_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UsageError, match=r'run: pip install "grpoctl\[math\]"'):
        resolve_reward("math")
