"""Take the optimizer steps over one batch of rollouts; write the new policy, the optimizer's state and every step's numbers."""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from grpoctl.artifacts import Artifact, ArtifactWriter, Work, open_artifact, parquet_bytes
from grpoctl.config import UpdateJob, defining
from grpoctl.engines.base import OptimizerSettings, Trainer
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.errors import Conflict, GateFailed, InputRefused
from grpoctl.policies import (
    POLICY_RECORD,
    Policy,
    open_policy,
    policy_files,
    weights_digest,
)
from grpoctl.schema.canonical import sha256_json
from grpoctl.schema.manifest import PolicyIdentity, PolicyRecord, RowAccounting
from grpoctl.schema.tables import STEPS, TOKEN_STATS
from grpoctl.stages.base import (
    Context,
    StageResult,
    already_done,
    check_outside,
    environment,
    finished,
    planned,
    require_same_tokenizer,
)
from grpoctl.stages.joins import require_made_from
from grpoctl.stages.update_batches import (
    TrainingRows,
    has_signal,
    load_training_rows,
    mini_batches,
    num_mini_batches,
)
from grpoctl.stages.update_step import StepSettings, StepSums, learning_rate, run_step

log = logging.getLogger("grpoctl")
STATE = "trainer_state"
PROBE_FILE = "probe.json"
NONFINITE_FILE = "_nonfinite.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    rollouts: Artifact
    scores: Artifact
    logprobs: Artifact | None
    resume: Artifact | None
    policy: Policy

    @property
    def first_step(self) -> int:
        """Global steps taken before this update."""
        return int(self.resume.manifest.stats["global_step"]) if self.resume else 0

    @property
    def digest(self) -> str:
        return self.rollouts.manifest.content_digest


def run(job: UpdateJob, context: Context) -> StageResult:
    """Update a policy from rollouts, scores and logprobs.

    Raises:
        InputRefused: inputs that don't belong together, stale rollouts, truncated sampling, missing log-probabilities.
        Conflict: the policy was trained on these very rollouts before.
        GateFailed: no group has signal, too many non-finite steps, or a limit was crossed.
    """
    check_outside(job.out, job.rollouts, job.scores, job.logprobs, job.policy, job.resume_from)
    inputs = _open(job)
    work = Work(
        stage="update",
        table=STEPS,
        definition=_definition(job, inputs),
        config=job.model_dump(mode="json"),
        parents=_parents(inputs),
    )
    done = already_done(job.out, work)
    if done is not None:
        return done
    _check(job, inputs)
    vocab_size = load_tokenizer(inputs.policy.folder, inputs.policy.ref).vocab_size
    data = load_training_rows(job, inputs.rollouts, inputs.scores, inputs.logprobs, vocab_size=vocab_size)
    if not has_signal(data):
        raise GateFailed(
            f"{job.scores}: 0 % of groups have differing rewards; nothing to learn from. Use harder or easier prompts, "
            "a larger group_size, or check the reward"
        )
    if context.dry_run:
        steps = job.update.epochs * num_mini_batches(data, job, group_size=_group_size(inputs))
        return planned(job.out, work, num_steps=steps, num_completions=len(data.trainable))
    return _train(job, context, work, inputs, data)


def _open(job: UpdateJob) -> _Inputs:
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
    return _Inputs(rollouts=rollouts, scores=scores, logprobs=logprobs, resume=resume, policy=policy)


def _definition(job: UpdateJob, inputs: _Inputs) -> dict[str, Any]:
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


def _parents(inputs: _Inputs) -> list[Any]:
    named = [("rollouts", inputs.rollouts), ("scores", inputs.scores)]
    named += [("logprobs", inputs.logprobs)] if inputs.logprobs else []
    named += [("trainer_state", inputs.resume)] if inputs.resume else []
    return [artifact.parent(role) for role, artifact in named]


def _group_size(inputs: _Inputs) -> int:
    assert inputs.rollouts.manifest.sampling is not None
    return inputs.rollouts.manifest.sampling.group_size


def _check(job: UpdateJob, inputs: _Inputs) -> None:
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


def _check_reference(job: UpdateJob, inputs: _Inputs) -> None:
    if job.update.kl_coef > 0 and (inputs.logprobs is None or inputs.logprobs.manifest.reference is None):
        raise InputRefused(
            "update.kl_coef above 0 needs ref_logprobs; run `grpoctl logprob --reference …` and give --logprobs"
        )


