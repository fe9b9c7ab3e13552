"""What a reward sees of one completion, and what comes back for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSample:
    """Everything that a reward may see of one completion: plain Python values, so it can be pickled."""

    sample_id: str
    prompt: str | list[dict[str, Any]]
    """As the user gave it: text, or a list of messages."""
    completion: str
    prompt_ids: list[int]
    completion_ids: list[int]
    finish_reason: str
    """stop, length, abort or error."""
    source: dict[str, Any]
    """The prompt row's other columns."""
    prompt_text: str | None = None
    """The prompt as the model saw it (chat template applied); None where `prompt` is that text already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """One reward function's verdict on one completion."""

    reward: float | None
    """None unless status is ok; never a stand-in number."""
    status: str
    """ok, unscorable (the function returned None), timeout, error (it raised, or returned NaN), crash (its process died)."""
    error: str | None
    """One line, followed by the traceback where there is one; None for ok and unscorable."""
    seconds: float
    extras: dict[str, float | str | bool] = field(default_factory=dict[str, "float | str | bool"])
    """What the function reported beside the reward: a verl dict's other keys, TRL's log_extra and log_metric."""


FAILED_STATUSES = frozenset({"timeout", "error", "crash"})
"""The statuses that count against an error budget."""
