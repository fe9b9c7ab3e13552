"""Recompute per-token log-probabilities of rollouts with the training framework's forward."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from grpoctl.artifacts.artifact import Artifact, ArtifactWriter, Work, open_artifact
from grpoctl.artifacts.manifest import RowAccounting, Sampling, Shard
from grpoctl.artifacts.tables import LOGPROBS
from grpoctl.engines.base import FloatVector
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.errors import GateFailed, InputRefused, UsageError
from grpoctl.inputs.policies import Policy, open_policy
from grpoctl.processes.local_ranks import data_ranks, needs_processes, run_in_processes
from grpoctl.processes.memory import memory_errors
from grpoctl.settings.fields import defining
from grpoctl.settings.jobs import LogprobJob
from grpoctl.stages.logprob_gap import gap_summary, gap_sums
from grpoctl.stages.split_model import split_model
from grpoctl.stages.stage import (
    Context,
    StageResult,
    already_done,
    check_outside,
    environment,
    finished,
    planned,
    require_same_tokenizer,
)
from grpoctl.stages.token_rows import TOKEN_COLUMNS, TokenRows, token_rows

log = logging.getLogger("grpoctl")
GAP_LIMITS: Final = {True: (1e-4, 1e-3), False: (0.05, 0.15)}
"""Mean gap that warns and that fails, nats: both sides float32 (measured: 5e-6), or one of them bfloat16 (0.03)."""


def run(job: LogprobJob, context: Context) -> StageResult:
    """Compute old_logprobs where a policy is named and ref_logprobs where a reference is named.

    Raises:
        UsageError: neither is named.
        InputRefused: the policy isn't the one that sampled, or another tokenizer was used.
        GateFailed: rollout and recomputed log-probabilities differ by more than logprob.gap_limit on average.
    """
    ranks = context.join(job.runtime)
    with ranks.agreed():
        prepared = _prepare(job, context)
    if isinstance(prepared, StageResult):
        return prepared
    work, rollouts, policies = prepared
    if needs_processes(job.runtime.num_processes, engine=job.logprob.engine):
        return run_in_processes("logprob", job, context, work)
    with ranks.lost_peers():
        return _compute(job, context, work, rollouts, policies)


Policies = tuple[Policy | None, Policy | None]


def _prepare(job: LogprobJob, context: Context) -> StageResult | tuple[Work, Artifact, Policies]:
    """Return what is to be computed, or the result where nothing is; every rank reads the same files."""
    if job.policy is None and job.reference is None:
        raise UsageError("nothing to compute: name --policy (old_logprobs), --reference (ref_logprobs) or both")
    check_outside(job.out, job.rollouts, job.policy, job.reference)
    rollouts = open_artifact(job.rollouts, table="rollouts")
    policy = None if job.policy is None else open_policy(job.policy)
    reference = None if job.reference is None else open_policy(job.reference)
    _check_identities(policy, reference, rollouts)
    work = Work(
        stage="logprob",
        table=LOGPROBS,
        definition={
            "stage": "logprob",
            "table_version": LOGPROBS.version,
            "logprob": defining(job.logprob),
            "rollouts": rollouts.manifest.content_digest,
            "policy": policy.weights_digest if policy else None,
            "reference": reference.weights_digest if reference else None,
        },
        config=job.model_dump(mode="json"),
        parents=[rollouts.parent("rollouts")],
        num_shards=len(rollouts.manifest.shards),
    )
    done = already_done(job.out, work)
    if done is not None:
        return done
    if context.dry_run:
        return planned(job.out, work, num_completions=rollouts.manifest.rows.input)
    return work, rollouts, (policy, reference)


def _check_identities(policy: Policy | None, reference: Policy | None, rollouts: Artifact) -> None:
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


def _compute(
    job: LogprobJob,
    context: Context,
    work: Work,
    rollouts: Artifact,
    policies: Policies,
) -> StageResult:
    policy, reference = policies
    ranks = context.ranks
    writer = ArtifactWriter(url=job.out, work=work)
    todo = ranks.share(writer.missing_shards(context.selected(work.num_shards)))
    started = time.monotonic()
    sampling = rollouts.manifest.sampling
    assert sampling is not None
    temperature = sampling.temperature
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
                table = _table(rows, old, ref, entropy)
                writer.write_shard(index, table, counts={"ok": len(rows.sample_ids)}, stats={"gap": gap})
    with ranks.agreed():
        if ranks.is_first:
            return finished(writer, _commit(writer, job, rollouts, policies, seconds=time.monotonic() - started))
    return StageResult(stage="logprob", out=job.out, state="done", artifact=None, facts={})


def _commit(
    writer: ArtifactWriter, job: LogprobJob, rollouts: Artifact, policies: Policies, *, seconds: float
) -> Artifact | None:
    policy, reference = policies
    sampling = rollouts.manifest.sampling
    assert sampling is not None
    return writer.commit(
        rows=RowAccounting(input=rollouts.manifest.rows.ok, ok=rollouts.manifest.rows.ok, skipped=0, failed=0),
        policy=policy.identity if policy else None,
        reference=reference.identity if reference else None,
        sampling=rollouts.manifest.sampling,
        stats=lambda shards: _summary(shards, job, sampling),
        tokens={"completion": rollouts.manifest.tokens["completion"]},
        timings={"forward_seconds": seconds},
        environment=environment(),
    )


def row_logprobs(
    rows: TokenRows,
    policy: Policy,
    job: LogprobJob,
    context: Context,
    temperature: float,
    *,
    with_entropy: bool = False,
) -> tuple[list[FloatVector], list[FloatVector] | None]:
    """Return each row's log-probabilities under a policy, and entropies on request."""
    import torch

    from grpoctl.engines.forward import unit_logprobs
    from grpoctl.engines.micro_batches import dealt_chunks

    ranks = data_ranks(job.logprob.engine, job.runtime, context.ranks)
    model = _model(policy, job, context)
    chunks = dealt_chunks(
        rows.prompt_ids, rows.completion_ids, policy=model, budget=job.runtime.micro_batch_tokens, ranks=ranks
    )
    logprobs: dict[int, FloatVector] = {}
    entropies: dict[int, FloatVector] = {}
    for chunk in chunks:
        with torch.no_grad(), memory_errors("computing log-probabilities", "lower runtime.micro_batch_tokens"):
            values, entropy = unit_logprobs(model, chunk.units, temperature=temperature, with_entropy=with_entropy)
        if not chunk.counts:
            continue
        place = 0
        flat = values.float().cpu().numpy()
        flat_entropy = None if entropy is None else entropy.float().cpu().numpy()
        for unit in chunk.units:
            for row, ids in zip(unit.rows, unit.completions, strict=True):
                logprobs[row] = flat[place : place + len(ids)]
                if flat_entropy is not None:
                    entropies[row] = flat_entropy[place : place + len(ids)]
                place += len(ids)
    return _in_order(rows, ranks.gather(logprobs)), _in_order(rows, ranks.gather(entropies)) if with_entropy else None


