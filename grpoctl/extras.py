"""Packages that come with an extra, and two small helps for messages."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Final

from grpoctl.errors import UsageError

EXTRAS: Final = {
    "torch": "torch",
    "transformers": "torch",
    "safetensors": "torch",
    "peft": "torch",
    "vllm": "vllm",
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "mbridge": "megatron",
    "httpx": "server",
    "huggingface_hub": "hub",
}
"""Packages that a stage imports when it runs, by the extra they come with."""


def require(*packages: str) -> None:
    """Raise UsageError with the pip line where a package of an extra isn't installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UsageError(_missing(package))


@contextmanager
def missing_extras() -> Generator[None]:
    """Turn the import error of a package that belongs to an extra into the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".", maxsplit=1)[0]
        if package not in EXTRAS:
            raise
        raise UsageError(_missing(package)) from error


def _missing(package: str) -> str:
    return f'{package} is not installed; pip install "grpoctl[{EXTRAS[package]}]"'


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ` (did you mean X?)` for the closest of the known words, an empty text where none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]}?)" if close else ""
