"""End a process whose engine hangs: a call that never comes back can't be interrupted, and files hold all that is done."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from grpoctl.errors import TryAgain
from grpoctl.processes import fatal

LOOKS: Final = 50
"""How often a watchdog looks within its patience."""


@contextmanager
def watched(what: str, progress: Callable[[], object], *, patience_seconds: float) -> Generator[None]:
    """Run a block; where `progress()` stays the same for too long, say so and end the process with TryAgain's exit code.

    Args:
        what: the engine, in the message
        progress: anything that changes while the engine works; called from another thread
        patience_seconds: how long it may stay the same
    """
    done = threading.Event()

    def look() -> None:
        seen, since = progress(), time.monotonic()
        while not done.wait(patience_seconds / LOOKS):
            found = progress()
            if found != seen:
                seen, since = found, time.monotonic()
            elif time.monotonic() - since > patience_seconds:
                error = TryAgain(
                    f"{what} did nothing for {patience_seconds:g} s (runtime.engine_timeout_seconds): it hangs; finished "
                    "shards are kept: rerun"
                )
                for child in multiprocessing.active_children():  # a hanging engine doesn't notice that we are gone
                    child.kill()
                fatal.say(error)
                os._exit(error.exit_code)

    thread = threading.Thread(target=look, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
