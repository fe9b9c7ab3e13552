"""Does this copy compute this policy? One idea for every copy: an engine's forward, a sampler, a server, a published folder.

A probe is a few sequences with what the declared policy says of them. A copy is asked for its own log-probabilities of
them, and the gap between the two is held to the limits of the floating-point type that lies between.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from grpoctl.engines.base import PolicyModel, Unit
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.inputs.policies import PROBE_RECORD, PolicyFolder
from grpoctl.settings.runtime import RuntimeConfig

if TYPE_CHECKING:
    from grpoctl.engines.warm import Warm

FORWARD_LIMIT: Final = 2e-3
"""Largest |Δ log-probability| between two ways of computing one float32 forward, nats; float32 noise is near 1e-5."""
TEXTS: Final = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "Natalia sell altogether? In May she sold 48/2 = 24 clips, so it was 48+24 = 72 clips altogether. The answer is 72.",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    return ordered[middle]\n",
)
"""What a policy without a stored probe (version 0, a hub model) is asked about."""
MAX_TOKENS: Final = 256
"""Of a probe's row: enough to tell policies apart, cheap to ask for at every shard."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How far two right copies may lie apart, nats: on average, and at one token."""

    mean: float
    max: float


LIMITS: Final = {"float32": Limit(5e-4, 2e-3), "bfloat16": Limit(0.08, 1.0)}
"""By the coarser floating-point type of the two.

Measured over real text on SmolLM2-135M (docs/rollout-engines.md): float32 at most 7.5e-6 on average and 5e-5 for a token,
bfloat16 0.027 and 0.53.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far a copy's log-probabilities lie from the policy's, nats."""

    mean: float
    max: float

    def within(self, dtype: str) -> bool:
        """Return whether this is no more than the noise of that floating-point type."""
        return self.mean <= LIMITS[dtype].mean and self.max <= LIMITS[dtype].max

    def __str__(self) -> str:
        return f"mean {self.mean:.2g}, max {self.max:.2g} nats"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Sequences and what the declared policy says of them.

    Args:
        policy: its name in messages
        weights_digest: of its weights
        prompts: ids before each completion
        completions: ids whose log-probabilities are known
        logprobs: those, temperature 1, nats
        copy_dtype: floating-point type that the copy is said to compute in
        limits: whose noise is allowed: bfloat16's where the copy or the policy's own answers are in it
    """

    policy: str
    weights_digest: str
    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    copy_dtype: str
    limits: str


def stored_probe(policy: PolicyFolder, *, dtype: str) -> Probe | None:
    """Return the probe that the update stored with its policy, for a copy of a type; None where there is none."""
    path = policy.folder / PROBE_RECORD
    record: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {"logprobs": []}
    return _probe(policy, record, dtype) if record["logprobs"] else None


def policy_probe(policy: PolicyFolder, warm: Warm, *, dtype: str, runtime: RuntimeConfig) -> Probe:
    """Return a policy's probe, for a copy of a type: the stored one, or one computed over two fixed texts; rows are cut.

    Raises:
        TryAgain: the device has no memory for the policy's model.
    """
    probe = stored_probe(policy, dtype=dtype)
    if probe is None:
        tokenizer = load_tokenizer(policy.folder, policy.ref)
        rows = [tokenizer.encode_text(text)[: min(MAX_TOKENS, tokenizer.context_tokens - 2)].tolist() for text in TEXTS]
        prompts, completions = [row[: len(row) // 4] for row in rows], [row[len(row) // 4 :] for row in rows]
        model = warm.model(policy, dtype="float32", runtime=runtime)
        logprobs = forced_logprobs(model, prompts, completions)
        record = {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}
        probe = _probe(policy, record, dtype)
    return _cut(probe)


def _probe(policy: PolicyFolder, record: dict[str, Any], dtype: str) -> Probe:
    return Probe(
        policy=policy.ref,
        weights_digest=policy.weights_digest,
        prompts=tuple(map(tuple, record["prompt_ids"])),
        completions=tuple(map(tuple, record["completion_ids"])),
        logprobs=tuple(map(tuple, record["logprobs"])),
        copy_dtype=dtype,
        limits="bfloat16" if "bfloat16" in (dtype, record.get("dtype", "float32")) else "float32",
    )


def _cut(probe: Probe) -> Probe:
    lengths = [max(1, MAX_TOKENS - len(prompt)) for prompt in probe.prompts]
    return Probe(
        policy=probe.policy,
        weights_digest=probe.weights_digest,
        prompts=probe.prompts,
        completions=tuple(ids[:n] for ids, n in zip(probe.completions, lengths, strict=True)),
        logprobs=tuple(values[:n] for values, n in zip(probe.logprobs, lengths, strict=True)),
        copy_dtype=probe.copy_dtype,
        limits=probe.limits,
    )


def forced_logprobs(
    model: PolicyModel, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return each completion's log-probabilities by token at temperature 1, one row a forward."""
    import torch

    from grpoctl.engines.forward import unit_logprobs

    result: list[list[float]] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        unit = Unit(
            prompt_ids=np.asarray(prompt, dtype=np.int32),
            completions=(np.asarray(completion, dtype=np.int32),),
            rows=(0,),
        )
        with torch.no_grad():
            values, _ = unit_logprobs(model, [unit], temperature=1.0)
        result.append([float(value) for value in values])
    return result


def gap_between(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> Gap:
    """Return mean and largest |Δ| between two answers to the same probe, as far as the shorter one goes."""
    deltas = [abs(a - b) for row, other in zip(found, expected, strict=True) for a, b in zip(row, other, strict=False)]
    return Gap(mean=sum(deltas) / len(deltas), max=max(deltas)) if deltas else Gap(mean=math.inf, max=math.inf)
