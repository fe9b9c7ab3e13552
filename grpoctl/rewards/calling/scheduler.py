"""Hand a reward's completions to child processes and settle an outcome for each: one event loop, no threads.

One-completion functions are looped over in the child, which reports every row, so the parent knows which row hung or
crashed: that row costs one deadline and one restart. Batch functions are called with whole groups; a failing call is
repeated by group, then row by row within the failing group: one bad row costs three deadlines, healthy groups stay whole.
"""

from __future__ import annotations

import pickle
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from grpoctl.errors import PluginFailed
from grpoctl.rewards.calling.call import BATCH_SIGNATURES, RewardCall
from grpoctl.rewards.calling.child import WorkerLink
from grpoctl.rewards.sample import FAILED_STATUSES, RewardOutcome, RewardSample

IMPORT_SECONDS: Final = 300.0
"""Deadline of importing a reward's module: torch on a cold disk takes a minute."""
WARM_UP_SECONDS: Final = 60.0
"""What the first call of a reward may take on top of its deadline: many import their libraries there."""
_BATCH_ROWS: Final = 64
_LARGEST_ROW_TASK: Final = 256
_TICK_SECONDS: Final = 0.1
_MAX_STARTS: Final = 3


@dataclass(slots=True, kw_only=True)
class Task:
    """Rows that go to a child in one message; none of them means: only import the reward."""

    rows: list[int]
    """Positions in the caller's list of samples."""
    starts: int = 0
    """How often it was handed to a child that died before it began."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """A child and what it is at."""

    link: WorkerLink
    task: Task | None = None
    began: bool = False
    num_done: int = 0
    row_start: float = 0.0
    deadline: float = 0.0


class Workers:
    """The running children, at most `limit` of them."""

    def __init__(self, limit: int, start: Callable[[], WorkerLink]) -> None:
        self.limit = limit
        self.running: list[Worker] = []
        self.spare_seconds: dict[str, float] = {}
        """By reward: what a child's first call gets on top, twice what the first one ever took."""
        self._start = start

    def idle(self) -> Worker | None:
        """Return a worker without a task, started if there is room for one more; None while all are busy."""
        for worker in [worker for worker in self.running if worker.task is None]:
            if not worker.link.has_ended():
                return worker
            self.discard(worker)
        if len(self.running) >= self.limit:
            return None
        self.running.append(Worker(link=self._start()))
        return self.running[-1]

    def discard(self, worker: Worker, *, is_ending: bool = False) -> str:
        """Kill a worker with everything that it started; return how it ended."""
        self.running.remove(worker)
        return worker.link.kill(is_ending=is_ending)

    def close(self) -> None:
        """End all workers."""
        while self.running:
            self.running.pop().link.close()


