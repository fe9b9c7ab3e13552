"""Ask a server what only the declared policy would answer, before a single completion of it is believed.

Three questions: log-probabilities of given sequences (other weights, a head that stayed old), the next token once through
the prefix cache and once computed anew (a cache of old weights), and the lead of the likeliest token at two temperatures
(log-probabilities that leave temperature out).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Final

from grpoctl.engines.proof import LIMITS, Gap, Probe, gap_between
from grpoctl.engines.servers.key import API_KEY
from grpoctl.engines.servers.link import Link
from grpoctl.engines.servers.protocol import Server, ServerFacts
from grpoctl.engines.servers.sglang import SglangServer
from grpoctl.engines.servers.vllm import VllmServer
from grpoctl.errors import InputRefused

PROBE_TEMPERATURE: Final = 0.5
LEAST_LEAD: Final = 0.05
"""Lead of the likeliest token, nats, from which two temperatures can be told apart."""
NAMED_DIGITS: Final = 12
OUR_NAME: Final = re.compile(rf"v\d{{6,}}-(?P<digest>[0-9a-f]{{{NAMED_DIGITS}}})")
"""A name that `weights_name` made; a server that was started on a folder has another one."""
LOGPROBS_FLAG: Final = {
    "vllm": "start it with --logprobs-mode processed_logprobs",
    "sglang": "start it without SGLANG_RETURN_ORIGINAL_LOGPROB",
}


async def connect(link: Link, eos_ids: Sequence[int]) -> Server:
    """Return the server behind a link, by what it answers.

    Raises:
        InputRefused: neither vLLM nor SGLang.
        ServerLost, ServerBusy: it can't be asked now.
    """
    if "@" in link.url:
        raise InputRefused(f"a server's address holds a user or password; put a key into {API_KEY} instead")
    for kind in (VllmServer, SglangServer):
        server = await kind.detect(link, eos_ids)
        if server is not None:
            return server
    raise InputRefused(
        f"{link.url}: answers neither as vLLM (/version, /v1/models) nor as SGLang (/model_info); "
        "expected the address of one of them"
    )


async def answers(link: Link, server: Server, probe: Probe) -> list[list[float]]:
    """Return the server's log-probabilities of the probe's completions, as far as it takes such long prompts."""
    rows = [[*prompt, *ids] for prompt, ids in zip(probe.prompts, probe.completions, strict=True)]
    limit = server.facts.max_prompt_tokens
    found = await asyncio.gather(*(server.forced(link, row[:limit]) for row in rows))
    return [values[len(prompt) - 1 :] for values, prompt in zip(found, probe.prompts, strict=True)]


async def verify(link: Link, server: Server, probe: Probe) -> Gap:
    """Check that a server is the probe's policy and reports what it samples from; return the gap.

    Raises:
        InputRefused: other weights, another floating-point type, an old prefix cache, or log-probabilities that leave
            temperature out.
    """
    _check_dtype(link, server.facts, probe)
    _check_name(link, server.facts, probe)
    gap = gap_between(await answers(link, server, probe), probe.logprobs)
    if not gap.within(probe.limits):
        raise InputRefused(_other_weights(link, server.facts, probe, gap))
    leads = await asyncio.gather(*(_lead(link, server, prompt, probe) for prompt in probe.prompts))
    plain, scaled = max(leads)
    if plain >= LEAST_LEAD and scaled < plain * (1 + 1 / PROBE_TEMPERATURE) / 2:
        raise InputRefused(
            f"{link.url}: its log-probabilities leave temperature out (the best token's lead stays {plain:.3g} nats at "
            f"temperature {PROBE_TEMPERATURE}, expected {plain / PROBE_TEMPERATURE:.3g}); "
            f"{LOGPROBS_FLAG[server.facts.program]}"
        )
    return gap


def _check_dtype(link: Link, facts: ServerFacts, probe: Probe) -> None:
    if facts.dtype is not None and facts.dtype in LIMITS and facts.dtype != probe.copy_dtype:
        raise InputRefused(
            f"{link.url}: runs in {facts.dtype}, rollout.dtype says {probe.copy_dtype}; set rollout.dtype to "
            f"{facts.dtype} or start the server with --dtype {probe.copy_dtype}"
        )


def weights_name(version: str, digest: str) -> str:
    """Return what `sync` has a server call the weights that it loads, and repeat with every answer."""
    return f"{version}-{digest[:NAMED_DIGITS]}"


def _check_name(link: Link, facts: ServerFacts, probe: Probe) -> None:
    """Refuse a server that `sync` gave another policy: in bfloat16 a policy one small update away answers alike."""
    named = OUR_NAME.fullmatch(facts.weight_version or "")
    if named and not probe.weights_digest.startswith(named["digest"]):
        raise InputRefused(
            f"{link.url}: holds weights {facts.weight_version} by its own word, {probe.policy} has "
            f"{probe.weights_digest[:NAMED_DIGITS]}…; load the policy with grpoctl sync --server"
        )


def _other_weights(link: Link, facts: ServerFacts, probe: Probe, gap: Gap) -> str:
    hint = ""
    if probe.limits == "float32" and gap.within("bfloat16"):
        hint = "; if it runs in bfloat16, set rollout.dtype to that"
    return (
        f"{link.url}: {facts} answers with other weights than policy {probe.policy} (gap {gap}; limit {probe.limits} mean "
        f"{LIMITS[probe.limits].mean}, max {LIMITS[probe.limits].max}){hint}; load the policy with grpoctl sync --server, "
        "or restart the server on it"
    )


async def _lead(link: Link, server: Server, prompt: Sequence[int], probe: Probe) -> tuple[float, float]:
    """Return the best token's lead over the second at temperature 1 and at the probe's; check the prefix cache too."""
    prompt = prompt[: server.facts.max_prompt_tokens - 1]
    plain = await server.top_2(link, prompt, 1.0)
    scaled = dict(await server.top_2(link, prompt, PROBE_TEMPERATURE))
    (best, logprob), (second, other) = plain
    anew = (await server.forced(link, [*prompt, best]))[-1]
    if not abs(anew - logprob) <= LIMITS[probe.limits].max:
        raise InputRefused(
            f"{link.url}: its next token after a cached prefix has log-probability {logprob:.4g}, computed anew {anew:.4g}; "
            "the prefix cache is of other weights: flush it, or restart the server"
        )
    if best not in scaled or second not in scaled:  # a tie in the server's precision tells nothing
        return 0.0, 0.0
    return logprob - other, scaled[best] - scaled[second]
