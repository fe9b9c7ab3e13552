"""Ask a reward endpoint: POST `{"samples": [...]}`, get `{"rewards": [...]}`; bounded retries, never a stand-in number.

The address comes from the config only, redirects are not followed, and no sample can change where a request goes.
"""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

from grpoctl.errors import PluginFailed
from grpoctl.rewards.calling.outcome import listed, outcome_of, text
from grpoctl.rewards.sample import RewardOutcome, RewardSample

MAX_ATTEMPTS = 4
_BACKOFF_SECONDS = 0.25
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_RETRIED = frozenset({408, 429, *range(500, 600)})


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Let a redirect surface as its status code."""


def longest_call_seconds(timeout_seconds: float) -> float:
    """Return an upper bound of one call with all its retries: every attempt's timeout, the waits between, some slack."""
    return MAX_ATTEMPTS * timeout_seconds + _BACKOFF_SECONDS * 2**MAX_ATTEMPTS + 5.0


class HttpReward:
    """A reward endpoint, called with batches."""

    def __init__(self, name: str, url: str, timeout_seconds: float) -> None:
        self._name = name
        self._url = url
        self._timeout_seconds = timeout_seconds
        self._opener = urllib.request.build_opener(_NoRedirects())

    def batch(self, samples: Sequence[RewardSample]) -> list[RewardOutcome] | RewardOutcome:
        """Return one outcome per sample; after the last retry, the same timeout or error for each.

        Raises:
            PluginFailed: the endpoint refuses the request (4xx, redirect) or answers something else than the contract says.
        """
        start = time.perf_counter()
        body = json.dumps({"samples": [asdict(sample) for sample in samples]}, default=str).encode()
        failure = ""
        timed_out = False
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                time.sleep(_BACKOFF_SECONDS * 2**attempt * random.uniform(0.5, 1.0))
            try:
                rewards = self._rewards(self._answer(body), len(samples))
            except (OSError, http.client.HTTPException) as error:
                timed_out = isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
                failure = text(f"{self._url}: {error!r} after {attempt + 1} attempts")
                continue
            seconds = (time.perf_counter() - start) / len(samples)
            return [outcome_of(reward, name=self._name, seconds=seconds) for reward in rewards]
        status = "timeout" if timed_out else "error"
        seconds = (time.perf_counter() - start) / len(samples)
        return [RewardOutcome(reward=None, status=status, error=failure, seconds=seconds) for _ in samples]

    def _answer(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "grpoctl"}
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout_seconds) as response:
                return cast(bytes, response.read(_MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            if error.code in _RETRIED:
                raise
            shown = error.read(500).decode("utf-8", "replace").strip()
            raise PluginFailed(
                f"reward {self._name}: {self._url} answered {error.code} {error.reason}: {shown or 'no body'}; "
                'expected 200 with a JSON body {"rewards": [...]}; not retried'
            ) from error

    def _rewards(self, answer: bytes, wanted: int) -> list[Any]:
        expected = 'expected {"rewards": [...]}'
        try:
            parsed: Any = json.loads(answer)
        except ValueError as error:
            raise PluginFailed(
                f"reward {self._name}: {self._url} answered no JSON ({answer[:80]!r}); {expected}"
            ) from error
        if not isinstance(parsed, dict) or not isinstance(cast("dict[str, Any]", parsed).get("rewards"), list):
            raise PluginFailed(f"reward {self._name}: {self._url} answered {answer[:80]!r}; {expected}")
        return listed(cast("dict[str, Any]", parsed)["rewards"], name=self._name, wanted=wanted)
