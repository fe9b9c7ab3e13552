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

    def install(self) -> None:
        """Catch both signals; only possible on the main thread."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            raise Interrupted("stopped at once; finished shards are kept, rerun to continue", signal_number=number)
        self.signal_number = number
        if not launcher.has_speaker():
            print("stopping after the current shard; once more to stop at once", file=sys.stderr)

    def check(self) -> None:
        """Raise Interrupted where a signal came."""
        if self.signal_number is not None:
            raise Interrupted("stopped; finished shards are kept, rerun to continue", signal_number=self.signal_number)


STOP = StopFlag()
"""This process's own: installed before anything heavy is imported, so that no signal is lost meanwhile."""
