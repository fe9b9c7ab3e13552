"""One server's HTTP: JSON out and in, bounded retries where it is busy, and three kinds of failure told apart.

A refusal (4xx) is an input that the server can't take; a busy server (408, 429, 5xx) is asked again; a lost one (no
connection, no answer in time, half an answer) is for the caller to replace. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import random
import resource
from typing import Any, Final

import httpx

from grpoctl.engines.servers.key import API_KEY, authorization
from grpoctl.errors import InputRefused

ATTEMPTS: Final = 5
BACKOFF_SECONDS: Final = 0.5
MAX_FILES: Final = 65536
"""Open files that this process asks for: a connection is one, and four busy servers use up the usual 1024."""
CONNECT_SECONDS: Final = 10.0
BUSY: Final = frozenset({408, 429, *range(500, 600)})


class ServerBusy(Exception):
    """The server answers, but with 408, 429 or 5xx, also after all retries."""


class ServerLost(Exception):
    """No connection, no answer in time, or something that isn't a whole JSON answer."""


def backoff_seconds(attempt: int) -> float:
    """Return the wait before a retry: doubling, jittered so that waiting requests don't come back together."""
    return BACKOFF_SECONDS * 2.0**attempt * random.uniform(0.5, 1.0)


def open_client() -> httpx.AsyncClient:
    """Return a client for any number of requests at once; each request carries its own deadline."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    headers = {"User-Agent": "grpoctl"} | authorization()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    direct = {"all://127.0.0.1": None, "all://localhost": None}  # no proxy that the environment names for the rest
    return httpx.AsyncClient(headers=headers, limits=limits, follow_redirects=False, mounts=direct)


class Link:
    """Requests to one server."""

    def __init__(self, url: str, client: httpx.AsyncClient, *, timeout_seconds: float | None) -> None:
        self.url = url.rstrip("/")
        self._client = client
        connect = min(CONNECT_SECONDS, timeout_seconds or CONNECT_SECONDS)
        self._timeout = httpx.Timeout(timeout_seconds, connect=connect, pool=None)

    def within(self, seconds: float | None) -> Link:
        """Return the same link with another deadline for answers, None for no end."""
        return Link(self.url, self._client, timeout_seconds=seconds)

    async def get(self, path: str) -> Any:
        """Return a path's JSON, or None where the server doesn't have it."""
        return await self._ask("GET", path, None, absent=True)

    async def post(self, path: str, body: dict[str, Any], *, query: dict[str, str] | None = None) -> Any:
        """Return the JSON answer to a JSON body.

        Raises:
            InputRefused: 4xx or a redirect.
            ServerBusy, ServerLost: as the module says.
        """
        return await self._ask("POST", path, body, query=query)

    async def _ask(
        self, method: str, path: str, body: Any, *, absent: bool = False, query: dict[str, str] | None = None
    ) -> Any:
        shown = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(backoff_seconds(attempt - 1))
            try:
                answer = await self._client.request(
                    method, self.url + path, json=body, params=query, timeout=self._timeout
                )
            except httpx.TimeoutException as error:
                raise ServerLost(f"no answer to {path} in {self._timeout.read or CONNECT_SECONDS:g} s") from error
            except httpx.TransportError as error:
                raise ServerLost(f"{path}: {type(error).__name__} {error}".rstrip()) from error
            except httpx.InvalidURL as error:
                raise InputRefused(f"{self.url}: not an address ({error}); expected http://HOST:PORT") from error
            if answer.status_code not in BUSY:
                return _content(answer, self.url + path, absent=absent)
            shown = f"{path}: {answer.status_code} {_shown(answer)}"
        raise ServerBusy(f"{shown} ({ATTEMPTS} attempts)")


def _content(answer: httpx.Response, where: str, *, absent: bool) -> Any:
    if answer.status_code == 404 and absent:
        return None
    if answer.status_code in (401, 403):
        raise InputRefused(f"{where}: answered {answer.status_code}; put the server's key into {API_KEY}")
    if answer.status_code != 200:
        raise InputRefused(f"{where}: answered {answer.status_code}: {_shown(answer)}")
    if not answer.content:
        return {}
    try:
        return answer.json()
    except ValueError as error:
        if absent or "json" not in answer.headers.get("content-type", ""):
            return None if absent else {}
        raise ServerLost(f"{where}: not JSON ({answer.text[:80]!r})") from error


def _shown(answer: httpx.Response) -> str:
    return " ".join(answer.text[:300].split()) or answer.reason_phrase
