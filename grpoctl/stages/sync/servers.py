"""Load a published policy into running servers, between its publishing and the move of CURRENT."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from grpoctl.artifacts.storage import Location
from grpoctl.engines.proof import Probe, policy_probe
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.engines.warm import Warm
from grpoctl.errors import InputRefused, TryAgain
from grpoctl.extras import require
from grpoctl.inputs.policies import open_policy
from grpoctl.settings.jobs import SyncJob

ANSWER_SECONDS: Final = 60.0
"""Deadline of a question; loading has its own."""


def load_servers(job: SyncJob, warm: Warm, place: Location) -> dict[str, float]:
    """Have every server of the job load a published policy and prove it.

    Returns:
        The largest |Δ log-probability| from the policy by server, nats.

    Raises:
        GateFailed: a server still answers with other weights.
        InputRefused: the policy lies where servers can't read it, or something else than a server is there.
        TryAgain: a server can't be reached.
    """
    if not job.servers:
        return {}
    require("httpx")
    from grpoctl.engines.servers.verify import weights_name

    if not place.is_local:
        raise InputRefused(
            f"{place.url}: servers load weights from a folder that they and this job see under one path; publish to a "
            "shared file system, or restart the servers on the policy"
        )
    policy = open_policy(place.url)
    probe = policy_probe(policy, warm, dtype="float32", runtime=job.runtime)
    version = weights_name(f"v{policy.version:06d}", policy.weights_digest)
    eos_ids = load_tokenizer(policy.folder, policy.ref).eos_ids
    folder = Path(place.path).resolve()
    return asyncio.run(_load_all(job.servers, eos_ids, folder, version, probe, unchanged=policy.is_unchanged))


async def _load_all(
    urls: Sequence[str], eos_ids: Sequence[int], folder: Path, version: str, probe: Probe, *, unchanged: bool
) -> dict[str, float]:
    from grpoctl.engines.servers.link import Link, ServerBusy, ServerLost, open_client
    from grpoctl.engines.servers.load import load_policy_into

    gaps: dict[str, float] = {}
    async with open_client() as client:
        for url in dict.fromkeys(urls):
            link = Link(url, client, timeout_seconds=ANSWER_SECONDS)
            try:
                gap = await load_policy_into(link, eos_ids, folder, version, probe, unchanged=unchanged)
            except (ServerLost, ServerBusy) as error:
                raise TryAgain(
                    f"{url}: can't be given {probe.policy} ({error}); start it, or sync without it; rerun to continue"
                ) from error
            gaps[url] = gap.max
    return gaps
