"""Sample G completions for each prompt of an iteration, keeping every sampled token's log-probability."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from grpoctl.algorithms.seeds import identity_seed
from grpoctl.artifacts.canonical import canonical_json
from grpoctl.artifacts.manifest import RowAccounting, Sampling, Shard
from grpoctl.artifacts.tables import ROLLOUTS
from grpoctl.artifacts.writer import ArtifactWriter
from grpoctl.engines.base import Sample, Sampler, SampleRequest, SamplingSettings
from grpoctl.engines.registry import sampling_engine
from grpoctl.engines.stop_strings import StopStrings, split_stops
from grpoctl.engines.tokenizer import Tokenizer, load_tokenizer
from grpoctl.errors import GateFailed, TryAgain
from grpoctl.inputs.policies import PolicyFolder, open_policy
from grpoctl.inputs.prompts import PromptSet, load_prompts
from grpoctl.processes.memory import memory_errors
from grpoctl.settings.fields import defining
from grpoctl.settings.jobs import RolloutJob
from grpoctl.stages.context import Context
from grpoctl.stages.planned_prompts import PlannedPrompt, choose_rows, plan_prompts
from grpoctl.stages.stage import Definition, Facts, Prepared, Stage

log = logging.getLogger("grpoctl")
TRUNCATED_WARN = 0.5
KEPT_OF_GENERATION_CONFIG: Final = frozenset(
    {
        "eos_token_id",
        "pad_token_id",
        "bos_token_id",
        "transformers_version",
        "do_sample",
        "use_cache",
        "cache_implementation",
    }
)
"""What changes no distribution: ids, of which those that end a completion are used, and how the model is run."""
RE_ASKS: Final = 2
"""Times that an aborted request is sent again before its row fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutInputs:
    """The policy, the prompts, and which rows of them this iteration takes."""

    policy: PolicyFolder
    prompts: PromptSet
    rows: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The prompts to sample in order, where they come from, and how many were skipped."""

    policy: PolicyFolder
    tokenizer: Tokenizer
    prompts: PromptSet
    chosen: list[PlannedPrompt]
    num_skipped: int


def open_inputs(job: RolloutJob) -> RolloutInputs:
    """Open policy and prompts.

    Raises:
        InputRefused: prompts or policy that can't be used.
    """
    policy = open_policy(job.policy)
    prompts = load_prompts(job.prompts)
    return RolloutInputs(policy=policy, prompts=prompts, rows=choose_rows(prompts, job))


def define(job: RolloutJob, inputs: RolloutInputs) -> Definition:
    """Return what the rollouts are made of."""
    num_shards = math.ceil(len(inputs.rows) / job.rollout.prompts_per_shard)
    return Definition(values=_definition(job, inputs.policy, inputs.prompts), num_shards=num_shards)


def prepare(job: RolloutJob, inputs: RolloutInputs, context: Context) -> Prepared[RolloutPlan]:
    """Tokenise the prompts and settle every length question before anything is sampled."""
    policy, prompts = inputs.policy, inputs.prompts
    if job.rollout.group_size < 2:
        context.warm.tell_once(
            "group_size 1: without comparison there is no advantage; only advantages: none can train on it"
        )
    tokenizer = load_tokenizer(policy.folder, policy.ref)
    chosen, skipped = plan_prompts(prompts, inputs.rows, job, tokenizer)
    for note in prompts.notes:
        context.warm.tell_once(f"{job.prompts.path}: {note}")
    if prompts.format == "text" and tokenizer.inner.chat_template and job.prompts.chat_template == "auto":
        log.info(
            "prompts are text and go to the model as they are; prompts.chat_template: always makes them user turns"
        )
    _tell_ignored(policy, context)
    longest = max(len(prompt.ids) + prompt.max_new_tokens for prompt in chosen)
    sampling_engine(job.rollout.engine).refuse(job, longest)
    plan = RolloutPlan(policy=policy, tokenizer=tokenizer, prompts=prompts, chosen=chosen, num_skipped=skipped)
    facts = {"num_prompts": len(chosen), "num_completions": len(chosen) * job.rollout.group_size}
    return Prepared(plan=plan, facts=facts)


def _tell_ignored(policy: PolicyFolder, context: Context) -> None:
    """Say what of the model's own generation_config.json no sample is drawn by."""
    path = policy.folder / "generation_config.json"
    said: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    ignored = {
        key: value
        for key, value in sorted(said.items())
        if key not in KEPT_OF_GENERATION_CONFIG and not key.startswith("_") and value is not None
    }
    if ignored:
        shown = ", ".join(f"{key} {json.dumps(value)}" for key, value in ignored.items())
        context.warm.tell_once(
            f"{policy.ref}: its generation_config.json isn't applied ({shown}): completions are drawn by rollout's settings"
        )


