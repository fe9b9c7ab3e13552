"""The sampler of a rollout job: made, or kept warm from an earlier job and proven to hold the right weights.

A warm engine is given new weights in place. Engines have been seen to keep old ones without a word (a prepacked output
embedding, a prefix cache), so after every load the policy's probe is asked: a few completions whose log-probabilities the
update that made the policy has stored in its folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Final

from grpoctl.engines.base import Sample, Sampler, SampleRequest, SamplingSettings, VllmSettings
from grpoctl.engines.tokenizer import load_tokenizer, require
from grpoctl.errors import InputRefused, TryAgain, UsageError
from grpoctl.jobs import RolloutJob
from grpoctl.policies import PROBE_RECORD, Policy
from grpoctl.schema.canonical import sha256_json
from grpoctl.stages.base import Context, set_threads
from grpoctl.stages.probe import largest_gap

log = logging.getLogger("grpoctl")
RE_ASKS: Final = 2
"""Times that an aborted request is sent again before its row fails."""
PROBE_LIMITS: Final = {"float32": 2e-3, "bfloat16": 0.5}
"""Largest |Δ log-probability| on the probe, nats. Measured noise of vLLM against our float32 forward: 5e-5 and 0.3."""


def sampler_for(job: RolloutJob, context: Context, policy: Policy) -> Sampler:
    """Return the job's sampler with the policy's weights in it.

    Raises:
        InputRefused: a freshly loaded engine doesn't answer like the policy.
    """
    if job.rollout.engine == "vllm":
        return _vllm(job, context, policy)
    if job.rollout.engine == "server":
        return _servers(job, context, policy)
    from grpoctl.engines.hf_sampler import HfSampler

    return HfSampler(
        context.model(policy, dtype=job.rollout.dtype, runtime=job.runtime),
        load_tokenizer(policy.folder, policy.ref),
        batch_size=job.runtime.rollout_batch_size,
    )


def _servers(job: RolloutJob, context: Context, policy: Policy) -> Sampler:
    require("httpx", "server")
    from grpoctl.engines.server_sampler import ServerSampler, ServerSettings
    from grpoctl.stages.canary import policy_canary

    if not job.servers:
        raise UsageError("engine server needs the address of one: --server http://HOST:PORT, repeatable")
    return ServerSampler(
        load_tokenizer(policy.folder, policy.ref),
        policy_canary(policy, context, dtype=job.rollout.dtype, runtime=job.runtime),
        ServerSettings(
            urls=tuple(dict.fromkeys(job.servers)),
            concurrency=job.runtime.server_concurrency,
            timeout_seconds=job.runtime.server_timeout_seconds,
        ),
    )


def _vllm(job: RolloutJob, context: Context, policy: Policy) -> Sampler:
    from grpoctl.engines.vllm_sampler import VllmSampler

    set_threads(job.runtime)
    names = ("tensor_parallel_size", "memory_fraction", "cpu_cache_gib", "enforce_eager")
    options: dict[str, Any] = {"dtype": job.rollout.dtype} | {name: getattr(job.runtime, name) for name in names}
    options["timeout_seconds"] = job.runtime.engine_timeout_seconds
    key = sha256_json({"tokenizer": policy.tokenizer_digest, **options})
    warm_digest, warm = context.samplers.pop(key, (None, None))
    if warm is not None and (warm_digest == policy.weights_digest or _reloaded(warm, policy, job.rollout.dtype)):
        context.samplers[key] = (policy.weights_digest, warm)
        return warm
    if warm is not None:
        warm.close()
    fresh = VllmSampler(policy.folder, load_tokenizer(policy.folder, policy.ref), VllmSettings(**options))
    probe = _probe(policy)
    if probe is not None:
        gap = largest_gap(fresh.prompt_logprobs(probe["prompt_ids"], probe["completion_ids"]), probe["logprobs"])
        if not gap <= PROBE_LIMITS[job.rollout.dtype]:
            raise InputRefused(
                f"{policy.ref}: {fresh.name} answers its probe with a gap of {gap:.3g} nats, limit "
                f"{PROBE_LIMITS[job.rollout.dtype]} for {job.rollout.dtype}; the engine doesn't compute this policy"
            )
    context.samplers[key] = (policy.weights_digest, fresh)
    return fresh


def _probe(policy: Policy) -> dict[str, Any] | None:
    path = policy.folder / PROBE_RECORD
    probe = json.loads(path.read_bytes()) if path.is_file() else None
    return probe if probe and probe["logprobs"] else None


def _reloaded(warm: Any, policy: Policy, dtype: str) -> bool:
    """Give a warm engine the policy's weights; return whether it then answers like the policy, and not as before."""
    probe = _probe(policy)
    if probe is None:
        return False
    before = warm.prompt_logprobs(probe["prompt_ids"], probe["completion_ids"])
    warm.reload(policy.folder)
    after = warm.prompt_logprobs(probe["prompt_ids"], probe["completion_ids"])
    gap = largest_gap(after, probe["logprobs"])
    if after != before and gap <= PROBE_LIMITS[dtype]:
        log.debug("%s: reloaded, probe gap %.3g nats", policy.ref, gap)
        return True
    log.warning(
        "%s: the warm %s still answers with other weights after a reload (gap %.3g nats): starting a fresh engine",
        policy.ref,
        warm.name,
        gap,
    )
    return False


def drawn(sampler: Sampler, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Sample]:
    """Return a completion for each request, asking again for those that the engine aborted.

    Raises:
        TryAgain: the engine returned another number of samples than it was asked for.
    """
    samples = _all_of(sampler, requests, settings)
    for _ in range(RE_ASKS):
        aborted = [i for i, sample in enumerate(samples) if sample.finish_reason == "abort"]
        if not aborted:
            break
        log.info("%s aborted %d of %d requests; asking again", sampler.name, len(aborted), len(requests))
        again = _all_of(sampler, [requests[i] for i in aborted], settings)
        for i, sample in zip(aborted, again, strict=True):
            samples[i] = sample
    return samples


def _all_of(sampler: Sampler, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Sample]:
    samples = sampler.sample(requests, settings)
    if len(samples) != len(requests):
        raise TryAgain(
            f"{sampler.name} returned {len(samples)} samples for {len(requests)} requests; finished shards are kept: rerun"
        )
    return samples