def _train(job: UpdateJob, context: Context, work: Work, inputs: _Inputs, data: TrainingRows) -> StageResult:
    assert inputs.rollouts.manifest.sampling is not None
    sampling = inputs.rollouts.manifest.sampling
    trainer = _trainer(job, context, inputs)
    settings = StepSettings(
        config=job.update,
        temperature=sampling.temperature,
        norm_tokens=job.update.norm_tokens or sampling.max_new_tokens,
        micro_batch_tokens=job.runtime.micro_batch_tokens,
    )
    started = time.monotonic()
    plan = [
        (epoch, rows)
        for epoch in range(job.update.epochs)
        for rows in mini_batches(data, job, digest=inputs.digest, group_size=sampling.group_size, epoch=epoch)
    ]
    steps: list[dict[str, Any]] = []
    tokens: dict[int, dict[str, Any]] = {}
    for epoch, rows in context.follow(plan, "update"):
        keep = job.update.token_stats and epoch == 0
        steps.append(_step(job, trainer, data, rows, settings, inputs.first_step + len(steps), epoch, keep, tokens))
        _gate(job, steps)
    trained = time.monotonic() - started
    return _write(job, context, work, inputs, data, trainer, steps, tokens, trained)


def _trainer(job: UpdateJob, context: Context, inputs: _Inputs) -> Trainer:
    """Return a trainer at the state to continue from: warm where this process holds it, else loaded."""
    from grpoctl.engines.torch_trainer import TorchTrainer

    settings = OptimizerSettings(
        beta1=job.update.beta1,
        beta2=job.update.beta2,
        eps=job.update.adam_eps,
        weight_decay=job.update.weight_decay,
        grad_clip=job.update.grad_clip,
    )
    state = inputs.resume.manifest.content_digest if inputs.resume else "fresh"
    warm = context.trainers.pop(_warm_key(job, inputs.policy.weights_digest, state), None)
    model = context.model(inputs.policy, dtype=job.update.dtype, runtime=job.runtime)
    context.models.pop((inputs.policy.weights_digest, job.update.dtype, job.runtime.device))  # it is about to change
    context.trainers.clear()
    if warm is not None and warm.policy is model:
        return warm
    trainer = TorchTrainer(model, settings)
    if inputs.resume is not None:
        with tempfile.TemporaryDirectory() as folder:
            trainer.load_state(inputs.resume.fetch_files(STATE, Path(folder)))
    return trainer


def _warm_key(job: UpdateJob, weights: str, state: str) -> str:
    names = ("beta1", "beta2", "adam_eps", "weight_decay", "grad_clip", "dtype", "engine")
    settings = {name: getattr(job.update, name) for name in names}
    return sha256_json({"weights": weights, "state": state, "device": job.runtime.device, **settings})


def _step(
    job: UpdateJob,
    trainer: Any,
    data: TrainingRows,
    rows: list[int],
    settings: StepSettings,
    global_step: int,
    epoch: int,
    keep: bool,
    tokens: dict[int, dict[str, Any]],
) -> dict[str, Any]:
    """Run one optimizer step and return its row of the steps table."""
    started = time.monotonic()
    if keep:
        settings = StepSettings(
            config=settings.config,
            temperature=settings.temperature,
            norm_tokens=settings.norm_tokens,
            micro_batch_tokens=settings.micro_batch_tokens,
            keep_tokens=True,
        )
    sums, denominator = run_step(trainer, trainer.policy, data, rows, settings)
    tokens.update(sums.tokens)
    lr = learning_rate(job.update, global_step)
    loss = (sums.policy_numerator + job.update.kl_coef * sums.kl_numerator) / denominator if denominator else 0.0
    norm: float | None = None
    status, skipped = "ok", None
    if denominator == 0:
        status = "no_tokens"
    elif not math.isfinite(loss):
        trainer.discard()
        status = "nonfinite"
    else:
        norm = trainer.step(lr)
        status = "ok" if norm is not None else "nonfinite"
    if status == "nonfinite":
        skipped = [data.rows.sample_ids[row] for row in (sums.nonfinite_rows or rows)]
    return {
        "global_step": global_step + 1,
        "epoch": epoch,
        "status": status,
        "skipped_ids": skipped,
        "loss": loss,
        **_statistics(job, data, rows, sums),
        "loss_denominator": denominator,
        "grad_norm": norm,
        "lr": lr,
        "seconds": time.monotonic() - started,
    }


