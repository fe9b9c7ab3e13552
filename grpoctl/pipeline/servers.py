"""Servers that `run` starts itself, keeps between iterations, gives each new policy, and stops at the end.

A server that can't be given new weights, or that died, is started anew on the policy's folder: slower, and just as right.
Whether it holds the policy is for the samples' own checks to tell, as with any other server.
"""

from __future__ import annotations

import http.client
import logging
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from grpoctl.artifacts.storage import locate
from grpoctl.engines.servers.key import API_KEY, authorization
from grpoctl.errors import GateFailed, InputRefused, TryAgain
from grpoctl.inputs.policies import open_policy
from grpoctl.processes.child import Child
from grpoctl.processes.local_ranks import free_port
from grpoctl.settings.jobs import SyncJob
from grpoctl.settings.runtime import RuntimeConfig
from grpoctl.stages.context import Context
from grpoctl.stages.sync.servers import load_servers

log = logging.getLogger("grpoctl")
POLL_SECONDS: Final = 0.5
STOP_SECONDS: Final = 10.0
"""How long servers may take to end before they are killed."""
LOG_TAIL: Final = 2000
SIGNALLED: Final = 128
"""Exit codes above it tell of a signal."""


@dataclass(slots=True)
class _ManagedServer:
    index: int
    log: Path
    process: Child | None = None
    url: str = ""
    holds: str = ""
    has_answered: bool = False

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.code() is None


@dataclass(slots=True)
class ManagedServers:
    """The servers of one run, as `runtime.serve` describes them; what they print goes to `logs`."""

    runtime: RuntimeConfig
    context: Context
    logs: Path
    _servers: list[_ManagedServer] = field(default_factory=list[_ManagedServer])

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
        if not self._servers:
            self.logs.mkdir(parents=True, exist_ok=True)
            self._servers = [_ManagedServer(index, self.logs / f"{index}.log") for index in range(settings.replicas)]
        fresh = [
            server for server in self._servers if not self._keep_or_end(server, policy.folder, policy.weights_digest)
        ]
        for server in fresh:
            self._start(server, policy.folder)
        for server in fresh:
            self._wait(server)
            server.holds = policy.weights_digest
        return tuple(server.url for server in self._servers)

    def _keep_or_end(self, server: _ManagedServer, folder: Path, digest: str) -> bool:
        """Return whether a running server holds the policy, after it was given it where necessary; else it is ended."""
        if server.runs and (_answers(server.url) if server.holds == digest else self._give(server, folder, digest)):
            return True
        _end([server])  # also a dead one: the processes that it started may live on
        return False

    def _give(self, server: _ManagedServer, folder: Path, digest: str) -> bool:
        started = time.monotonic()
        job = SyncJob(servers=(server.url,), runtime=self.runtime)
        try:
            load_servers(job, self.context.warm, locate(str(folder)))
        except (GateFailed, InputRefused, TryAgain) as error:
            log.warning("%s; starting it anew", error)
            return False
        log.info("%s: given the new policy in %.1f s", server.url, time.monotonic() - started)
        server.holds = digest
        return True

    def _start(self, server: _ManagedServer, folder: Path) -> None:
        settings = self.runtime.serve
        port = free_port()
        names = {"policy": str(folder), "port": str(port), "index": str(server.index)}
        command = [_filled(word, names) for word in settings.command]
        variables = {name: _filled(value, names) for name, value in settings.environment.items()}
        server.url = f"http://127.0.0.1:{port}"
        server.holds = ""
        log.info("starting server %d: %s", server.index, " ".join(command))
        with server.log.open("ab") as output:
            output.write(f"\n--- {' '.join(command)}\n".encode())
            output.flush()
            server.process = Child(
                command, environment={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT
            )

    def _wait(self, server: _ManagedServer) -> None:
        """Return once the server answers."""
        assert server.process is not None
        deadline = time.monotonic() + self.runtime.serve.start_seconds
        while not _answers(server.url):
            self.context.stop.check()
            code = server.process.code()
            if code is not None:  # a command that worked before, or one that was killed (for memory), may work again
                kind = TryAgain if server.has_answered or code < 0 or code > SIGNALLED else InputRefused
                raise kind(
                    f"runtime.serve.command: server {server.index} ended with status {code} before it answered; "
                    f"{server.log} ends with:\n{_tail(server.log)}"
                )
            if time.monotonic() > deadline:
                raise TryAgain(
                    f"runtime.serve: server {server.index} doesn't answer after {self.runtime.serve.start_seconds:g} s "
                    f"(runtime.serve.start_seconds); {server.log} ends with:\n{_tail(server.log)}"
                )
            time.sleep(POLL_SECONDS)
        server.has_answered = True

    def close(self) -> None:
        """Stop all servers."""
        _end(self._servers)
        self._servers = []


def _filled(word: str, names: dict[str, str]) -> str:
    """Return a word of the command with our names filled in; other braces (JSON arguments) stay."""
    for name, value in names.items():
        word = word.replace("{" + name + "}", value)
    return word


def _answers(url: str) -> bool:
    """Return whether a server is there.

    Raises:
        InputRefused: it wants a key that it wasn't given.
    """
    asked = urllib.request.Request(f"{url}/v1/models", headers=authorization())
    direct = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # never through a proxy: it is on this machine
    try:
        with direct.open(asked, timeout=10):
            return True
    except urllib.error.HTTPError as error:
        if error.code in {401, 403}:
            raise InputRefused(
                f"runtime.serve: {url} refuses access ({error.code}); its key goes into {API_KEY}"
            ) from error
        return error.code < 500
    except (OSError, http.client.HTTPException):
        return False


def _tail(path: Path) -> str:
    return path.read_bytes()[-LOG_TAIL:].decode(errors="replace")


def _end(servers: Sequence[_ManagedServer]) -> None:
    """Stop servers and all processes that they started, together: asked first, and killed when their time is up."""
    running = [server.process for server in servers if server.process is not None]
    deadline = time.monotonic() + STOP_SECONDS
    try:
        for process in running:
            process.send(signal.SIGTERM, group=True)
        for process in running:
            process.wait(max(0.0, deadline - time.monotonic()))
    finally:  # a second signal to us comes here at once
        for process in running:
            process.kill()
        for server in servers:
            server.process = None
