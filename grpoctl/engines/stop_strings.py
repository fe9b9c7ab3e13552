"""Where a completion ends by a stop string: one judge for every engine, on the completion's own text without special tokens.

Engines look at other texts (the prompt's end too, special tokens spelled out), so they may stop elsewhere or not at all.
What counts is here: a completion ends with the token that completes the first stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpoctl.engines.base import Sample, SamplingSettings, TokenIds
from grpoctl.engines.tokenizer import Tokenizer

SPARE_TOKENS = 16
"""Tokens looked at beyond a stop string's characters: parts of characters, and special tokens, which have no text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopStrings:
    """The stop strings of a job, read with its tokenizer."""

    tokenizer: Tokenizer
    texts: tuple[str, ...]

    def end(self, ids: Sequence[int] | TokenIds) -> int | None:
        """Return how many ids it takes until the text holds a stop string, None where it doesn't."""
        if not self._in(ids):
            return None
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._in(ids[:middle]) else (middle + 1, high)
        return low

    def ended_now(self, ids: Sequence[int] | TokenIds) -> bool:
        """Return whether the last of the ids completes a stop string, when none before it did."""
        tail = max(map(len, self.texts), default=0) + SPARE_TOKENS
        return self._in(ids[-tail:]) and self._in(ids)

    def _in(self, ids: Sequence[int] | TokenIds) -> bool:
        text = self.tokenizer.decode(ids)
        return any(stop in text for stop in self.texts)

    def cut(self, sample: Sample) -> Sample:
        """Return a sample as it ends by this judge; one that an engine let run on loses what came after."""
        end = self.end(sample.completion_ids) if self.texts and sample.error is None else None
        if end is None or (end == len(sample.completion_ids) and sample.finish_reason == "stop"):
            return sample
        ids, logprobs = sample.completion_ids[:end], sample.logprobs[:end]
        return replace(sample, completion_ids=ids, logprobs=logprobs, finish_reason="stop")


def split_stops(tokenizer: Tokenizer, settings: SamplingSettings) -> SamplingSettings:
    """Return settings whose stop strings that spell one special token are stop ids, which every engine takes alike."""
    special: dict[str, int] = {
        str(token): index for index, token in _added_tokens(tokenizer).items() if getattr(token, "special", False)
    }
    ids = [special[text] for text in settings.stop if text in special]
    texts = tuple(text for text in settings.stop if text not in special)
    return replace(settings, stop=texts, stop_token_ids=tuple(dict.fromkeys([*settings.stop_token_ids, *ids])))


def _added_tokens(tokenizer: Tokenizer) -> dict[int, Any]:
    return tokenizer.inner.added_tokens_decoder
