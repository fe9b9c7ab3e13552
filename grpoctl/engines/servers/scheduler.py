"""One shard's requests over several replicas: long prompts first, the least loaded replica next, and no request lost.

A replica that can't be reached, doesn't answer its health check, or finishes nothing for too long is suspended: what it held
is asked elsewhere, and it comes back only after it has proven its weights again (a restarted server has its old ones).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from grpoctl.engines.base import Sample, SampleRequest, SamplingSettings
from grpoctl.engines.servers.link import Link, ServerBusy, ServerLost, backoff_seconds
from grpoctl.engines.servers.protocol import Server
from grpoctl.errors import InputRefused, TryAgain

log = logging.getLogger("grpoctl")
MAX_ASKED: Final = 3
"""Times that one completion is asked for before its row fails: aborted, or refused by a busy or dying server."""
MAX_STRIKES: Final = 3
"""Requests in a row that a replica may fail to answer while it says it is busy."""
RECOVERIES: Final = 4
"""Tries to reach a suspended replica, with growing waits."""
MAX_COMEBACKS: Final = 5
"""Times that a replica may come back in one shard."""
PULSE_SECONDS: Final = 10.0
PULSE_TIMEOUT_SECONDS: Final = 30.0


@dataclass(slots=True, kw_only=True)
class Replica:
    """One server as a shard uses it."""

    link: Link
    server: Server
    live: bool = True
    held: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, asyncio.Task[None]])
    strikes: int = 0
    comebacks: int = 0
    progressed: float = 0.0


class Scheduler:
    """The requests of one call and where each stands."""

    def __init__(
        self,
        requests: Sequence[SampleRequest],
        settings: SamplingSettings,
        replicas: Sequence[Replica],
        *,
        admit: Callable[[Link], Awaitable[Server]],
        concurrency: int,
        timeout_seconds: float,
    ) -> None:
        self._requests = requests
        self._settings = settings
        self._replicas = list(replicas)
        self._admit = admit
        self._concurrency = concurrency
        self._timeout = timeout_seconds
        self._waiting = deque(sorted(range(len(requests)), key=lambda i: (-len(requests[i].prompt_ids), i)))
        self._asked = [0] * len(requests)
        self._results: dict[int, Sample] = {}
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._reasons: dict[str, str] = {}

    async def run(self) -> list[Sample]:
        """Return one sample for each request.

        Raises:
            TryAgain: no replica is left.
            InputRefused: a server refuses a request.
        """
        for replica in self._replicas:
            self._start("watch", self._watch, replica)
        try:
            while len(self._results) < len(self._requests):
                self._hand_out()
                self._changed.clear()
                await self._changed.wait()
                if self._failure is not None:
                    raise self._failure
                alive = any(replica.live for replica in self._replicas) or self._recovering
                if not alive and len(self._results) < len(self._requests):
                    shown = "; ".join(f"{url}: {reason}" for url, reason in self._reasons.items())
                    raise TryAgain(f"no server is left ({shown}); finished shards are kept, rerun to continue")
        finally:
            await self._cancel_all()
        return [self._results[number] for number in range(len(self._requests))]

    @property
    def _recovering(self) -> bool:
        return any(task.get_name() == "recover" for task in self._background)

    def _hand_out(self) -> None:
        while self._waiting:
            free = [r for r in self._replicas if r.live and len(r.held) < self._concurrency]
            if not free:
                return
            replica = min(free, key=lambda r: len(r.held))
            number = self._waiting.popleft()
            if not replica.held:
                replica.progressed = time.monotonic()
            self._asked[number] += 1
            replica.held[number] = asyncio.ensure_future(self._guarded(self._ask, replica, number))

    def _start(self, name: str, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(work, *arguments), name=name)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        self._changed.set()

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Hand any failure that isn't a server's to `run`."""
        try:
            await work(*arguments)
        except Exception as error:  # noqa: BLE001 - raised again by run, on the caller's stack
            self._failure = self._failure or error
        finally:
            self._changed.set()

    async def _ask(self, replica: Replica, number: int) -> None:
        trouble: str | None = None
        lost = False
        sample: Sample | None = None
        try:
            sample = await replica.server.sample(replica.link, self._requests[number], self._settings)
        except ServerBusy as error:
            trouble = str(error)
            replica.strikes += 1
        except ServerLost as error:
            trouble, lost = str(error), True
            replica.strikes = MAX_STRIKES
        except (KeyError, IndexError) as error:
            sample = _failed(f"the server's answer lacks {error}")
        replica.held.pop(number, None)
        if sample is not None:
            replica.strikes, replica.progressed = 0, time.monotonic()
            if sample.finish_reason != "abort" or self._asked[number] >= MAX_ASKED:
                self._results[number] = sample
                return
        elif self._asked[number] >= (2 * MAX_ASKED if lost else MAX_ASKED):
            self._results[number] = _failed(f"asked {self._asked[number]} times without an answer; the last: {trouble}")
        if number not in self._results:
            self._waiting.appendleft(number)
        if replica.strikes >= MAX_STRIKES and trouble is not None:
            self._suspend(replica, trouble)

    def _suspend(self, replica: Replica, reason: str) -> None:
        """Take back what a replica holds and see whether it can be had again."""
        if not replica.live:
            return
        replica.live = False
        if replica.link.url not in self._reasons:
            log.warning("%s: suspended (%s); its prompts are asked elsewhere", replica.link.url, reason)
        self._reasons[replica.link.url] = reason
        for number, task in list(replica.held.items()):
            task.cancel()
            self._asked[number] -= 1
            self._waiting.appendleft(number)
        replica.held.clear()
        self._start("recover", self._recover, replica, reason)

    async def _recover(self, replica: Replica, reason: str) -> None:
        for attempt in range(RECOVERIES if replica.comebacks < MAX_COMEBACKS else 0):
            await asyncio.sleep(backoff_seconds(attempt))
            try:
                replica.server = await self._admit(replica.link.within(min(self._timeout, PULSE_TIMEOUT_SECONDS)))
            except (ServerLost, ServerBusy):
                continue
            except InputRefused as error:
                log.warning("%s; it gets no more prompts of this shard", error)
                self._reasons[replica.link.url] = str(error)
                return
            replica.live, replica.strikes = True, 0
            replica.comebacks += 1
            replica.progressed = time.monotonic()
            log.debug("%s: back after %s", replica.link.url, reason)
            return

    async def _watch(self, replica: Replica) -> None:
        """Suspend a replica that is hung: no answer to the health check, or nothing finished in time."""
        link = replica.link.within(min(self._timeout, PULSE_TIMEOUT_SECONDS))
        while True:
            await asyncio.sleep(min(self._timeout / 4, PULSE_SECONDS))
            if not replica.live:
                continue
            if replica.held and time.monotonic() - replica.progressed > self._timeout:
                self._suspend(replica, f"finished nothing in {self._timeout:g} s (runtime.server_timeout_seconds)")
                continue
            try:
                await link.get("/health")
            except (ServerLost, ServerBusy) as error:
                self._suspend(replica, str(error))

    async def _cancel_all(self) -> None:
        tasks = [*self._background, *(task for replica in self._replicas for task in replica.held.values())]
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


def _failed(error: str) -> Sample:
    empty = np.zeros(0)
    return Sample(
        completion_ids=empty.astype(np.int32), logprobs=empty.astype(np.float32), finish_reason="error", error=error
    )
