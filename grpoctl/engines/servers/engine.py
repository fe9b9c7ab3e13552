"""The server engine's record: samples are asked of servers that run already."""

from __future__ import annotations

from grpoctl.engines.base import Sampler
from grpoctl.engines.proof import policy_probe
from grpoctl.engines.registry import SamplingEngine
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.engines.warm import Warm
from grpoctl.errors import UsageError
from grpoctl.extras import require
from grpoctl.inputs.policies import PolicyFolder
from grpoctl.settings.jobs import RolloutJob


def make_sampler(job: RolloutJob, policy: PolicyFolder, warm: Warm) -> Sampler:
    """Return a sampler over the job's servers, each proven to hold the policy.

    Raises:
        UsageError: none is named.
    """
    require("httpx")
    from grpoctl.engines.servers.sampler import ServerSampler, ServerSettings

    if not job.servers:
        raise UsageError(
            "engine server needs the address of one: --server http://HOST:PORT, repeatable (runtime.serve is for `run` only)"
        )
    return ServerSampler(
        load_tokenizer(policy.folder, policy.ref),
        policy_probe(policy, warm, dtype=job.rollout.dtype, runtime=job.runtime),
        ServerSettings(
            urls=tuple(dict.fromkeys(job.servers)),
            concurrency=job.runtime.server_concurrency,
            timeout_seconds=job.runtime.server_timeout_seconds,
        ),
    )


ENGINE = SamplingEngine(sampler=make_sampler, asks_servers=True)
