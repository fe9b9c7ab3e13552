"""A reward for grade-school word problems: the last number after `####` or `A:` equals the reference's."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

from grpoctl.rewards.builtin.answer import reference_text
from grpoctl.rewards.builtin.options import require_column
from grpoctl.rewards.columns import value_at
from grpoctl.rewards.sample import RewardSample

_MARKER = re.compile(r"####|(?<![A-Za-z])A:")
_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def gsm8k(*, column: str = "answer") -> Callable[[RewardSample], float | None]:
    """Return a reward of 1.0 where the completion's final number equals the reference's, else 0.0.

    The completion's number is the last one on the line after its last `####` or `A:`; without such a marker there is none
    and the reward is 0.0. Numbers are compared by value: 1,234 = 1234.0. A reference without a number is unscorable (None).

    Args:
        column: the reference's column: a number, or the data set's full solution with its `#### 18`.
    """
    require_column("gsm8k", "column", column)

    def reward(sample: RewardSample) -> float | None:
        text = reference_text(value_at(sample.source, column))
        reference = marked_number(text)
        if reference is None:
            reference = last_number(text)
        if reference is None:
            return None
        return float(marked_number(sample.completion) == reference)

    return reward


def marked_number(text: str) -> Decimal | None:
    """Return the last number on the first line with text after the last marker; None without marker or number."""
    markers = list(_MARKER.finditer(text))
    if not markers:
        return None
    lines = text[markers[-1].end() :].strip().splitlines()
    return last_number(lines[0]) if lines else None


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text: digits with an optional sign, dollar, thousands separators and decimals."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("$", "")) if numbers else None
