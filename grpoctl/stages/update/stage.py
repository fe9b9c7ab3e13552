"""Take the optimizer steps over one batch of rollouts: the next policy, the optimizer's state, every step's numbers."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from pathlib import Path
from typing import Any

from grpoctl.artifacts.artifact import Work, open_artifact
from grpoctl.artifacts.lineage import require_made_from
from grpoctl.artifacts.manifest import PolicyIdentity
from grpoctl.artifacts.tables import STEPS
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.errors import Conflict, GateFailed, InputRefused
from grpoctl.inputs.policies import Policy, open_policy
from grpoctl.processes.local_ranks import data_ranks, needs_processes, run_in_processes
from grpoctl.settings.fields import defining
from grpoctl.settings.jobs import UpdateJob
from grpoctl.stages.stage import (
    Context,
    StageResult,
    already_done,
    check_outside,
    finished,
    planned,
    require_same_tokenizer,
)
from grpoctl.stages.update.batches import TrainingRows, has_signal, load_training_rows, mini_batches, num_mini_batches
from grpoctl.stages.update.report import check_limits, step_statistics
from grpoctl.stages.update.step import Step, StepSettings, learning_rate
from grpoctl.stages.update.trainer import keep_warm, ready_trainer
from grpoctl.stages.update.write import Trained, UpdateInputs, write_update

log = logging.getLogger("grpoctl")


def run(job: UpdateJob, context: Context) -> StageResult:
    """Update a policy from rollouts, scores and logprobs.

    Raises:
        InputRefused: inputs that don't belong together, stale rollouts, truncated sampling, missing log-probabilities.
        Conflict: the policy was trained on these very rollouts before.
        GateFailed: no group has signal, too many non-finite steps, or a limit was crossed.
    """
    ranks = context.join(job.runtime)
    with ranks.agreed():
        prepared = _prepare(job, context)
    if isinstance(prepared, StageResult):
        return prepared
    work, inputs, data = prepared
    if needs_processes(job.runtime.num_processes, engine=job.update.engine):
        return run_in_processes("update", job, context, work)
    with ranks.lost_peers():
        return _train(job, context, work, inputs, data)


def _prepare(job: UpdateJob, context: Context) -> StageResult | tuple[Work, UpdateInputs, TrainingRows]:
    """Return what there is to train on, or the result where nothing is to be done; every rank reads the same files."""
    check_outside(job.out, job.rollouts, job.scores, job.logprobs, job.policy, job.resume_from)
    inputs = _open(job)
    work = Work(
        stage="update",
        table=STEPS,
        definition=_definition(job, inputs),
        config={**job.model_dump(mode="json"), "policy": _lasting(job.policy)},
        parents=_parents(inputs),
    )
    done = already_done(job.out, work)
    if done is not None:
        return done
    _check(job, inputs)
    vocab_size = load_tokenizer(inputs.policy.folder, inputs.policy.ref).vocab_size
    data = load_training_rows(job, inputs.rollouts, inputs.scores, inputs.logprobs, vocab_size=vocab_size)
    if not has_signal(data) and job.update.without_signal == "stop":
        raise GateFailed(
            f"{job.scores}: 0 % of groups have differing rewards; nothing to learn from. Use harder or easier prompts, "
            "a larger group_size or more prompts, check the reward, or go on with the next batch by `--set "
            "update.without_signal=pass_on`; a run branches off into a new --run-dir with `--from …/iter-N/rollout`"
        )
    if context.dry_run:
        steps = (
            0
            if not has_signal(data)
            else job.update.epochs * num_mini_batches(data, job, group_size=_group_size(inputs))
        )
        return planned(job.out, work, num_steps=steps, num_completions=len(data.trainable))
    return work, inputs, data


def _lasting(ref: str) -> str:
    """Return a REF that sync finds again from another working directory."""
    return str(Path(ref).resolve()) if "://" not in ref and Path(ref).exists() else ref


def _open(job: UpdateJob) -> UpdateInputs:
    rollouts = open_artifact(job.rollouts, table="rollouts")
    scores = open_artifact(job.scores, table="scores")
    require_made_from(scores, rollouts)
    logprobs = None if job.logprobs is None else open_artifact(job.logprobs, table="logprobs")
    if logprobs is not None:
        require_made_from(logprobs, rollouts)
    policy = open_policy(job.policy)
    resume = None if job.resume_from is None else open_artifact(job.resume_from, table="steps")
    if resume is not None:
        assert resume.manifest.policy is not None
        if resume.manifest.policy.weights_digest != policy.weights_digest:
            raise InputRefused(
                f"--resume-from {job.resume_from}: its policy is version {resume.manifest.policy.version} (weights "
                f"{resume.manifest.policy.weights_digest[:12]}…), not {job.policy} ({policy.weights_digest[:12]}…)"
            )
    return UpdateInputs(rollouts=rollouts, scores=scores, logprobs=logprobs, resume=resume, policy=policy)


def _definition(job: UpdateJob, inputs: UpdateInputs) -> dict[str, Any]:
    return {
        "stage": "update",
        "table_version": STEPS.version,
        "update": defining(job.update),
        "seed": job.seed,
        "policy": inputs.policy.weights_digest,
        "tokenizer": inputs.policy.tokenizer_digest,
        "rollouts": inputs.digest,
        "scores": inputs.scores.manifest.content_digest,
        "logprobs": inputs.logprobs.manifest.content_digest if inputs.logprobs else None,
        "trainer_state": inputs.resume.manifest.content_digest if inputs.resume else None,
    }


def _parents(inputs: UpdateInputs) -> list[Any]:
    named = [("rollouts", inputs.rollouts), ("scores", inputs.scores)]
    named += [("logprobs", inputs.logprobs)] if inputs.logprobs else []
    named += [("trainer_state", inputs.resume)] if inputs.resume else []
    return [artifact.parent(role) for role, artifact in named]


def _group_size(inputs: UpdateInputs) -> int:
    assert inputs.rollouts.manifest.sampling is not None
    return inputs.rollouts.manifest.sampling.group_size


def _check(job: UpdateJob, inputs: UpdateInputs) -> None:
    """Refuse inputs that would train on the wrong thing."""
    sampled, sampling = inputs.rollouts.manifest.policy, inputs.rollouts.manifest.sampling
    assert sampled is not None and sampling is not None
    policy = inputs.policy
    require_same_tokenizer(policy, sampled.tokenizer_digest, job.rollouts)
    if inputs.digest in policy.consumed:
        raise Conflict(f"{job.policy}: was trained on {job.rollouts} already (its record names them); sample anew")
    truncated = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if truncated and not job.update.allow_truncated_sampling:
        raise InputRefused(
            f"{job.rollouts}: sampled with top_p {sampling.top_p}, top_k {sampling.top_k}, min_p {sampling.min_p}, whose "
            "log-probabilities aren't the policy's; sample without, or set update.allow_truncated_sampling"
        )
    _check_staleness(job, policy, sampled)
    _check_reference(job, inputs)


def _check_staleness(job: UpdateJob, policy: Policy, sampled: PolicyIdentity) -> None:
    staleness = policy.version - sampled.version
    if staleness == 0 and sampled.weights_digest == policy.weights_digest:
        return
    if staleness == 0:
        raise InputRefused(
            f"{job.rollouts}: sampled from weights {sampled.weights_digest[:12]}…, {job.policy} has "
            f"{policy.weights_digest[:12]}… under the same version {policy.version}; these are two policies"
        )
    if not 0 < staleness <= job.update.max_staleness:
        raise InputRefused(
            f"{job.rollouts}: sampled from version {sampled.version}, {job.policy} is version {policy.version}; "
            f"update.max_staleness allows {job.update.max_staleness}: sample anew or raise it"
        )
    if job.update.old == "old_logprobs" and job.update.correction == "none":
        log.warning("rollouts are %d versions old; consider update.correction", staleness)


def _check_reference(job: UpdateJob, inputs: UpdateInputs) -> None:
    if job.update.kl_coef > 0 and (inputs.logprobs is None or inputs.logprobs.manifest.reference is None):
        raise InputRefused(
            "update.kl_coef above 0 needs ref_logprobs; run `grpoctl logprob --reference …` and give --logprobs"
        )


def _train(job: UpdateJob, context: Context, work: Work, inputs: UpdateInputs, data: TrainingRows) -> StageResult:
    assert inputs.rollouts.manifest.sampling is not None
    sampling = inputs.rollouts.manifest.sampling
    sharers = data_ranks(job.update.engine, job.runtime, context.ranks)
    trainer = ready_trainer(job, context, inputs)
    settings = StepSettings(
        config=job.update,
        temperature=sampling.temperature,
        norm_tokens=job.update.norm_tokens or sampling.max_new_tokens,
        micro_batch_tokens=job.runtime.micro_batch_tokens,
    )
    started = time.monotonic()
    with context.ranks.agreed():
        learns = has_signal(data)
        if not learns:
            log.warning("%s: no group has differing rewards; the policy is passed on unchanged", job.scores)
        plan = [
            (epoch, rows)
            for epoch in range(job.update.epochs if learns else 0)
            for rows in mini_batches(data, job, digest=inputs.digest, group_size=sampling.group_size, epoch=epoch)
        ]
    trained = Trained(trainer=trainer, steps=[], tokens={})
    for epoch, rows in context.follow(plan, "update"):
        keep = job.update.token_stats and epoch == 0
        settings = dataclasses.replace(settings, keep_tokens=keep)
        step = Step(trainer=trainer, data=data, rows=rows, settings=settings, ranks=sharers)
        global_step = inputs.first_step + len(trained.steps)
        trained.steps.append({"epoch": epoch, **_take(step, job, global_step, trained.tokens)})
        with context.ranks.agreed():
            if context.ranks.is_first:
                check_limits(job, trained.steps)
    trained = dataclasses.replace(trained, seconds=time.monotonic() - started)
    written = write_update(job, work, inputs, data, trained, ranks=context.ranks)
    if written is None:
        return StageResult(stage="update", out=job.out, state="done", artifact=None, facts={})
    writer, artifact, digest = written
    keep_warm(job, context, trainer, artifact, digest)
    return finished(writer, artifact)


def _take(step: Step, job: UpdateJob, global_step: int, tokens: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Run one optimizer step and return its row of the steps table."""
    started = time.monotonic()
    sums, denominator = step.run()
    tokens.update(sums.tokens)
    lr = learning_rate(job.update, global_step)
    loss = (sums.policy_numerator + job.update.kl_coef * sums.kl_numerator) / denominator if denominator else 0.0
    norm: float | None = None
    status, skipped = "ok", None
    if denominator == 0:
        status = "no_tokens"
    elif not math.isfinite(loss):
        step.trainer.discard()
        status = "nonfinite"
    else:
        norm = step.trainer.step(lr)
        status = "ok" if norm is not None else "nonfinite"
    if status == "nonfinite":
        skipped = [step.data.rows.sample_ids[row] for row in (sums.nonfinite_rows or step.rows)]
    return {
        "global_step": global_step + 1,
        "status": status,
        "skipped_ids": skipped,
        "loss": loss,
        **step_statistics(job, step, sums),
        "loss_denominator": denominator,
        "grad_norm": norm,
        "lr": lr,
        "seconds": time.monotonic() - started,
    }
