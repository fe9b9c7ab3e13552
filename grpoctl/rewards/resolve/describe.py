"""Ask a child to import a user's function and describe it, so that user code never runs in the caller's process."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping, Sequence
from typing import Any

from grpoctl.errors import PluginFailed
from grpoctl.rewards.calling.child import MAX_PROCESSES, OutputLog, WorkerLink, scrubbed_environment
from grpoctl.rewards.calling.scheduler import IMPORT_SECONDS
from grpoctl.rewards.resolve.target import Target


def described_in_child(
    ref: str, target: Target, kwargs: Mapping[str, Any], keep_environment: Sequence[str]
) -> dict[str, Any]:
    """Return `target.described_target` as a child found it, or `{"kind": "missing", "names": […]}`.

    Raises:
        PluginFailed: the import raised, ended the process or did not end.
    """
    environment = scrubbed_environment(os.environ, keep=keep_environment)
    link = WorkerLink(OutputLog(None), environment=environment, max_processes=MAX_PROCESSES)
    message: dict[str, Any] | None = None
    ending = ""
    try:
        link.post("describe", ref, target, dict(kwargs))
        message = _answer(link)
    finally:
        ending = link.kill(is_ending=message is None)
    if message is None:
        raise PluginFailed(f"reward {ref}: importing it failed or did not end within {IMPORT_SECONDS:g} s: {ending}")
    if message["kind"] == "refused":
        raise PluginFailed(message["message"])
    return message


def _answer(link: WorkerLink) -> dict[str, Any] | None:
    give_up = time.monotonic() + IMPORT_SECONDS
    while time.monotonic() < give_up:
        select.select([link.result_fd], [], [], 0.05)
        link.pump()
        link.drain_output()
        messages, closed = link.messages()
        if messages:
            return messages[0]
        if closed:
            return None
    return None