def _statistics(job: UpdateJob, data: TrainingRows, rows: list[int], sums: StepSums) -> dict[str, Any]:
    count = max(1, sums.num_tokens)
    has_reference = all(data.ref_logprobs[row] is not None for row in rows)
    return {
        "policy_loss_numerator": sums.policy_numerator,
        "kl_loss_numerator": sums.kl_numerator if job.update.kl_coef > 0 else None,
        "kl": sums.kl_sum / count if has_reference else None,
        "ratio_mean": sums.ratio_sum / count if sums.num_tokens else 1.0,
        "ratio_max": sums.ratio_max if sums.num_tokens else 1.0,
        "ratio_min": sums.ratio_min if sums.num_tokens else 1.0,
        "clip_fraction_low": sums.clipped_low / count,
        "clip_fraction_high": sums.clipped_high / count,
        "correction_mean": sums.correction_sum / count if job.update.correction != "none" else None,
        "entropy": sums.entropy_sum / count if job.update.entropy else None,
        "num_tokens": sums.num_tokens,
        "num_sequences": sum(bool(data.rows.masks[row].any()) for row in rows),
        "num_micro_batches": sums.num_micro_batches,
    }


def _gate(job: UpdateJob, steps: list[dict[str, Any]]) -> None:
    """Stop where the last step crossed a limit; nothing is committed."""
    last = steps[-1]
    skipped = [step for step in steps if step["status"] == "nonfinite"]
    if len(skipped) > job.update.max_nonfinite_steps:
        ids = [name for step in skipped for name in step["skipped_ids"]]
        _save_nonfinite(job, ids)
        raise GateFailed(
            f"{job.out}: {len(skipped)} steps had a non-finite loss or gradient, update.max_nonfinite_steps allows "
            f"{job.update.max_nonfinite_steps}; rows {ids[:5]}, all in {job.out}/{NONFINITE_FILE}"
        )
    for name, limit in (
        ("kl", job.update.max_kl),
        ("ratio_max", job.update.max_ratio),
        ("grad_norm", job.update.max_grad_norm),
    ):
        if limit is not None and last[name] is not None and last[name] > limit:
            raise GateFailed(
                f"{job.out}: {name} is {last[name]:.4g} at step {len(steps) - 1}, limit {limit}; nothing committed"
            )


def _save_nonfinite(job: UpdateJob, ids: list[str]) -> None:
    from grpoctl.storage import locate, write_bytes

    write_bytes(locate(job.out).child(NONFINITE_FILE), json.dumps(ids, indent=1).encode())


def _write(
    job: UpdateJob,
    context: Context,
    work: Work,
    inputs: _Inputs,
    data: TrainingRows,
    trainer: Any,
    steps: list[dict[str, Any]],
    tokens: dict[int, dict[str, Any]],
    trained: float,
) -> StageResult:
    if all(step["status"] != "ok" for step in steps):
        raise GateFailed(
            f"{job.out}: no step was taken in {len(steps)}; all tokens are masked or all steps were skipped"
        )
    started = time.monotonic()
    writer = ArtifactWriter(url=job.out, work=work)
    with tempfile.TemporaryDirectory(dir=_scratch(job.out), prefix=".tmp-update-") as scratch:
        folder = Path(scratch)
        digest = _export(folder / "policy", trainer, inputs, work.fingerprint)
        trainer.save_state(folder / STATE)
        (folder / PROBE_FILE).write_text(json.dumps(_probe(job, data, trainer, inputs)))
        if tokens:
            (folder / "token_stats.parquet").write_bytes(parquet_bytes(_token_table(data, tokens), TOKEN_STATS))
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                writer.add_file(path.relative_to(folder).as_posix(), path)
    schema = STEPS.arrow_schema()
    named = [{"step": number, **step} for number, step in enumerate(steps)]
    writer.write_shard(0, pa.Table.from_pylist(named, schema=schema), counts={"ok": len(steps)})
    identity = PolicyIdentity(
        ref=f"{job.out}/policy",
        version=inputs.policy.version + 1,
        weights_digest=digest,
        tokenizer_digest=inputs.policy.tokenizer_digest,
    )
    total = len(data.rows.sample_ids)
    artifact = writer.commit(
        rows=RowAccounting(input=total, ok=len(data.trainable), skipped=total - len(data.trainable), failed=0),
        policy=identity,
        sampling=inputs.rollouts.manifest.sampling,
        stats=summary(steps),
        tokens={"trained": sum(step["num_tokens"] for step in steps)},
        timings={"training_seconds": trained, "writing_seconds": time.monotonic() - started},
        environment=environment(),
    )
    assert artifact is not None
    if artifact.manifest.policy == identity:  # another writer's equal work may have been committed first
        context.models[(digest, job.update.dtype, job.runtime.device)] = trainer.policy
        context.trainers[_warm_key(job, digest, artifact.manifest.content_digest)] = trainer
    return finished(writer, artifact)