def _definition(job: RolloutJob, policy: PolicyFolder, prompts: PromptSet) -> dict[str, Any]:
    return {
        "stage": "rollout",
        "table_version": ROLLOUTS.version,
        "rollout": defining(job.rollout),
        "prompts": {**job.prompts.model_dump(mode="json", exclude={"path", "split"}), "digest": prompts.digest},
        "seed": job.seed,
        "iteration": job.iteration,
        "policy": {
            "version": policy.version,
            "weights_digest": policy.weights_digest,
            "tokenizer_digest": policy.tokenizer_digest,
        },
    }


def compute(job: RolloutJob, plan: RolloutPlan, writer: ArtifactWriter, context: Context) -> Facts:
    """Sample every missing shard."""
    num_shards = writer.work.num_shards
    todo = writer.missing_shards(context.selected(num_shards))
    sampler = sampling_engine(job.rollout.engine).sampler(job, plan.policy, context.warm) if todo else None
    settings = split_stops(plan.tokenizer, _settings(job))
    stops = StopStrings(tokenizer=plan.tokenizer, texts=settings.stop)
    started = time.monotonic()
    for index in context.follow(todo, "rollout"):
        assert sampler is not None
        size = job.rollout.prompts_per_shard
        part = plan.chosen[index * size : (index + 1) * size]
        with memory_errors("sampling", "lower runtime.rollout_batch_size or rollout.max_new_tokens"):
            samples = draw_samples(sampler, _requests(part, job), settings)
        samples = [stops.cut(sample) for sample in samples]
        rows = list(_rows(part, samples, job, plan.tokenizer))
        writer.write_shard(index, _table(rows, part, job, plan), counts=_counts(rows), stats=_stats(rows))
    return Facts(
        rows=lambda shards: _accounting(shards, plan.num_skipped * job.rollout.group_size, job),
        policy=plan.policy.identity,
        sampling=_sampling(job, sampler, plan.prompts),
        stats=lambda shards: _summary(shards, job),
        tokens=lambda shards: {
            "prompt": sum(s.stats["prompt_tokens"] for s in shards),
            "completion": sum(s.stats["completion_tokens"] for s in shards),
        },
        timings={"sampling_seconds": time.monotonic() - started},
    )


def draw_samples(sampler: Sampler, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Sample]:
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


def _settings(job: RolloutJob) -> SamplingSettings:
    names = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids")
    return SamplingSettings(**{name: getattr(job.rollout, name) for name in names})


def _requests(part: Sequence[PlannedPrompt], job: RolloutJob) -> list[SampleRequest]:
    return [
        SampleRequest(
            prompt_ids=prompt.ids, seed=_seed(job, prompt.prompt_id, index), max_new_tokens=prompt.max_new_tokens
        )
        for prompt in part
        for index in range(job.rollout.group_size)
    ]


