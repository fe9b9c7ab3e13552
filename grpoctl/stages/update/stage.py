"""Take the optimizer steps over one batch of rollouts: the next policy, the optimizer's state, every step's numbers."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpoctl.artifacts.artifact import Artifact, open_artifact
from grpoctl.artifacts.lineage import require_made_from
from grpoctl.artifacts.manifest import PolicyIdentity
from grpoctl.artifacts.tables import STEPS
from grpoctl.artifacts.writer import ArtifactWriter
from grpoctl.engines.registry import training_engine
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.errors import Conflict, GateFailed, InputRefused
from grpoctl.inputs.policies import PolicyFolder, open_policy
from grpoctl.settings.fields import defining
from grpoctl.settings.jobs import UpdateJob
from grpoctl.stages.context import Context
from grpoctl.stages.stage import Definition, Facts, Prepared, Stage, data_parallel_ranks, require_same_tokenizer
from grpoctl.stages.update.batches import has_signal, load_training_rows, mini_batches, num_mini_batches
from grpoctl.stages.update.inputs import UpdateInputs, UpdatePlan
from grpoctl.stages.update.report import check_limits, step_statistics
from grpoctl.stages.update.trainer import keep_warm, load_trainer
from grpoctl.stages.update.write import Trained, write_update

if TYPE_CHECKING:
    from grpoctl.stages.update.step import Step

log = logging.getLogger("grpoctl")


def prepare(job: UpdateJob, inputs: UpdateInputs, context: Context) -> Prepared[UpdatePlan]:
    """Read and join the rows, and refuse what would train on the wrong thing.

    Raises:
        UsageError: settings that the engine doesn't have.
        InputRefused: inputs that don't belong together, stale rollouts, truncated sampling, missing log-probabilities.
        Conflict: the policy was trained on these very rollouts before.
        GateFailed: no group has signal.
    """
    training_engine(job.update.engine).refuse(job.update, job.runtime)
    _check(job, inputs)
    vocab_size = load_tokenizer(inputs.policy.folder, inputs.policy.ref).vocab_size
    data = load_training_rows(job, inputs.rollouts, inputs.scores, inputs.logprobs, vocab_size=vocab_size)
    if not has_signal(data) and job.update.without_signal == "stop":
        raise GateFailed(
            f"{job.scores}: 0 % of groups have differing rewards; nothing to learn from. Use harder or easier prompts, "
            "a larger group_size or more prompts, check the reward, or go on with the next batch by `--set "
            "update.without_signal=pass_on`; a run branches off into a new --run-dir with `--from …/iter-N/rollout`"
        )
    per_epoch = num_mini_batches(data, job, group_size=inputs.sampling.group_size) if has_signal(data) else 0
    facts = {"num_steps": job.update.epochs * per_epoch, "num_completions": len(data.trainable)}
    return Prepared(plan=UpdatePlan(inputs=inputs, data=data), facts=facts)


def _lasting(ref: str) -> str:
    """Return a REF that sync finds again from another working directory."""
    return str(Path(ref).resolve()) if "://" not in ref and Path(ref).exists() else ref


def open_inputs(job: UpdateJob) -> UpdateInputs:
    """Open the artifacts and the policy.

    Raises:
        InputRefused: artifacts that weren't made from each other, or a state of another policy.
    """
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


def define(job: UpdateJob, inputs: UpdateInputs) -> Definition:
    """Return what the next policy is made of."""
    values = {
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
    named = [("rollouts", inputs.rollouts), ("scores", inputs.scores)]
    named += [("logprobs", inputs.logprobs)] if inputs.logprobs else []
    named += [("trainer_state", inputs.resume)] if inputs.resume else []
    parents = [artifact.parent(role) for role, artifact in named]
    config = {**job.model_dump(mode="json"), "policy": _lasting(job.policy)}
    return Definition(values=values, parents=parents, config=config)


def _check(job: UpdateJob, inputs: UpdateInputs) -> None:
    """Refuse inputs that would train on the wrong thing."""
    sampled, sampling = inputs.rollouts.manifest.policy, inputs.sampling
    assert sampled is not None
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


def _check_staleness(job: UpdateJob, policy: PolicyFolder, sampled: PolicyIdentity) -> None:
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


def compute(job: UpdateJob, plan: UpdatePlan, writer: ArtifactWriter, context: Context) -> Facts:
    """Take all steps and write what they leave behind.

    Raises:
        GateFailed: too many non-finite steps, or a limit was crossed.
    """
    from grpoctl.stages.update.step import Step, StepSettings

    inputs, data, ranks = plan.inputs, plan.data, context.ranks
    sharers = data_parallel_ranks(job.update.engine, job.runtime, ranks)
    trainer = load_trainer(job, context.warm, inputs)
    settings = StepSettings(
        config=job.update,
        temperature=inputs.sampling.temperature,
        norm_tokens=job.update.norm_tokens or inputs.sampling.max_new_tokens,
        micro_batch_tokens=job.runtime.micro_batch_tokens,
    )
    started = time.monotonic()
    with ranks.agreed():
        batches = list(_batches(job, plan))
    trained = Trained(trainer=trainer, steps=[], tokens={})
    for epoch, rows in context.follow(batches, "update"):
        keep = job.update.token_stats and epoch == 0
        settings = dataclasses.replace(settings, keep_tokens=keep)
        step = Step(trainer=trainer, data=data, rows=rows, settings=settings, ranks=sharers)
        global_step = inputs.first_step + len(trained.steps)
        trained.steps.append({"epoch": epoch, **_take(step, job, global_step, trained.tokens)})
        with ranks.agreed():
            if ranks.is_first:
                check_limits(job, trained.steps)
    trained = dataclasses.replace(trained, seconds=time.monotonic() - started)
    facts = write_update(job, plan, trained, writer, ranks)
    digest = facts.policy.weights_digest if facts.policy else ""

    def then(artifact: Artifact) -> None:
        keep_warm(job, context.warm, trainer, artifact, digest)

    return dataclasses.replace(facts, then=then)


def _batches(job: UpdateJob, plan: UpdatePlan) -> Iterator[tuple[int, list[int]]]:
    """Yield the epoch and the rows of every step."""
    inputs = plan.inputs
    if not has_signal(plan.data):
        log.warning("%s: no group has differing rewards; the policy is passed on unchanged", job.scores)
        return
    for epoch in range(job.update.epochs):
        for rows in mini_batches(
            plan.data, job, digest=inputs.digest, group_size=inputs.sampling.group_size, epoch=epoch
        ):
            yield epoch, rows


def _take(step: Step, job: UpdateJob, global_step: int, tokens: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Run one optimizer step and return its row of the steps table."""
    from grpoctl.stages.update.step import learning_rate

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


STAGE = Stage(
    name="update",
    job=UpdateJob,
    table=STEPS,
    reads=lambda job: (job.rollouts, job.scores, job.logprobs, job.policy, job.resume_from),
    open=open_inputs,
    define=define,
    prepare=prepare,
    compute=compute,
    engine=lambda job: job.update.engine,
)
