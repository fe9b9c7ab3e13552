"""Checks of built-in rewards' options, which come from YAML or the command line."""

from __future__ import annotations

from typing import Any

from grpoctl.errors import UsageError


def require_positive_int(reward: str, option: str, value: Any) -> None:
    """Raise UsageError unless the value is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"reward {reward}: option {option} is {value!r}; expected an integer of at least 1")


def require_positive_number(reward: str, option: str, value: Any) -> None:
    """Raise UsageError unless the value is a number above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise UsageError(f"reward {reward}: option {option} is {value!r}; expected a number above 0")


def require_bool(reward: str, option: str, value: Any) -> None:
    """Raise UsageError unless the value is true or false."""
    if not isinstance(value, bool):
        raise UsageError(f"reward {reward}: option {option} is {value!r}; expected true or false")


def require_column(reward: str, option: str, value: Any) -> None:
    """Raise UsageError unless the value can name a column."""
    if not isinstance(value, str) or not value:
        raise UsageError(f"reward {reward}: option {option} is {value!r}; expected the name of a column")
