"""The built-in rewards by name: each is made from its options and then called with one sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpoctl.errors import UsageError
from grpoctl.extras import did_you_mean
from grpoctl.rewards.builtin.answer import accuracy, answer_format
from grpoctl.rewards.builtin.gsm8k import gsm8k
from grpoctl.rewards.builtin.length import length, overlong
from grpoctl.rewards.builtin.math_answer import math
from grpoctl.rewards.builtin.programs import code
from grpoctl.rewards.builtin.repetition import repetition


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """A built-in reward."""

    make: Callable[..., Callable[..., Any]]
    """Takes the options by keyword, returns the function of one sample; raises UsageError for a wrong option."""
    in_process: bool
    """It is pure, linear in the completion and cannot hang, so it needs no child."""


BUILTINS: dict[str, Builtin] = {
    "accuracy": Builtin(make=accuracy, in_process=True),
    "format": Builtin(make=answer_format, in_process=True),
    "gsm8k": Builtin(make=gsm8k, in_process=True),
    "math": Builtin(make=math, in_process=False),
    "length": Builtin(make=length, in_process=True),
    "overlong": Builtin(make=overlong, in_process=True),
    "repetition": Builtin(make=repetition, in_process=True),
    "code": Builtin(make=code, in_process=False),
}


def builtin_function(name: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a built-in's function of one sample."""
    return BUILTINS[name].make(**kwargs)


def builtin_options(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all of a built-in's options, defaults filled in.

    Raises:
        UsageError: an option is unknown, missing or of a wrong value, or the built-in needs something not installed.
    """
    parameters = inspect.signature(BUILTINS[name].make).parameters
    for key in kwargs:
        if key not in parameters:
            raise UsageError(
                f"reward {name}: unknown option {key!r}{did_you_mean(key, parameters)}; it takes {_shown(parameters)}"
            )
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in kwargs]
    if missing:
        raise UsageError(f"reward {name}: option {missing[0]!r} is required; it takes {_shown(parameters)}")
    options = {key: kwargs.get(key, p.default) for key, p in parameters.items()}
    BUILTINS[name].make(**options)
    return options


def _shown(parameters: Mapping[str, inspect.Parameter]) -> str:
    return ", ".join(str(p.replace(annotation=p.empty)) for p in parameters.values()) or "no options"
