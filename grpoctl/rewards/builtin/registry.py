"""The built-in rewards by name: each is made from its options and then called with one sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

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
    identity: str
    """What stands for its verdicts in the fingerprint of scores."""
    in_process: bool
    """It is pure, linear in the completion and cannot hang, so it needs no child."""


IDENTITIES: Final = {
    "answer": "4e32c3b36be5e168cd220110597d8224ade374570108632fdf77c9bff0cb39ed",
    "gsm8k": "481fcfb003d627b76a47d4013014c87bfe01111e749196e0cfab5964b0d65155",
    "math": "fa2130b3c4d84ffb2e9684c0224684c5425826013ae6c1aaae519dc16bb6b8ae",
    "code": "17cc56b528850c5dd4675f2ef7978abcbbd2b2b1ebfbc0934ea84aee20bf0a10",
    "length": "9c704b00e01df5f7e8c5c620131465c14f839141969405db04820f539f523225",
    "repetition": "8c7f85a04b30d4ca31e05cf1a07f5db8590a71afcea9524f51273fc7ff61ba98",
}
"""What stands for each file's verdicts in the fingerprint of scores. A change by which a verdict can change takes a new one
(any 64 hexadecimal digits); a change that only moves code doesn't, so that begun runs go on."""
BUILTINS: Final = {
    "accuracy": Builtin(make=accuracy, identity=IDENTITIES["answer"], in_process=True),
    "format": Builtin(make=answer_format, identity=IDENTITIES["answer"], in_process=True),
    "gsm8k": Builtin(make=gsm8k, identity=IDENTITIES["gsm8k"], in_process=True),
    "math": Builtin(make=math, identity=IDENTITIES["math"], in_process=False),
    "length": Builtin(make=length, identity=IDENTITIES["length"], in_process=True),
    "overlong": Builtin(make=overlong, identity=IDENTITIES["length"], in_process=True),
    "repetition": Builtin(make=repetition, identity=IDENTITIES["repetition"], in_process=True),
    "code": Builtin(make=code, identity=IDENTITIES["code"], in_process=False),
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
