"""Rewards for completions that put their answer in `<answer>…</answer>`, thoughts before it in `<think>…</think>`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from grpoctl.rewards.builtin.options import require_bool, require_column
from grpoctl.rewards.columns import value_at
from grpoctl.rewards.sample import RewardSample

_ANSWER = re.compile(r"<answer>(.*)</answer>", re.DOTALL)
_STRICT = re.compile(r"(?:<think>[^<]*</think>)?<answer>([^<]*)</answer>")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def accuracy(*, column: str = "answer", strict: bool = False) -> Callable[[RewardSample], float]:
    """Return a reward of 1.0 where the one `<answer>` holds the reference, else 0.0.

    Args:
        column: the reference's column, or a dotted path; both texts are stripped before they are compared.
        strict: the whole completion must read `(<think>[^<]*</think>)?<answer>REFERENCE</answer>`, with nothing to strip.
    """
    require_column("accuracy", "column", column)
    require_bool("accuracy", "strict", strict)

    def reward(sample: RewardSample) -> float:
        reference = reference_text(value_at(sample.source, column))
        if strict:
            whole = _STRICT.fullmatch(sample.completion)
            return float(whole is not None and whole[1] == reference)
        answer = answer_text(sample.completion)
        return float(answer is not None and answer == reference)

    return reward


def answer_format(*, require_think: bool = False) -> Callable[[RewardSample], float]:
    """Return a reward of 1.0 where the completion is an optional `<think>` block and one `<answer>` block, else 0.0.

    Args:
        require_think: without a `<think>` block the reward is 0.0.
    """
    require_bool("format", "require_think", require_think)

    def reward(sample: RewardSample) -> float:
        think_open, think_close, answer_open, answer_close = (sample.completion.count(tag) for tag in _TAGS)
        if (answer_open, answer_close) != (1, 1) or (think_open, think_close) not in {(0, 0), (1, 1)}:
            return 0.0
        if require_think and not think_open:
            return 0.0
        return float(_well_ordered(sample.completion.strip(), has_think=bool(think_open)))

    return reward


def answer_text(completion: str) -> str | None:
    """Return what stands in the only `<answer>` tag, stripped; None where there is no tag, or more than one."""
    if completion.count("<answer>") != 1 or completion.count("</answer>") != 1:
        return None
    found = _ANSWER.search(completion)
    return found[1].strip() if found else None


def reference_text(value: Any) -> str:
    """Return a reference as text; a whole number that a table stored as a float reads like an integer."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _well_ordered(completion: str, *, has_think: bool) -> bool:
    """Tell whether the blocks, each present once, follow each other with only white space between."""
    if has_think:
        if not completion.startswith("<think>"):
            return False
        completion = completion.partition("</think>")[2].lstrip()
    return completion.startswith("<answer>") and completion.endswith("</answer>")