class ScoringRun:
    """One `score`: an event loop over the workers until every row has its outcome."""

    def __init__(self, workers: Workers, call: RewardCall, samples: Sequence[RewardSample]) -> None:
        self._workers = workers
        self._call = call
        self._samples = samples
        self._batched = call.signature in BATCH_SIGNATURES
        self._seconds = call.deadline_seconds
        self._outcomes: list[RewardOutcome | None] = [None] * len(samples)
        self._pending = deque(Task(rows=rows) for rows in self._chunks())
        self._num_failed = 0

    def load(self) -> None:
        """Import the reward in one child."""
        self._pending.append(Task(rows=[]))
        self.outcomes(None)

    def outcomes(self, max_failures: int | None) -> list[RewardOutcome]:
        """Run all tasks."""
        try:
            while self._pending or self._busy():
                self._hand_out()
                self._wait()
                for worker in self._busy():
                    self._attend(worker)
                self._check_budget(max_failures)
        except BaseException:
            for worker in self._busy():
                self._workers.discard(worker)
            raise
        return [outcome for outcome in self._outcomes if outcome is not None]

    def _chunks(self) -> list[list[int]]:
        """Split the rows into tasks; whole groups for batch functions, the same for any number of workers."""
        rows = range(len(self._samples))
        if not self._batched:
            size = max(1, min(_LARGEST_ROW_TASK, -(-len(rows) // (4 * self._workers.limit))))
            return [list(rows[start : start + size]) for start in range(0, len(rows), size)]
        chunks: list[list[int]] = []
        for group in self._groups(list(rows)):
            if chunks and len(chunks[-1]) + len(group) <= _BATCH_ROWS:
                chunks[-1].extend(group)
            else:
                chunks.append(group)
        return chunks

    def _groups(self, rows: list[int]) -> list[list[int]]:
        """Split rows where the group changes; a sample's id is its group's id, `#`, its index."""
        return [list(group) for _, group in groupby(rows, key=lambda i: self._samples[i].sample_id.rpartition("#")[0])]

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers.running if worker.task is not None]

    def _hand_out(self) -> None:
        while self._pending and (worker := self._workers.idle()) is not None:
            task = self._pending.popleft()
            task.starts += 1
            if task.starts > _MAX_STARTS:
                raise PluginFailed(
                    f"reward {self._call.name}: its process died {_MAX_STARTS} times before the first call"
                )
            worker.task, worker.began, worker.num_done = task, False, 0
            if self._call.name in worker.link.loaded:
                self._post(worker, task)
            else:
                worker.link.post("load", self._call)
                worker.deadline = time.monotonic() + IMPORT_SECONDS

    def _post(self, worker: Worker, task: Task) -> None:
        if not task.rows:  # it was about loading only
            worker.task = None
            return
        worker.link.post("score", self._call.name, [pickle.dumps(self._samples[row]) for row in task.rows])
        self._restart_clock(worker)

    def _restart_clock(self, worker: Worker) -> None:
        worker.row_start = time.monotonic()
        worker.deadline = worker.row_start + self._allowed_seconds(worker)

    def _allowed_seconds(self, worker: Worker) -> float:
        """Return how long the call at hand may take: the deadline, and what a child's first call gets on top."""
        name = self._call.name
        if name in worker.link.called or self._call.kind == "http":
            return self._seconds
        return self._seconds + self._workers.spare_seconds.get(name, WARM_UP_SECONDS)

    def _note_first_call(self, worker: Worker, *, answered: bool) -> None:
        """Remember what a child's first call took; one that never answered won't by waiting longer."""
        if self._call.name not in worker.link.called:
            worker.link.called.add(self._call.name)
            took = time.monotonic() - worker.row_start
            self._workers.spare_seconds.setdefault(self._call.name, 2 * took if answered else 0.0)

    def _wait(self) -> None:
        """Sleep until a child has something to say or a deadline comes; a tick at most, for children that died silently."""
        busy = self._busy()
        if not busy:
            return
        with selectors.PollSelector() as selector:
            for worker in busy:
                selector.register(worker.link.result_fd, selectors.EVENT_READ)
                if not worker.link.output_closed:
                    selector.register(worker.link.output_fd, selectors.EVENT_READ)
                if worker.link.has_outgoing:
                    selector.register(worker.link.command_fd, selectors.EVENT_WRITE)
            nearest = min(worker.deadline for worker in busy) - time.monotonic()
            selector.select(max(0.0, min(_TICK_SECONDS, nearest)))

    def _attend(self, worker: Worker) -> None:
        """Take in what a worker has sent; then, and only then, judge whether it is dead or late."""
        ended = worker.link.has_ended()  # asked before reading: nothing more can come after the read
        worker.link.pump()
        worker.link.drain_output()
        messages, closed = worker.link.messages()
        for message in messages:
            self._take(worker, message)
        if worker.task is None or (messages and not (closed or ended)):
            return
        if closed or ended:
            self._bury(worker, status="crash")
        elif time.monotonic() > worker.deadline:
            self._bury(worker, status="timeout")

    def _take(self, worker: Worker, message: dict[str, Any]) -> None:
        task = worker.task
        kind = message.pop("kind")
        if kind == "refused":
            raise PluginFailed(message["message"])
        if task is None:
            return
        if kind == "loaded":
            worker.link.loaded.add(self._call.name)
            self._post(worker, task)
        elif kind == "began":
            worker.began = True
            self._restart_clock(worker)
        elif kind == "row":
            self._note_first_call(worker, answered=True)
            self._settle(task.rows[worker.num_done], RewardOutcome(**message))
            worker.num_done += 1
            self._restart_clock(worker)
        elif kind == "failed":
            worker.task = None
            self._split(task, RewardOutcome(**message))
        else:
            worker.task = None

    def _bury(self, worker: Worker, *, status: str) -> None:
        """Kill a dead or late worker, blame the row or batch that it was at, and put the rest back."""
        task = worker.task
        worker.task = None
        seconds, allowed = time.monotonic() - worker.row_start, self._allowed_seconds(worker)
        if worker.began and status == "timeout":
            self._note_first_call(worker, answered=False)
        ending = self._workers.discard(worker, is_ending=status == "crash")
        if task is None:
            return
        if self._call.name not in worker.link.loaded:
            late = f"importing it did not end within {IMPORT_SECONDS:g} s"
            raise PluginFailed(
                f"reward {self._call.ref}: {late if status == 'timeout' else f'importing it failed: {ending}'}"
            )
        if not worker.began:
            self._pending.appendleft(task)
            return
        error = f"no answer within {allowed:.3g} s; its process was killed" if status == "timeout" else ending
        failure = RewardOutcome(reward=None, status=status, error=error, seconds=seconds)
        left = task.rows[worker.num_done :]
        if self._batched:
            self._split(Task(rows=left), failure)
        elif left:
            self._settle(left[0], failure)
            if left[1:]:
                self._pending.appendleft(Task(rows=left[1:]))

    def _split(self, task: Task, failure: RewardOutcome) -> None:
        """Repeat a failed batch in smaller calls; a single row's failure is its outcome."""
        if len(task.rows) == 1:
            self._settle(task.rows[0], failure)
            return
        groups = self._groups(task.rows)
        parts = groups if len(groups) > 1 else [[row] for row in task.rows]
        self._pending.extendleft(Task(rows=part) for part in reversed(parts))

    def _settle(self, row: int, outcome: RewardOutcome) -> None:
        self._outcomes[row] = outcome
        self._num_failed += outcome.status in FAILED_STATUSES

    def _check_budget(self, max_failures: int | None) -> None:
        if max_failures is None or self._num_failed <= max_failures:
            return
        failed = [(i, o) for i, o in enumerate(self._outcomes) if o is not None and o.status in FAILED_STATUSES]
        row, first = failed[0]
        raise PluginFailed(
            f"reward {self._call.name}: {self._num_failed} rows failed, more than the {max_failures} allowed; the first, "
            f"{self._samples[row].sample_id}: {first.status}: {first.error}"
        )
