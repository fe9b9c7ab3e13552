"""Turn whatever a reward function returned into a typed outcome; nothing becomes 0 by accident."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex, cast

from grpoctl.errors import PluginFailed
from grpoctl.rewards.sample import RewardOutcome

_TRACEBACK_CHARACTERS = 4000
_CALLER_FILE = str(Path(__file__).with_name("call.py"))
Extras = dict[str, float | str | bool]


def outcome_of(
    value: Any, *, name: str, seconds: float, key: str = "score", extras: Extras | None = None
) -> RewardOutcome:
    """Return the outcome that a returned value stands for.

    Args:
        value: a number of any library, None (cannot be scored), or a dict that has one of these under `key`.
        name: the reward's name, for messages.
        seconds: how long the call took.
        key: where a dict holds the reward; its other entries become extras.
        extras: values reported beside the reward.

    Raises:
        PluginFailed: the value is of a type that no row could make right (text, a list, a dict without `key`).
    """
    extras = dict(extras or {})
    if isinstance(value, Mapping):
        fields = cast("Mapping[Any, Any]", value)
        if key not in fields:
            raise PluginFailed(
                f"reward {name}: returned a dict with {sorted(map(str, fields))}; expected a key {key!r}"
            )
        extras |= {text(str(k)): plain(v) for k, v in fields.items() if k != key and v is not None}
        value = fields[key]
    if value is None:
        return RewardOutcome(reward=None, status="unscorable", error=None, seconds=seconds, extras=extras)
    number = _number(value, name)
    if math.isfinite(number):
        return RewardOutcome(reward=number, status="ok", error=None, seconds=seconds, extras=extras)
    message = f"returned {number}: refused as a bug in the reward; return None for a completion that cannot be scored"
    return RewardOutcome(reward=None, status="error", error=message, seconds=seconds, extras=extras)


def _number(value: Any, name: str) -> float:
    wanted = "expected a number, None or a dict with 'score'"
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, (SupportsFloat, SupportsIndex)):
        raise PluginFailed(f"reward {name}: returned {_shown(value)}; {wanted}")
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of a float
        return math.inf
    except (TypeError, ValueError) as error:  # an array of several values
        raise PluginFailed(f"reward {name}: returned {_shown(value)}; {wanted}") from error


def listed(value: Any, *, name: str, wanted: int) -> list[Any]:
    """Return a batch function's result as a list of the wanted length.

    Raises:
        PluginFailed: it is no list, or its length differs from the number of completions.
    """
    if value is None or isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise PluginFailed(
            f"reward {name}: returned {_shown(value)} for {wanted} completions; expected a list of {wanted}"
        )
    try:
        values = list(cast("Iterable[Any]", value))
    except TypeError as error:  # a tensor without dimensions is iterable by type only
        raise PluginFailed(f"reward {name}: returned {_shown(value)}; expected a list of {wanted}") from error
    if len(values) != wanted:
        raise PluginFailed(f"reward {name}: returned {len(values)} for {wanted} completions; expected one for each")
    return values


def raised(error: BaseException, *, seconds: float) -> RewardOutcome:
    """Return the outcome of a call that raised: crash for SystemExit, error for everything else."""
    status = "crash" if isinstance(error, SystemExit) else "error"
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == _CALLER_FILE:
        frames = frames.tb_next  # ours say nothing to the author of the function
    lines = "".join(traceback.format_exception(type(error), error, frames))
    first = traceback.format_exception_only(type(error), error)[-1].strip()
    message = text(f"{first}\n{lines[-_TRACEBACK_CHARACTERS:]}")
    return RewardOutcome(reward=None, status=status, error=message, seconds=seconds)


def plain(value: Any) -> float | str | bool:
    """Return a value as a bool, a float or text (JSON for lists and dicts)."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, SupportsFloat):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            return text(str(value))
    try:
        return text(json.dumps(value, default=str))
    except (TypeError, ValueError):  # keys that JSON has no form for, a list inside itself
        return text(repr(value))


def text(value: str) -> str:
    """Return text that can be written as UTF-8: lone surrogates are escaped."""
    return value.encode("utf-8", "backslashreplace").decode()


def _shown(value: Any) -> str:
    return text(f"{type(value).__name__} {value!r:.80}")
