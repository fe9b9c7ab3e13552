"""Recompute per-token log-probabilities of rollouts with the training framework's forward."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from grpoctl.artifacts.artifact import Artifact, open_artifact
from grpoctl.artifacts.manifest import RowAccounting, Sampling, Shard
from grpoctl.artifacts.tables import LOGPROBS
from grpoctl.artifacts.writer import ArtifactWriter
from grpoctl.engines.base import FloatVector
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.errors import GateFailed, InputRefused, UsageError
from grpoctl.inputs.policies import PolicyFolder, open_policy
from grpoctl.processes.memory import memory_errors
from grpoctl.settings.fields import defining
from grpoctl.settings.jobs import LogprobJob
from grpoctl.stages.context import Context
from grpoctl.stages.logprob_gap import gap_summary, gap_sums, likely_causes
from grpoctl.stages.stage import Definition, Facts, Prepared, Stage, data_parallel_ranks, require_same_tokenizer
from grpoctl.stages.token_rows import TOKEN_COLUMNS, TokenRows, token_rows

log = logging.getLogger("grpoctl")
GAP_LIMITS: Final = {True: (1e-4, 1e-3), False: (0.05, 0.15)}
"""Mean gap that warns and that fails, nats: both sides float32 (measured: 5e-6), or one of them bfloat16 (0.03)."""
LARGEST: Final = 20
"""One token's gap may be this many times the mean that fails; measured are 10 and 20 times the measured means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobInputs:
    """The rollouts, the policy for old_logprobs and the reference for ref_logprobs."""

    rollouts: Artifact
    policy: PolicyFolder | None
    reference: PolicyFolder | None

    @property
    def sampling(self) -> Sampling:
        """What the completions were drawn from."""
        assert self.rollouts.manifest.sampling is not None
        return self.rollouts.manifest.sampling


def open_inputs(job: LogprobJob) -> LogprobInputs:
    """Open rollouts and policies.

    Raises:
        UsageError: neither policy nor reference is named.
        InputRefused: the policy isn't the one that sampled, or another tokenizer was used.
    """
    if job.policy is None and job.reference is None:
        raise UsageError("nothing to compute: name --policy (old_logprobs), --reference (ref_logprobs) or both")
    rollouts = open_artifact(job.rollouts, table="rollouts")
    policy = None if job.policy is None else open_policy(job.policy)
    reference = None if job.reference is None else open_policy(job.reference)
    _check_identities(policy, reference, rollouts)
    return LogprobInputs(rollouts=rollouts, policy=policy, reference=reference)


def define(job: LogprobJob, inputs: LogprobInputs) -> Definition:
    """Return what the log-probabilities are made of."""
    values = {
        "stage": "logprob",
        "table_version": LOGPROBS.version,
        "logprob": defining(job.logprob),
        "rollouts": inputs.rollouts.manifest.content_digest,
        "policy": inputs.policy.weights_digest if inputs.policy else None,
        "reference": inputs.reference.weights_digest if inputs.reference else None,
    }
    parents = [inputs.rollouts.parent("rollouts")]
    return Definition(values=values, parents=parents, num_shards=len(inputs.rollouts.manifest.shards))


def prepare(job: LogprobJob, inputs: LogprobInputs, context: Context) -> Prepared[LogprobInputs]:
    """Return the inputs as they are: every row is recomputed."""
    return Prepared(plan=inputs, facts={"num_completions": inputs.rollouts.manifest.rows.input})


def _check_identities(policy: PolicyFolder | None, reference: PolicyFolder | None, rollouts: Artifact) -> None:
    sampled = rollouts.manifest.policy
    assert sampled is not None
    for given in (policy, reference):
        if given is not None:
            require_same_tokenizer(given, sampled.tokenizer_digest, rollouts.url)
    if policy is not None and policy.weights_digest != sampled.weights_digest:
        raise InputRefused(
            f"{policy.ref}: weights {policy.weights_digest[:12]}…, but {rollouts.url} was sampled from "
            f"{sampled.ref} (version {sampled.version}, weights {sampled.weights_digest[:12]}…); name that policy"
        )


def compute(job: LogprobJob, inputs: LogprobInputs, writer: ArtifactWriter, context: Context) -> Facts:
    """Recompute every missing shard; all ranks share each of them."""
    rollouts, policy, reference, ranks = inputs.rollouts, inputs.policy, inputs.reference, context.ranks
    todo = ranks.broadcast(writer.missing_shards(context.selected(writer.work.num_shards)))
    started = time.monotonic()
    temperature = inputs.sampling.temperature
    for index in context.follow(todo, "logprob"):
        shard = rollouts.read_shard(index, TOKEN_COLUMNS)
        some = policy or reference
        assert some is not None
        tokenizer = load_tokenizer(some.folder, some.ref)
        rows = token_rows(shard, rollouts, vocab_size=tokenizer.vocab_size)
        old = entropy = ref = None
        if policy is not None:
            old, entropy = row_logprobs(rows, policy, job, context, temperature, with_entropy=job.logprob.entropy)
        if reference is not None:
            same = policy is not None and reference.weights_digest == policy.weights_digest
            ref = old if same else row_logprobs(rows, reference, job, context, temperature)[0]
        with ranks.agreed():
            gap = None if old is None else gap_sums(rows, old, tokenizer)
            if ranks.is_first:
                columns = {"sample_id": rows.sample_ids, "old_logprobs": old, "ref_logprobs": ref, "entropy": entropy}
                table = LOGPROBS.build(columns)
                writer.write_shard(index, table, counts={"ok": len(rows.sample_ids)}, stats={"gap": gap})
    num_rows = rollouts.manifest.rows.ok
    return Facts(
        rows=RowAccounting(input=num_rows, ok=num_rows, skipped=0, failed=0),
        policy=policy.identity if policy else None,
        reference=reference.identity if reference else None,
        sampling=inputs.sampling,
        stats=lambda shards: _summary(shards, job, inputs.sampling),
        tokens={"completion": rollouts.manifest.tokens["completion"]},
        timings={"forward_seconds": time.monotonic() - started},
    )


