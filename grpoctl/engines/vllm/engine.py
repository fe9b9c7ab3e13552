"""The vllm engine's record: vLLM in this process, made, or kept warm from an earlier job and proven to hold the weights.

A warm engine is given new weights in place. Engines have been seen to keep old ones without a word (a prepacked output
embedding, a prefix cache), so after every load it is asked the probe that the update has stored with the policy.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpoctl.artifacts.canonical import sha256_json
from grpoctl.engines.base import Sampler, VllmSettings
from grpoctl.engines.proof import LIMITS, gap_between, stored_probe
from grpoctl.engines.registry import SamplingEngine
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.engines.warm import Warm, set_threads
from grpoctl.errors import InputRefused, UsageError
from grpoctl.inputs.policies import PolicyFolder, open_policy
from grpoctl.settings.jobs import RolloutJob

if TYPE_CHECKING:
    from grpoctl.engines.vllm.sampler import VllmSampler

log = logging.getLogger("grpoctl")


def make_sampler(job: RolloutJob, policy: PolicyFolder, warm: Warm) -> Sampler:
    """Return a vLLM engine with the policy's weights in it.

    Raises:
        InputRefused: a freshly loaded engine doesn't answer like the policy.
    """
    from grpoctl.engines.vllm.sampler import VllmSampler

    set_threads(job.runtime)
    base = _base_of_adapters(policy) if job.runtime.vllm_adapters else None
    if job.runtime.vllm_adapters and base is None:
        warm.tell_once(f"{policy.ref}: has no adapters beside it (sync.adapters: beside); its whole weights are loaded")
    options = _options(job, policy, base)
    key = sha256_json({"tokenizer": policy.tokenizer_digest, **options, "base": base and base.policy.weights_digest})
    kept_digest, kept = warm.samplers.pop(key, (None, None))
    if isinstance(kept, VllmSampler) and (
        kept_digest == policy.weights_digest or _reload(kept, policy, job.rollout.dtype, adapters=base is not None)
    ):
        warm.samplers[key] = (policy.weights_digest, kept)
        return kept
    for other in [kept, *(engine for _, engine in warm.samplers.values())]:
        if isinstance(other, VllmSampler):  # one engine takes the memory that there is
            other.close()
    warm.samplers.clear()
    loaded = policy if base is None else base.policy
    fresh = VllmSampler(loaded.folder, load_tokenizer(policy.folder, policy.ref), VllmSettings(**options))
    if base is not None:
        assert policy.adapter is not None
        fresh.use_adapters(policy.adapter)
    _prove(fresh, policy, job.rollout.dtype)
    warm.samplers[key] = (policy.weights_digest, fresh)
    return fresh


def _options(job: RolloutJob, policy: PolicyFolder, base: _AdapterBase | None) -> dict[str, Any]:
    names = ("tensor_parallel_size", "memory_fraction", "cpu_cache_gib", "enforce_eager")
    options: dict[str, Any] = {"dtype": job.rollout.dtype} | {name: getattr(job.runtime, name) for name in names}
    options["timeout_seconds"] = job.runtime.engine_timeout_seconds
    options["max_context_tokens"] = min(
        job.runtime.max_context_tokens or sys.maxsize, load_tokenizer(policy.folder, policy.ref).context_tokens
    )
    options["adapter_rank"] = 0 if base is None else base.rank
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdapterBase:
    """The policy that adapters lie beside, and their rank."""

    policy: PolicyFolder
    rank: int


def _base_of_adapters(policy: PolicyFolder) -> _AdapterBase | None:
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


def _prove(fresh: VllmSampler, policy: PolicyFolder, dtype: str) -> None:
    """Refuse an engine that doesn't answer the policy's probe, and end it."""
    probe = stored_probe(policy, dtype=dtype)
    if probe is None:
        return
    gap = gap_between(fresh.prompt_logprobs(probe.prompts, probe.completions), probe.logprobs)
    if not gap.within(probe.limits):
        fresh.close()
        limit = LIMITS[probe.limits]
        raise InputRefused(
            f"{policy.ref}: {fresh.name} answers its probe with a gap of {gap}, limit {probe.limits}'s: mean "
            f"{limit.mean}, max {limit.max}; the engine doesn't compute this policy"
        )


def _reload(kept: VllmSampler, policy: PolicyFolder, dtype: str, *, adapters: bool) -> bool:
    """Give a warm engine the policy's weights; return whether it then answers like the policy, and not as before."""
    probe = stored_probe(policy, dtype=dtype)
    if probe is None:
        return False
    before = kept.prompt_logprobs(probe.prompts, probe.completions)
    if adapters:
        assert policy.adapter is not None
        kept.use_adapters(policy.adapter)
    else:
        kept.reload(policy.folder)
    after = kept.prompt_logprobs(probe.prompts, probe.completions)
    gap = gap_between(after, probe.logprobs)
    if after != before and gap.within(probe.limits):
        log.debug("%s: reloaded, probe gap %s", policy.ref, gap)
        return True
    log.warning(
        "%s: the warm %s still answers with other weights after a reload (gap %s): starting a fresh engine",
        policy.ref,
        kept.name,
        gap,
    )
    return False


def refuse(job: RolloutJob, longest: int) -> None:
    """Refuse prompts that the engine was told to make no room for, before the first is sampled.

    Raises:
        UsageError: with the number that would do.
    """
    limit = job.runtime.max_context_tokens
    if limit is not None and longest > limit:
        raise UsageError(
            f"runtime.max_context_tokens: {limit}, a prompt and its max_new_tokens take {longest}; raise it to that"
        )


ENGINE = SamplingEngine(sampler=make_sampler, refuse=refuse)
