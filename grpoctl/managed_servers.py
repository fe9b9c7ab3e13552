"""Servers that `run` starts itself, keeps between iterations, gives each new policy, and stops at the end.

A server that can't be given new weights, or that died, is started anew on the policy's folder: slower, and just as right.
Whether it holds the policy is for the samples' own checks to tell, as with any other server.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from grpoctl.errors import GateFailed, InputRefused, TryAgain
from grpoctl.jobs import SyncJob
from grpoctl.policies import open_policy
from grpoctl.runtime_config import RuntimeConfig
from grpoctl.stages.base import Context
from grpoctl.stages.sync_servers import load_servers
from grpoctl.storage import locate

log = logging.getLogger("grpoctl")
POLL_SECONDS: Final = 0.5
STOP_SECONDS: Final = 20.0
"""How long a server may take to end before it is killed."""
LOG_TAIL: Final = 2000
DIE_WITH_STARTER: Final = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # the kernel kills the server where the process that started it is killed
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(f"{sys.argv[1]} can't be started: {error.strerror}")
"""


@dataclass(slots=True)
class _Server:
    index: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    url: str = ""
    holds: str = ""

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass(slots=True)
class ManagedServers:
    """The servers of one run, as `runtime.serve` describes them."""

    runtime: RuntimeConfig
    context: Context
    _servers: list[_Server] = field(default_factory=list)
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def serving(self, ref: str) -> tuple[str, ...]:
        """Return the servers' addresses once each of them holds a policy: started, given it, or started anew.

        Raises:
            InputRefused: a server ends instead of answering.
            TryAgain: one doesn't answer in time.
        """
        settings = self.runtime.serve
        if not settings.command:
            return ()
        policy = open_policy(ref)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="grpoctl-servers-")
            logs = Path(self._folder.name)
            self._servers = [_Server(index, logs / f"{index}.log") for index in range(settings.replicas)]
        fresh = [server for server in self._servers if not self._kept(server, policy.folder, policy.weights_digest)]
        for server in fresh:
            self._start(server, policy.folder)
        for server in fresh:
            self._wait(server)
            server.holds = policy.weights_digest
        return tuple(server.url for server in self._servers)

    def _kept(self, server: _Server, folder: Path, digest: str) -> bool:
        """Return whether a running server holds the policy, after it was given it where necessary."""
        if not server.runs:
            return False
        if server.holds == digest:
            return True
        started = time.monotonic()
        job = SyncJob(servers=(server.url,), runtime=self.runtime)
        try:
            load_servers(job, self.context, locate(str(folder)))
        except (GateFailed, InputRefused, TryAgain) as error:
            log.warning("%s; starting it anew", error)
            _end(server)
            return False
        log.info("%s: given the new policy in %.1f s", server.url, time.monotonic() - started)
        server.holds = digest
        return True

    def _start(self, server: _Server, folder: Path) -> None:
        settings = self.runtime.serve
        port = _free_port()
        names = {"policy": str(folder), "port": str(port), "index": str(server.index)}
        command = [_filled(word, names) for word in settings.command]
        variables = {name: _filled(value, names) for name, value in settings.environment.items()}
        server.url = f"http://127.0.0.1:{port}"
        server.holds = ""
        log.info("starting server %d: %s", server.index, " ".join(command))
        with server.log.open("wb") as output:
            server.process = subprocess.Popen(
                [sys.executable, "-c", DIE_WITH_STARTER, *command],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self, server: _Server) -> None:
        """Return once the server answers."""
        assert server.process is not None
        deadline = time.monotonic() + self.runtime.serve.start_seconds
        while not _answers(server.url):
            self.context.stop.check()
            if server.process.poll() is not None:
                raise InputRefused(
                    f"runtime.serve.command: server {server.index} ended with status {server.process.returncode} before "
                    f"it answered; its last words:\n{_tail(server.log)}"
                )
            if time.monotonic() > deadline:
                raise TryAgain(
                    f"runtime.serve: server {server.index} doesn't answer after {self.runtime.serve.start_seconds:g} s "
                    f"(runtime.serve.start_seconds); its last words:\n{_tail(server.log)}"
                )
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Stop all servers."""
        for server in self._servers:
            _end(server)
        self._servers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _filled(word: str, names: dict[str, str]) -> str:
    """Return a word of the command with our names filled in; other braces (JSON arguments) stay."""
    for name, value in names.items():
        word = word.replace("{" + name + "}", value)
    return word


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _tail(path: Path) -> str:
    return path.read_bytes()[-LOG_TAIL:].decode(errors="replace")


def _end(server: _Server) -> None:
    """Stop a server and all processes that it started."""
    if server.process is None:
        return
    for number, patience in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, None)):
        try:
            os.killpg(server.process.pid, number)
        except ProcessLookupError:
            break
        try:
            server.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue
    server.process = None
