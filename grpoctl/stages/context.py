"""One process's surroundings in a stage: stop requests, which shards, what is kept warm, and what a person is told."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from grpoctl.engines.warm import Warm
from grpoctl.errors import UsageError
from grpoctl.processes.ranks import Ranks, join
from grpoctl.processes.stop import StopFlag
from grpoctl.settings.runtime import RuntimeConfig

log = logging.getLogger("grpoctl")
Item = TypeVar("Item")
PROGRESS_SECONDS: Final = 30.0
"""The least time between two lines of progress where there is no bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRange:
    """`--shards A-B/N`: this process writes shards A to B of N, both counted from 0 and included."""

    first: int
    last: int
    total: int

    @staticmethod
    def parse(text: str) -> ShardRange:
        """Read `A-B/N` or `A/N`.

        Raises:
            UsageError: anything else, or numbers out of range.
        """
        left, separator, total = text.partition("/")
        first, dash, last = left.partition("-")
        numbers = [first, last if dash else first, total]
        if not separator or not all(number.isdigit() for number in numbers):
            raise UsageError(f"--shards {text}: expected A-B/N or A/N, as in 0-3/16")
        result = ShardRange(first=int(numbers[0]), last=int(numbers[1]), total=int(numbers[2]))
        if not result.first <= result.last < result.total:
            raise UsageError(f"--shards {text}: expected 0 ≤ A ≤ B < N")
        return result

    def indices(self, num_shards: int) -> list[int]:
        """Return the selected shard numbers of a plan.

        Raises:
            UsageError: the plan has another number of shards.
        """
        if self.total != num_shards:
            raise UsageError(f"--shards …/{self.total}: this work is cut into {num_shards}; write …/{num_shards}")
        return list(range(self.first, self.last + 1))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}/{self.total}"


@dataclass(slots=True, kw_only=True)
class Context:
    """What a stage is run in.

    Args:
        stop: looked at between shards and steps
        shards: those that this process is to write, None for all
        dry_run: inputs are checked and nothing is written
        quiet: no progress bar
        warm: kept between the stages of this process
    """

    stop: StopFlag = field(default_factory=StopFlag)
    shards: ShardRange | None = None
    dry_run: bool = False
    quiet: bool = False
    warm: Warm = field(default_factory=Warm)

    @property
    def ranks(self) -> Ranks:
        """The processes that run the stage."""
        return self.warm.ranks

    def join(self, runtime: RuntimeConfig) -> Ranks:
        """Return this process's place among those that run the stage, connected to the others."""
        self.warm.ranks = join(runtime.device)
        return self.warm.ranks

    def selected(self, num_shards: int) -> list[int]:
        """Return the shards that this process is to write."""
        return list(range(num_shards)) if self.shards is None else self.shards.indices(num_shards)

    def follow(self, items: Sequence[Item], label: str) -> Iterator[Item]:
        """Yield items, checking for a stop request before each and telling progress on stderr, after an item."""
        started = told = time.monotonic()
        for number, item in enumerate(_with_bar(items, label, quiet=self.quiet)):
            with self.ranks.agreed():  # a signal to one process stops all of them, before the same item
                self.stop.check()
            yield item
            now = time.monotonic()
            if not sys.stderr.isatty() and now - told >= PROGRESS_SECONDS:
                told = now
                rate = (number + 1) / (now - started)
                left = (len(items) - number - 1) / rate
                log.info("%s %d/%d, %.2f/s, %.0f s left", label, number + 1, len(items), rate, left)


def _with_bar(items: Sequence[Item], label: str, *, quiet: bool) -> Iterable[Item]:
    if quiet or not sys.stderr.isatty() or len(items) < 2:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description=label, console=Console(stderr=True), transient=True)