def row_logprobs(
    rows: TokenRows,
    policy: PolicyFolder,
    job: LogprobJob,
    context: Context,
    temperature: float,
    *,
    with_entropy: bool = False,
) -> tuple[list[FloatVector], list[FloatVector] | None]:
    """Return each row's log-probabilities under a policy, and entropies on request."""
    import torch

    from grpoctl.engines.forward import unit_logprobs
    from grpoctl.engines.micro_batches import deal_micro_batches

    ranks = data_parallel_ranks(job.logprob.engine, job.runtime, context.ranks)
    model = context.warm.model(policy, dtype=job.logprob.dtype, runtime=job.runtime, engine=job.logprob.engine)
    micro_batches = deal_micro_batches(
        rows.prompt_ids, rows.completion_ids, policy=model, budget=job.runtime.micro_batch_tokens, ranks=ranks
    )
    logprobs: dict[int, FloatVector] = {}
    entropies: dict[int, FloatVector] = {}
    for micro_batch in micro_batches:
        with torch.no_grad(), memory_errors("computing log-probabilities", "lower runtime.micro_batch_tokens"):
            values, entropy = unit_logprobs(
                model, micro_batch.units, temperature=temperature, with_entropy=with_entropy
            )
        if not micro_batch.counts:
            continue
        place = 0
        flat = values.float().cpu().numpy()
        flat_entropy = None if entropy is None else entropy.float().cpu().numpy()
        for unit in micro_batch.units:
            for row, ids in zip(unit.rows, unit.completions, strict=True):
                logprobs[row] = flat[place : place + len(ids)]
                if flat_entropy is not None:
                    entropies[row] = flat_entropy[place : place + len(ids)]
                place += len(ids)
    return _in_order(rows, ranks.all_gather(logprobs)), _in_order(
        rows, ranks.all_gather(entropies)
    ) if with_entropy else None


def _in_order(rows: TokenRows, parts: Sequence[dict[int, FloatVector]]) -> list[FloatVector]:
    """Return the rows' values from all ranks; empty completions have none."""
    found = {row: values for part in parts for row, values in part.items()}
    empty = np.zeros(0, dtype=np.float32)
    return [found.get(row, empty) if len(ids) == 0 else found[row] for row, ids in enumerate(rows.completion_ids)]


def _summary(shards: Sequence[Shard], job: LogprobJob, sampling: Sampling) -> dict[str, Any]:
    stats = gap_summary([shard.stats["gap"] for shard in shards])
    mean = stats["rollout_gap_mean"]
    if mean is None:
        return stats
    exact = sampling.dtype == job.logprob.dtype == "float32"
    warn = GAP_LIMITS[exact][0] if job.logprob.gap_warn is None else job.logprob.gap_warn
    limit = GAP_LIMITS[exact][1] if job.logprob.gap_limit is None else job.logprob.gap_limit
    largest = LARGEST * limit if job.logprob.gap_max_limit is None else job.logprob.gap_max_limit
    if mean > limit:
        raise GateFailed(
            f"{job.out}: rollout and recomputed log-probabilities differ by {mean:.3g} nats on average, limit {limit} "
            f"(logprob.gap_limit); the sampler wasn't the declared policy. What fits: {likely_causes(stats)}"
        )
    if stats["rollout_gap_max"] > largest:
        raise GateFailed(
            f"{job.out}: rollout and recomputed log-probabilities differ by {stats['rollout_gap_max']:.3g} nats at "
            f"{stats['rollout_gap_max_at']}, limit {largest} (logprob.gap_max_limit), {mean:.3g} on average. What fits: "
            f"{likely_causes(stats)}"
        )
    if mean > warn:
        log.warning("rollout and recomputed log-probabilities differ by %.3g nats on average", mean)
    return stats


STAGE = Stage(
    name="logprob",
    job=LogprobJob,
    table=LOGPROBS,
    reads=lambda job: (job.rollouts, job.policy, job.reference),
    open=open_inputs,
    define=define,
    prepare=prepare,
    compute=compute,
    engine=lambda job: job.logprob.engine,
    needed=lambda config: config.needs_logprobs,
)
