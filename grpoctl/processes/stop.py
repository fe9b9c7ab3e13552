"""A request to stop: SIGTERM and SIGINT set a flag that stages look at between shards and steps."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

from grpoctl.errors import Interrupted
from grpoctl.processes import launcher


class StopFlag:
    """Turns SIGTERM and SIGINT into a request that stages look at between shards and steps; the second one is immediate.

    The handler doesn't raise at the first signal: libraries swallow an exception that comes while they are imported.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._is_passed_on = False

    def install(self, *, is_passed_on: bool | None = None) -> None:
        """Catch both signals; only possible on the main thread.

        Args:
            is_passed_on: whether the process that started this one passes its signals on and ends it itself where that
                must be at once. A supervisor that signals every process (systemd, Slurm) then reaches this one twice with
                one request. By default: where a launcher started it.
        """
        self._is_passed_on = launcher.is_launched() if is_passed_on is None else is_passed_on
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            if self._is_passed_on:
                return
            raise Interrupted("stopped at once; finished shards are kept, rerun to continue", signal_number=number)
        self.signal_number = number
        if not self._is_passed_on:
            print("stopping after the current shard; once more to stop at once", file=sys.stderr)

    def check(self) -> None:
        """Raise Interrupted where a signal came."""
        if self.signal_number is not None:
            raise Interrupted("stopped; finished shards are kept, rerun to continue", signal_number=self.signal_number)


STOP = StopFlag()
"""This process's own: installed before anything heavy is imported, so that no signal is lost meanwhile."""
