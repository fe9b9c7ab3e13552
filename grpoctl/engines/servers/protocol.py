"""What the rest asks of a server, whichever program it runs; one file a program says how that is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from grpoctl.engines.base import Sample, SampleRequest, SamplingSettings
from grpoctl.engines.servers.link import Link

NO_LOGPROB: Final = -9999.0
"""What vLLM writes for a log-probability of minus infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says about itself.

    Args:
        program: `vllm` or `sglang`
        model: what it loaded, a path or a name
        weight_version: its own name of the weights, None where it doesn't say
        dtype: floating-point type, None where it doesn't say
        max_prompt_tokens: longest prompt it takes
        max_total_tokens: longest prompt and completion together
    """

    program: str
    version: str
    model: str
    weight_version: str | None
    dtype: str | None
    max_prompt_tokens: int
    max_total_tokens: int

    def __str__(self) -> str:
        weights = "" if self.weight_version is None else f", weights {self.weight_version}"
        return f"{self.program} {self.version} server (model {self.model}{weights})"


class Server(Protocol):
    """A program that samples over HTTP; stateless but for what it said about itself."""

    facts: ServerFacts
    seeded: bool
    """Whether a request's seed decides its draw."""
    truncation: bool
    """Whether log-probabilities are those of the distribution after top_p, top_k and min_p."""

    async def sample(self, link: Link, request: SampleRequest, settings: SamplingSettings) -> Sample:
        """Draw one completion."""
        ...

    async def forced(self, link: Link, ids: Sequence[int]) -> list[float]:
        """Return the (T − 1,) log-probabilities of all ids but the first, temperature 1, computed anew."""
        ...

    async def top_2(self, link: Link, ids: Sequence[int], temperature: float) -> list[tuple[int, float]]:
        """Return the two likeliest next ids and the log-probabilities that sampling reports for them."""
        ...

    async def load(self, link: Link, folder: Path, version: str) -> None:
        """Load a policy folder's weights in place, forget cached prefixes, and take `version` as their name."""
        ...


def checked_sample(
    *,
    ids: Sequence[Any],
    logprobs: Sequence[Any],
    logprob_ids: Sequence[Any],
    num_sampled: Any,
    reason: str,
) -> Sample:
    """Build a sample from a server's lists; anything missing or crossed fails the row, never becomes a number.

    Args:
        ids: sampled ids
        logprobs: one a token, None where the server has none
        logprob_ids: the id that each log-probability is said to belong to
        num_sampled: how many tokens the server says it sampled, None where it doesn't
        reason: our finish_reason
    """
    error = None
    missing = sum(value is None or value <= NO_LOGPROB for value in logprobs) + max(0, len(ids) - len(logprobs))
    if missing or len(logprobs) != len(ids):
        error = f"the server gave {len(logprobs) - min(missing, len(logprobs))} log-probabilities for {len(ids)} tokens"
    elif list(logprob_ids) != list(ids):
        error = "the server's log-probabilities belong to other tokens than it sampled"
    elif num_sampled is not None and num_sampled != len(ids):
        error = f"the server gave {len(ids)} ids for {num_sampled} sampled tokens"
    elif reason in ("abort", "error"):
        error = f"the server ended the request with {reason}"
    values = [np.nan if value is None or value <= NO_LOGPROB else value for value in logprobs]
    return Sample(
        completion_ids=np.asarray(ids, dtype=np.int32),
        logprobs=np.asarray(values, dtype=np.float32),
        finish_reason=reason,
        error=error,
    )
