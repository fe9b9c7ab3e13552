"""Give a running server another policy's weights and believe it only after it has answered like that policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from grpoctl.engines.proof import LIMITS, Gap, Probe, gap_between
from grpoctl.engines.servers.link import Link
from grpoctl.engines.servers.protocol import ServerFacts
from grpoctl.engines.servers.verify import answers, connect, verify
from grpoctl.errors import GateFailed, InputRefused

LOAD_SECONDS: Final = 1800.0
"""Deadline of one load."""
HINTS: Final = {"vllm": " (on a CPU, vLLM keeps the old output embedding of models that tie it to the input's)"}


async def load_policy_into(
    link: Link, eos_ids: Sequence[int], folder: Path, version: str, probe: Probe, *, unchanged: bool = False
) -> Gap:
    """Load a folder into a server and check that it answers like it; return the gap.

    Args:
        folder: as the server sees it, the same path as here
        version: name of the weights, which the server repeats afterwards
        unchanged: the policy has its parent's weights, so that a server rightly answers as before

    Raises:
        GateFailed: it still answers with other weights, or wouldn't load these.
        InputRefused: neither vLLM nor SGLang, or without the routes to load weights.
        ServerLost, ServerBusy: it can't be reached.
    """
    server = await connect(link, eos_ids)
    probe = _for_dtype(probe, server.facts)
    before = await answers(link, server, probe)
    if server.facts.weight_version == version and gap_between(before, probe.logprobs).within(probe.limits):
        return await verify(link, server, probe)
    try:
        await server.load(link.within(LOAD_SECONDS), folder, version)
    except InputRefused as error:
        raise GateFailed(
            f"{error}; {link.url} isn't known to hold {probe.policy}, CURRENT stays where it was"
        ) from error
    server = await connect(link, eos_ids)
    after = await answers(link, server, probe)
    gap = gap_between(after, probe.logprobs)
    if not gap.within(probe.limits):
        raise GateFailed(
            f"{link.url}: after loading {folder} it answers with other weights than {probe.policy} (gap {gap}; largest "
            f"allowed {LIMITS[probe.limits].max}){HINTS.get(server.facts.program, '')}; restart it on that folder, "
            "CURRENT stays where it was"
        )
    if after == before and not unchanged and Path(server.facts.model) != folder:
        raise GateFailed(
            f"{link.url}: after loading {folder} its answers are the same to the last bit: still the old weights, or an "
            f"update too small for its {server.facts.dtype or 'floating-point type'}; CURRENT stays where it was"
        )
    if server.facts.weight_version not in (None, version):
        raise GateFailed(f"{link.url}: says it holds weights {server.facts.weight_version}, was given {version}")
    try:
        return await verify(link, server, probe)
    except InputRefused as error:
        raise GateFailed(str(error)) from error


def _for_dtype(probe: Probe, facts: ServerFacts) -> Probe:
    """Return the probe with the noise of the type that the server runs in, bfloat16's where it doesn't say."""
    exact = facts.dtype == "float32" and probe.limits == "float32"
    return replace(probe, copy_dtype=facts.dtype or probe.copy_dtype, limits="float32" if exact else "bfloat16")
