"""The sampler of a rollout job: made, or kept warm from an earlier job and proven to hold the right weights.

A warm engine is given new weights in place. Engines have been seen to keep old ones without a word (a prepacked output
embedding, a prefix cache), so after every load the policy's probe is asked: a few completions whose log-probabilities the
update that made the policy has stored in its folder.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from grpoctl.artifacts.canonical import sha256_json
from grpoctl.engines.base import Sample, Sampler, SampleRequest, SamplingSettings, VllmSettings
from grpoctl.engines.proof import MAX_GAPS, MEAN_GAPS, gap_between
from grpoctl.engines.tokenizer import load_tokenizer, require
from grpoctl.errors import InputRefused, TryAgain, UsageError
from grpoctl.inputs.policies import PROBE_RECORD, Policy, open_policy
from grpoctl.settings.jobs import RolloutJob
from grpoctl.stages.stage import Context, set_threads

log = logging.getLogger("grpoctl")
RE_ASKS: Final = 2
"""Times that an aborted request is sent again before its row fails."""


def sampler_for(job: RolloutJob, context: Context, policy: Policy) -> Sampler:
    """Return the job's sampler with the policy's weights in it.

    Raises:
        InputRefused: a freshly loaded engine doesn't answer like the policy.
    """
    if job.rollout.engine == "vllm":
        return _vllm(job, context, policy)
    if job.rollout.engine == "server":
        return _servers(job, context, policy)
    from grpoctl.engines.hf.sampler import HfSampler

    return HfSampler(
        context.model(policy, dtype=job.rollout.dtype, runtime=job.runtime),
        load_tokenizer(policy.folder, policy.ref),
        batch_size=job.runtime.rollout_batch_size,
    )


def _servers(job: RolloutJob, context: Context, policy: Policy) -> Sampler:
    require("httpx", "server")
    from grpoctl.engines.servers.sampler import ServerSampler, ServerSettings
    from grpoctl.stages.canary import policy_canary

    if not job.servers:
        raise UsageError(
            "engine server needs the address of one: --server http://HOST:PORT, repeatable (runtime.serve is for `run` only)"
        )
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
    from grpoctl.engines.vllm.sampler import VllmSampler

    set_threads(job.runtime)
    names = ("tensor_parallel_size", "memory_fraction", "cpu_cache_gib", "enforce_eager")
    options: dict[str, Any] = {"dtype": job.rollout.dtype} | {name: getattr(job.runtime, name) for name in names}
    options["timeout_seconds"] = job.runtime.engine_timeout_seconds
    options["max_context_tokens"] = min(
        job.runtime.max_context_tokens or sys.maxsize, load_tokenizer(policy.folder, policy.ref).context_tokens
    )
    base = _base_of_adapters(policy) if job.runtime.vllm_adapters else None
    if job.runtime.vllm_adapters and base is None:
        context.tell_once(
            f"{policy.ref}: has no adapters beside it (sync.adapters: beside); its whole weights are loaded"
        )
    loaded = policy if base is None else base.policy
    options["adapter_rank"] = 0 if base is None else base.rank
    key = sha256_json({"tokenizer": policy.tokenizer_digest, **options, "base": base and base.policy.weights_digest})
    warm_digest, warm = context.samplers.pop(key, (None, None))
    if warm is not None and (
        warm_digest == policy.weights_digest or _reloaded(warm, policy, job.rollout.dtype, adapters=base is not None)
    ):
        context.samplers[key] = (policy.weights_digest, warm)
        return warm
    for other in [warm, *(engine for _, engine in context.samplers.values())]:
        if other is not None:  # one engine takes the memory that there is
            other.close()
    context.samplers.clear()
    fresh = VllmSampler(loaded.folder, load_tokenizer(policy.folder, policy.ref), VllmSettings(**options))
    if base is not None:
        assert policy.adapter is not None
        fresh.use_adapters(policy.adapter)
    probe = _probe(policy)
    if probe is not None:
        gap = gap_between(fresh.prompt_logprobs(probe["prompt_ids"], probe["completion_ids"]), probe["logprobs"])
        noise = _noise(probe, job.rollout.dtype)
        if not gap.within(noise):
            fresh.close()
            raise InputRefused(
                f"{policy.ref}: {fresh.name} answers its probe with a gap of {gap}, limit {noise}'s: mean "
                f"{MEAN_GAPS[noise]}, max {MAX_GAPS[noise]}; the engine doesn't compute this policy"
            )
    context.samplers[key] = (policy.weights_digest, fresh)
    return fresh


def _probe(policy: Policy) -> dict[str, Any] | None:
    path = policy.folder / PROBE_RECORD
    probe = json.loads(path.read_bytes()) if path.is_file() else None
    return probe if probe and probe["logprobs"] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdapterBase:
    """The policy that adapters lie beside, and their rank."""

    policy: Policy
    rank: int


def _base_of_adapters(policy: Policy) -> _AdapterBase | None:
    """Return what a policy's adapters lie beside, None where it has none by itself.

    Raises:
        InputRefused: their base isn't what it was when they were trained.
    """
    from grpoctl.engines.torch.lora import read_record

    if policy.adapter is None:
        return None
    adapters = read_record(policy.adapter)
    base = open_policy(adapters.base.ref)
    if base.weights_digest != adapters.base.weights_digest:
        raise InputRefused(
            f"{policy.ref}: its adapters belong to weights {adapters.base.weights_digest[:12]}…, {adapters.base.ref} has "
            f"{base.weights_digest[:12]}… now; restore that policy, or leave runtime.vllm_adapters off"
        )
    return _AdapterBase(policy=base, rank=adapters.config.rank)


def _noise(probe: dict[str, Any], dtype: str) -> str:
    """Return the floating-point type whose noise lies between the engine's answers and the probe's own."""
    return "bfloat16" if "bfloat16" in (dtype, probe.get("dtype", "float32")) else "float32"


def _reloaded(warm: Any, policy: Policy, dtype: str, *, adapters: bool) -> bool:
    """Give a warm engine the policy's weights; return whether it then answers like the policy, and not as before."""
    probe = _probe(policy)
    if probe is None:
        return False
    before = warm.prompt_logprobs(probe["prompt_ids"], probe["completion_ids"])
    if adapters:
        warm.use_adapters(policy.adapter)
    else:
        warm.reload(policy.folder)
    after = warm.prompt_logprobs(probe["prompt_ids"], probe["completion_ids"])
    gap = gap_between(after, probe["logprobs"])
    if after != before and gap.within(_noise(probe, dtype)):
        log.debug("%s: reloaded, probe gap %s", policy.ref, gap)
        return True
    log.warning(
        "%s: the warm %s still answers with other weights after a reload (gap %s): starting a fresh engine",
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