def _model(policy: Policy, job: LogprobJob, context: Context) -> Any:
    if job.logprob.engine == "megatron":
        return context.megatron_model(policy, dtype=job.logprob.dtype, runtime=job.runtime)
    if context.ranks.world_size > 1:
        return split_model(policy, context, dtype=job.logprob.dtype, runtime=job.runtime)
    return context.model(policy, dtype=job.logprob.dtype, runtime=job.runtime)


def _in_order(rows: TokenRows, parts: Sequence[dict[int, FloatVector]]) -> list[FloatVector]:
    """Return the rows' values from all ranks; empty completions have none."""
    found = {row: values for part in parts for row, values in part.items()}
    empty = np.zeros(0, dtype=np.float32)
    return [found.get(row, empty) if len(ids) == 0 else found[row] for row, ids in enumerate(rows.completion_ids)]


def _table(rows: TokenRows, old: Any, ref: Any, entropy: Any) -> pa.Table:
    schema = LOGPROBS.arrow_schema()
    empty = [None] * len(rows.sample_ids)
    columns = {"sample_id": rows.sample_ids, "old_logprobs": old, "ref_logprobs": ref, "entropy": entropy}
    return pa.table(
        {f.name: pa.array(empty if columns[f.name] is None else columns[f.name], type=f.type) for f in schema},
        schema=schema,
    )


def _summary(shards: Sequence[Shard], job: LogprobJob, sampling: Sampling) -> dict[str, Any]:
    stats = gap_summary([shard.stats["gap"] for shard in shards])
    mean = stats["rollout_gap_mean"]
    if mean is None:
        return stats
    exact = sampling.dtype == job.logprob.dtype == "float32"
    warn = GAP_LIMITS[exact][0] if job.logprob.gap_warn is None else job.logprob.gap_warn
    limit = GAP_LIMITS[exact][1] if job.logprob.gap_limit is None else job.logprob.gap_limit
    if mean > limit:
        raise GateFailed(
            f"{job.out}: rollout and recomputed log-probabilities differ by {mean:.3g} nats on average, limit {limit} "
            "(logprob.gap_limit); the sampler wasn't the declared policy (stale weights? other temperature?)"
        )
    if mean > warn:
        log.warning("rollout and recomputed log-probabilities differ by %.3g nats on average", mean)
    return stats
