"""Out of memory, as an error that says what to turn down."""

from __future__ import annotations

from typing import Any

from grpoctl.errors import TryAgain


class memory_errors:
    """Turn an out-of-memory error of the device into TryAgain with what helps."""

    def __init__(self, doing: str, advice: str) -> None:
        self.doing = doing
        self.advice = advice

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        import torch

        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise TryAgain(
                f"out of memory while {self.doing}; finished shards are kept: {self.advice} and rerun"
            ) from error