def _seed(job: RolloutJob, prompt_id: str, sample_index: int) -> int:
    return identity_seed("sample", job.seed, job.iteration, prompt_id, sample_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    sample: Sample
    text: str
    mask: bool
    status: str
    error: str | None
    num_prompt_tokens: int


def _rows(
    part: Sequence[PlannedPrompt], samples: Sequence[Sample], job: RolloutJob, tokenizer: Tokenizer
) -> Iterator[_Row]:
    texts = tokenizer.decode_many([sample.completion_ids for sample in samples])
    for number, (sample, text) in enumerate(zip(samples, texts, strict=True)):
        error = _fault(sample, job)
        empty = error is None and len(sample.completion_ids) == 0
        cut = min((text.find(stop) for stop in job.rollout.stop if stop in text), default=len(text))
        yield _Row(
            sample=sample,
            text=text[:cut],
            mask=not (sample.finish_reason == "length" and job.rollout.truncated == "mask"),
            status="failed" if error else "empty" if empty else "ok",
            error=error,
            num_prompt_tokens=len(part[number // job.rollout.group_size].ids),
        )


def _fault(sample: Sample, job: RolloutJob) -> str | None:
    if sample.error is not None:
        return sample.error
    if len(sample.logprobs) != len(sample.completion_ids):
        return f"{len(sample.logprobs)} log-probabilities for {len(sample.completion_ids)} tokens"
    if not np.isfinite(sample.logprobs).all():
        return "a log-probability is not finite; suspect bad weights"
    if sample.finish_reason == "length" and job.rollout.truncated == "drop":
        return "hit max_new_tokens (rollout.truncated: drop)"
    return None


def _table(rows: Sequence[_Row], part: Sequence[PlannedPrompt], job: RolloutJob, plan: RolloutPlan) -> pa.Table:
    size, prompts = job.rollout.group_size, plan.prompts
    groups = [f"{prompt.prompt_id}@{job.iteration}" for prompt in part]
    texts = [prompts.prompts[prompt.row] for prompt in part]
    shown = [text if isinstance(text, str) else canonical_json(text) for text in texts]
    columns: dict[str, Any] = {
        "sample_id": [f"{group}#{index}" for group in groups for index in range(size)],
        "group_id": [group for group in groups for _ in range(size)],
        "prompt_id": [prompt.prompt_id for prompt in part for _ in range(size)],
        "sample_index": [index for _ in part for index in range(size)],
        "prompt": [text for text in shown for _ in range(size)],
        "completion": [row.text for row in rows],
        "prompt_ids": [prompt.ids for prompt in part for _ in range(size)],
        "completion_ids": [row.sample.completion_ids for row in rows],
        "completion_mask": [np.full(len(row.sample.completion_ids), row.mask) for row in rows],
        "rollout_logprobs": [None if row.status == "failed" else row.sample.logprobs for row in rows],
        "finish_reason": [row.sample.finish_reason for row in rows],
        "policy_version": [plan.policy.version] * len(rows),
        "seed": [_seed(job, prompt.prompt_id, index) for prompt in part for index in range(size)],
        "status": [row.status for row in rows],
        "error": [row.error for row in rows],
        "source": prompts.source.take(pa.array([prompt.row for prompt in part for _ in range(size)], pa.int64())),
    }
    return ROLLOUTS.build(columns, {"source": prompts.source.type})


def _counts(rows: Sequence[_Row]) -> dict[str, int]:
    return {status: sum(row.status == status for row in rows) for status in ("ok", "empty", "failed")}


def _stats(rows: Sequence[_Row]) -> dict[str, Any]:
    return {
        "end_only": sum(row.sample.finish_reason == "stop" and len(row.sample.completion_ids) == 1 for row in rows),
        "truncated": sum(row.sample.finish_reason == "length" for row in rows),
        "prompt_tokens": sum(row.num_prompt_tokens for row in rows),
        "completion_tokens": sum(len(row.sample.completion_ids) for row in rows),
        "first_error": next((row.error for row in rows if row.error is not None), None),
        "logprob_sum": float(sum(row.sample.logprobs.sum(dtype=np.float64) for row in rows if row.status == "ok")),
    }


def _accounting(shards: Sequence[Shard], skipped: int, job: RolloutJob) -> RowAccounting:
    failed = sum(shard.counts["failed"] for shard in shards)
    total = sum(shard.rows for shard in shards)
    if failed > job.rollout.failed_budget * total:
        first = next(shard.stats["first_error"] for shard in shards if shard.counts["failed"])
        raise GateFailed(
            f"{job.out}: {failed} of {total} rows failed in the sampler, budget {job.rollout.failed_budget:.0%} "
            f"(rollout.failed_budget); the first: {first}; see the error column of its shards"
        )
    return RowAccounting(input=total + skipped, ok=total - failed, skipped=skipped, failed=failed)


def _summary(shards: Sequence[Shard], job: RolloutJob) -> dict[str, Any]:
    total = sum(shard.rows for shard in shards)
    tokens = sum(shard.stats["completion_tokens"] for shard in shards)
    truncated = sum(shard.stats["truncated"] for shard in shards) / total
    if truncated > job.rollout.max_truncated_ratio:
        raise GateFailed(
            f"{job.out}: {truncated:.0%} of completions hit max_new_tokens, limit {job.rollout.max_truncated_ratio:.0%} "
            "(rollout.max_truncated_ratio); raise rollout.max_new_tokens"
        )
    if truncated > TRUNCATED_WARN:
        log.warning("%.0f %% of completions hit max_new_tokens; raise rollout.max_new_tokens?", 100 * truncated)
    return {
        "num_completions": total,
        "num_empty": sum(shard.counts["empty"] for shard in shards),
        "num_end_only": sum(shard.stats["end_only"] for shard in shards),
        "mean_completion_tokens": tokens / total,
        "truncated_ratio": truncated,
        "mean_logprob": sum(shard.stats["logprob_sum"] for shard in shards) / max(1, tokens),
    }


def _sampling(job: RolloutJob, sampler: Sampler | None, prompts: PromptSet) -> Sampling:
    settings = job.rollout
    return Sampling(
        engine=sampler.name if sampler is not None else settings.engine,
        group_size=settings.group_size,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_new_tokens=settings.max_new_tokens,
        dtype=settings.dtype,
        logprobs="processed",
        prompt_format=prompts.format,
        reproducible=sampler.reproducible if sampler is not None else True,
    )


STAGE = Stage(
    name="rollout",
    job=RolloutJob,
    table=ROLLOUTS,
    reads=lambda job: (job.prompts.path, job.policy),
    open=open_inputs,
    define=define,
    prepare=prepare,
    compute=compute,
)
