"""Recompute per-token log-probabilities of rollouts with the training framework's forward."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from grpoctl.artifacts import Artifact, ArtifactWriter, Work, open_artifact
from grpoctl.config import LogprobJob, defining
from grpoctl.engines.base import FloatVector, chunks_by_tokens
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.errors import GateFailed, InputRefused, UsageError
from grpoctl.policies import Policy, open_policy
from grpoctl.schema.manifest import RowAccounting, Shard
from grpoctl.schema.tables import LOGPROBS
from grpoctl.stages.base import (
    Context,
    StageResult,
    already_done,
    check_outside,
    environment,
    finished,
    memory_errors,
    planned,
    require_same_tokenizer,
)
from grpoctl.stages.rows import TOKEN_COLUMNS, TokenRows, token_rows

log = logging.getLogger("grpoctl")


def run(job: LogprobJob, context: Context) -> StageResult:
    """Compute old_logprobs where a policy is named and ref_logprobs where a reference is named.

    Raises:
        UsageError: neither is named.
        InputRefused: the policy isn't the one that sampled, or another tokenizer was used.
        GateFailed: rollout and recomputed log-probabilities differ by more than logprob.gap_limit on average.
    """
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
    return _compute(job, context, work, rollouts, (policy, reference))


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
    policies: tuple[Policy | None, Policy | None],
) -> StageResult:
    policy, reference = policies
    writer = ArtifactWriter(url=job.out, work=work)
    todo = writer.missing_shards(context.selected(work.num_shards))
    started = time.monotonic()
    assert rollouts.manifest.sampling is not None
    temperature = rollouts.manifest.sampling.temperature
    for index in context.follow(todo, "logprob"):
        shard = rollouts.read_shard(index, TOKEN_COLUMNS)
        some = policy or reference
        assert some is not None
        rows = token_rows(shard, rollouts, vocab_size=load_tokenizer(some.folder, some.ref).vocab_size)
        old = entropy = ref = None
        if policy is not None:
            old, entropy = row_logprobs(rows, policy, job, context, temperature, with_entropy=job.logprob.entropy)
        if reference is not None:
            same = policy is not None and reference.weights_digest == policy.weights_digest
            ref = old if same else row_logprobs(rows, reference, job, context, temperature)[0]
        table = _table(rows, old, ref, entropy)
        writer.write_shard(index, table, counts={"ok": len(rows.sample_ids)}, stats=_gap(rows, old))
    artifact = writer.commit(
        rows=RowAccounting(input=rollouts.manifest.rows.ok, ok=rollouts.manifest.rows.ok, skipped=0, failed=0),
        policy=policy.identity if policy else None,
        reference=reference.identity if reference else None,
        sampling=rollouts.manifest.sampling,
        stats=lambda shards: _summary(shards, job),
        tokens={"completion": rollouts.manifest.tokens["completion"]},
        timings={"forward_seconds": time.monotonic() - started},
        environment=environment(),
    )
    return finished(writer, artifact)


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

    from grpoctl.engines.forward import make_units, unit_logprobs

    model = context.model(policy, dtype=job.logprob.dtype, runtime=job.runtime)
    budget = job.runtime.micro_batch_tokens
    units = make_units(rows.prompt_ids, rows.completion_ids, policy=model, budget=budget)
    logprobs: dict[int, FloatVector] = {}
    entropies: dict[int, FloatVector] = {}
    for batch in chunks_by_tokens(units, budget):
        with torch.no_grad(), memory_errors("computing log-probabilities", "runtime.micro_batch_tokens"):
            values, entropy = unit_logprobs(model, batch, temperature=temperature, with_entropy=with_entropy)
        place = 0
        flat = values.float().cpu().numpy()
        flat_entropy = None if entropy is None else entropy.float().cpu().numpy()
        for unit in batch:
            for row, ids in zip(unit.rows, unit.completions, strict=True):
                logprobs[row] = flat[place : place + len(ids)]
                if flat_entropy is not None:
                    entropies[row] = flat_entropy[place : place + len(ids)]
                place += len(ids)
    ordered = range(len(rows.sample_ids))
    return [logprobs[row] for row in ordered], [entropies[row] for row in ordered] if with_entropy else None


def _table(rows: TokenRows, old: Any, ref: Any, entropy: Any) -> pa.Table:
    schema = LOGPROBS.arrow_schema()
    empty = [None] * len(rows.sample_ids)
    columns = {"sample_id": rows.sample_ids, "old_logprobs": old, "ref_logprobs": ref, "entropy": entropy}
    return pa.table(
        {f.name: pa.array(empty if columns[f.name] is None else columns[f.name], type=f.type) for f in schema},
        schema=schema,
    )


def _gap(rows: TokenRows, old: Sequence[FloatVector] | None) -> dict[str, Any]:
    """Return sums over |rollout_logprobs − old_logprobs| of one shard."""
    if old is None:
        return {"gap": None}
    parts = [
        np.abs(kept.astype(np.float64) - recomputed)
        for kept, recomputed in zip(rows.rollout_logprobs, old, strict=True)
        if kept is not None and len(kept)
    ]
    gaps = np.concatenate(parts) if parts else np.zeros(0)
    if not np.isfinite(gaps).all():
        raise GateFailed(
            f"{int((~np.isfinite(gaps)).sum())} recomputed log-probabilities are not finite; suspect bad weights"
        )
    counts, _ = np.histogram(np.log10(np.maximum(gaps, 1e-12)), bins=_GAP_BINS)
    largest = float(gaps.max()) if len(gaps) else 0.0
    return {"gap": {"sum": float(gaps.sum()), "count": len(gaps), "max": largest, "log10_histogram": counts.tolist()}}


_GAP_BINS = np.linspace(-12, 3, 301)
"""Edges for the distribution of gaps in powers of ten: percentiles over shards to 4 %, without keeping every token."""


def _summary(shards: Sequence[Shard], job: LogprobJob) -> dict[str, Any]:
    gaps = [shard.stats["gap"] for shard in shards if shard.stats["gap"] is not None]
    count = sum(gap["count"] for gap in gaps)
    if not count:
        return {"rollout_gap_mean": None, "rollout_gap_p99": None, "rollout_gap_max": None}
    mean = sum(gap["sum"] for gap in gaps) / count
    histogram = np.sum([gap["log10_histogram"] for gap in gaps], axis=0)
    p99 = float(10 ** _GAP_BINS[1 + int(np.searchsorted(np.cumsum(histogram), 0.99 * count))])
    if mean > job.logprob.gap_limit:
        raise GateFailed(
            f"{job.out}: rollout and recomputed log-probabilities differ by {mean:.3g} nats on average, limit "
            f"{job.logprob.gap_limit} (logprob.gap_limit); the sampler wasn't the declared policy (stale weights? "
            "other temperature?)"
        )
    if mean > job.logprob.gap_warn:
        log.warning("rollout and recomputed log-probabilities differ by %.3g nats on average", mean)
    return {"rollout_gap_mean": mean, "rollout_gap_p99": p99, "rollout_gap_max": max(gap["max"] for gap in gaps)}