def _scratch(out: str) -> str | None:
    """Return a folder on the output's disk, so that finished files are linked and not copied; None for object stores."""
    from grpoctl.storage import locate

    location = locate(out)
    if not location.is_local:
        return None
    Path(location.path).mkdir(parents=True, exist_ok=True)
    return location.path


def _export(folder: Path, trainer: Any, inputs: _Inputs, fingerprint: str) -> str:
    """Write the new policy: weights from the trainer, everything else as the parent has it."""
    trainer.export(folder)
    for path in policy_files(inputs.policy.folder):
        content = path.read_bytes()
        if path.name == "config.json":
            config = json.loads(content)
            key = "dtype" if "dtype" in config or "torch_dtype" not in config else "torch_dtype"
            config[key] = "float32"
            content = (json.dumps(config, indent=2) + "\n").encode()
        (folder / path.name).write_bytes(content)
    digest = weights_digest(folder)
    record = PolicyRecord(
        version=inputs.policy.version + 1,
        parent_digest=inputs.policy.weights_digest,
        weights_digest=digest,
        tokenizer_digest=inputs.policy.tokenizer_digest,
        update_fingerprint=fingerprint,
        consumed=[*inputs.policy.consumed, inputs.digest],
        dtype="float32",
    )
    (folder / POLICY_RECORD).write_text(record.model_dump_json(indent=1))
    return digest


def _probe(job: UpdateJob, data: TrainingRows, trainer: Any, inputs: _Inputs) -> dict[str, Any]:
    """Return a few completions with their log-probabilities under the new policy."""
    from grpoctl.stages.probe import probe_logprobs

    assert inputs.rollouts.manifest.sampling is not None
    temperature = inputs.rollouts.manifest.sampling.temperature
    rows = data.trainable[: job.update.num_probe_rows]
    prompts = [data.rows.prompt_ids[row].tolist() for row in rows]
    completions = [data.rows.completion_ids[row].tolist() for row in rows]
    return {
        "temperature": temperature,
        "sample_ids": [data.rows.sample_ids[row] for row in rows],
        "prompt_ids": prompts,
        "completion_ids": completions,
        "logprobs": probe_logprobs(trainer.policy, prompts, completions, temperature=temperature),
    }


def _token_table(data: TrainingRows, tokens: dict[int, dict[str, Any]]) -> pa.Table:
    rows = sorted(tokens)
    columns: dict[str, Any] = {"sample_id": [data.rows.sample_ids[row] for row in rows]}
    for column in TOKEN_STATS.columns[1:]:
        columns[column.name] = [tokens[row].get(column.name) for row in rows]
    schema = TOKEN_STATS.arrow_schema()
    return pa.table({f.name: pa.array(columns[f.name], type=f.type) for f in schema}, schema=schema)


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an update's numbers: token-weighted means over its steps, and the first step's ratio."""
    taken = [step for step in steps if step["status"] == "ok"]
    weights = np.array([step["num_tokens"] for step in taken], dtype=np.float64)

    def mean(name: str) -> float | None:
        values = [step[name] for step in taken]
        return None if not values or any(v is None for v in values) else float(np.average(values, weights=weights))

    norms = [step["grad_norm"] for step in taken]
    return {
        "num_steps": len(steps),
        "num_skipped_steps": len(steps) - len(taken),
        "global_step": steps[-1]["global_step"],
        "loss": mean("loss"),
        "kl": mean("kl"),
        "entropy": mean("entropy"),
        "ratio_max": max(step["ratio_max"] for step in taken),
        "first_ratio_max_gap": max(abs(steps[0]["ratio_max"] - 1), abs(steps[0]["ratio_min"] - 1)),
        "clip_fraction": (mean("clip_fraction_low") or 0.0) + (mean("clip_fraction_high") or 0.0),
        "grad_norm": float(np.mean(norms)) if norms else None,
        "lr": steps[-1]["lr"],
    }
