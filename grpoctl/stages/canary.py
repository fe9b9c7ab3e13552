"""What the declared policy says of a few sequences, for servers to prove themselves on.

An update stores such rows with its policy; a policy without them (version 0, a hub model) is run once over two fixed texts.
"""

from __future__ import annotations

import json
from typing import Any, Final

from grpoctl.engines.servers.verify import Canary
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.inputs.policies import PROBE_RECORD, Policy
from grpoctl.settings.runtime import RuntimeConfig
from grpoctl.stages.probe import probe_logprobs
from grpoctl.stages.stage import Context

TEXTS: Final = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "Natalia sell altogether? In May she sold 48/2 = 24 clips, so it was 48+24 = 72 clips altogether. The answer is 72.",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    return ordered[middle]\n",
)
MAX_TOKENS: Final = 256
"""Of a canary's row: enough to tell policies apart, cheap to ask for at every shard."""


def policy_canary(policy: Policy, context: Context, *, dtype: str, runtime: RuntimeConfig) -> Canary:
    """Return the canary of a policy, for servers of a floating-point type.

    Raises:
        TryAgain: the device has no memory for the policy's model.
    """
    path = policy.folder / PROBE_RECORD
    probe: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {"logprobs": []}
    if not probe["logprobs"]:
        tokenizer = load_tokenizer(policy.folder, policy.ref)
        rows = [tokenizer.encode_text(text)[: min(MAX_TOKENS, tokenizer.context_tokens - 2)].tolist() for text in TEXTS]
        prompts, completions = [row[: len(row) // 4] for row in rows], [row[len(row) // 4 :] for row in rows]
        model = context.model(policy, dtype="float32", runtime=runtime)
        probe = {
            "prompt_ids": prompts,
            "completion_ids": completions,
            "logprobs": probe_logprobs(model, prompts, completions),
        }
    noisy = "bfloat16" in (dtype, probe.get("dtype", "float32"))
    cut = [max(1, MAX_TOKENS - len(prompt)) for prompt in probe["prompt_ids"]]
    return Canary(
        policy=policy.ref,
        weights_digest=policy.weights_digest,
        prompts=tuple(map(tuple, probe["prompt_ids"])),
        completions=tuple(tuple(ids[:n]) for ids, n in zip(probe["completion_ids"], cut, strict=True)),
        logprobs=tuple(tuple(values[:n]) for values, n in zip(probe["logprobs"], cut, strict=True)),
        server_dtype=dtype,
        limits="bfloat16" if noisy else "float32",
    )
