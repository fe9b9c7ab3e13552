"""Sampling on servers that are already running, vLLM's or SGLang's: each proven to hold the declared policy first.

Every call proves them anew, since a server that was restarted between two shards is back at the weights it started with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import httpx

from grpoctl.engines.base import Sample, SampleRequest, SamplingSettings
from grpoctl.engines.proof import Gap, Probe
from grpoctl.engines.servers.link import Link, ServerBusy, ServerLost, open_client
from grpoctl.engines.servers.protocol import Server
from grpoctl.engines.servers.scheduler import Replica, Scheduler
from grpoctl.engines.servers.verify import connect, verify
from grpoctl.engines.tokenizer import Tokenizer
from grpoctl.errors import InputRefused, TryAgain

log = logging.getLogger("grpoctl")
PROOF_SECONDS: Final = 60.0
"""Deadline of each question of the probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How servers are asked.

    Args:
        urls: addresses, one a replica
        concurrency: requests at once on one server
        timeout_seconds: how long a server may finish nothing
    """

    urls: tuple[str, ...]
    concurrency: int
    timeout_seconds: float


class ServerSampler:
    """Draws from one or more servers."""

    def __init__(self, tokenizer: Tokenizer, probe: Probe, settings: ServerSettings) -> None:
        self._tokenizer = tokenizer
        self._probe = probe
        self._settings = settings
        self.gaps: dict[str, Gap] = {}
        self._told: set[str] = set()
        servers = asyncio.run(self._prove())
        self.name = "; ".join(dict.fromkeys(str(server.facts) for server in servers.values()))
        if len(servers) > 1:
            self.name += f"; {len(servers)} replicas"
        self.reproducible = all(server.seeded for server in servers.values()) and probe.copy_dtype == "float32"

    async def _prove(self) -> dict[str, Server]:
        async with open_client() as client:
            return await self._admit_all([self._link(url, client) for url in self._settings.urls])

    def _link(self, url: str, client: httpx.AsyncClient) -> Link:
        return Link(url, client, timeout_seconds=min(PROOF_SECONDS, self._settings.timeout_seconds))

    async def _admit_all(self, links: Sequence[Link]) -> dict[str, Server]:
        """Return the servers that answer, all of them proven; one that can't be reached is left out with a warning.

        Raises:
            TryAgain: none can be reached.
            InputRefused: one isn't what it should be.
        """
        found = await asyncio.gather(*(self._admit(link) for link in links), return_exceptions=True)
        servers: dict[str, Server] = {}
        lost: list[str] = []
        for link, outcome in zip(links, found, strict=True):
            if isinstance(outcome, ServerLost | ServerBusy):
                lost.append(f"{link.url}: {outcome}")
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                servers[link.url] = outcome
        if not servers:
            raise TryAgain(f"no server answers ({'; '.join(lost)}); start one, finished shards are kept")
        for message in lost:
            if message not in self._told:
                self._told.add(message)
                log.warning("%s; going on with %d of %d servers", message, len(servers), len(links))
        return servers

    async def _admit(self, link: Link) -> Server:
        server = await connect(link, self._tokenizer.eos_ids)
        self.gaps[link.url] = await verify(link, server, self._probe)
        return server

    def sample(self, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Sample]:
        """Draw one completion for each request.

        Raises:
            InputRefused: ids outside the vocabulary, requests longer than a server takes, servers that aren't the policy.
            TryAgain: no server is left, or one changed its weights meanwhile.
        """
        _check_ids(requests, self._tokenizer.vocab_size)
        return asyncio.run(self._sample(requests, settings))

    async def _sample(self, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Sample]:
        async with open_client() as client:
            links = {url.rstrip("/"): self._link(url, client) for url in self._settings.urls}
            servers = await self._admit_all(list(links.values()))
            for url, server in servers.items():
                _check_lengths(url, server, requests)
                _check_truncation(url, server, settings)
            replicas = [Replica(link=links[url].within(None), server=server) for url, server in servers.items()]
            scheduler = Scheduler(
                requests,
                settings,
                replicas,
                admit=self._admit,
                concurrency=self._settings.concurrency,
                timeout_seconds=self._settings.timeout_seconds,
            )
            samples = await scheduler.run()
            await self._check_unchanged(replicas)
        return samples

    async def _check_unchanged(self, replicas: Sequence[Replica]) -> None:
        """Refuse a shard during which a server took other weights, where it says so."""
        for replica in (replica for replica in replicas if replica.live):
            before = replica.server.facts.weight_version
            try:
                now = (await connect(replica.link.within(PROOF_SECONDS), self._tokenizer.eos_ids)).facts.weight_version
            except (ServerLost, ServerBusy):  # gone after its last answer; the next call proves it anew
                continue
            if now != before:
                raise TryAgain(
                    f"{replica.link.url}: its weights went from {before} to {now} while it sampled; rerun when it is settled"
                )


def _check_ids(requests: Sequence[SampleRequest], vocab_size: int) -> None:
    for request in requests:
        low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
        if low < 0 or high >= vocab_size:
            raise InputRefused(
                f"a prompt holds token id {low if low < 0 else high}, outside the policy's {vocab_size}; nothing was sent "
                "(such an id ends some servers)"
            )


def _check_lengths(url: str, server: Server, requests: Sequence[SampleRequest]) -> None:
    facts = server.facts
    longest = max(len(request.prompt_ids) for request in requests)
    total = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    if longest > facts.max_prompt_tokens or total > facts.max_total_tokens:
        more = "--max-model-len" if facts.program == "vllm" else "--context-length"
        raise InputRefused(
            f"{url}: takes prompts up to {facts.max_prompt_tokens} tokens and {facts.max_total_tokens} with the completion, "
            f"asked for {longest} and {total}; start it with a larger {more}, or lower rollout.max_new_tokens"
        )


def _check_truncation(url: str, server: Server, settings: SamplingSettings) -> None:
    if not server.truncation and (settings.top_p < 1 or settings.top_k or settings.min_p):
        raise InputRefused(
            f"{url}: {server.facts.program}'s log-probabilities leave top_p, top_k and min_p out, so rollout_logprobs "
            "wouldn't be of the distribution sampled from; sample without them, or on vLLM"
        )
