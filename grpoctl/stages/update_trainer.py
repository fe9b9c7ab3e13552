"""The engine of an update at the state to continue from: warm where this process holds it, else loaded from files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from grpoctl.algorithms.seeds import identity_seed
from grpoctl.artifacts import Artifact
from grpoctl.errors import InputRefused
from grpoctl.jobs import UpdateJob
from grpoctl.policies import Policy, open_policy
from grpoctl.schema.canonical import sha256_json
from grpoctl.stages.base import Context
from grpoctl.stages.update_write import ADAPTER, STATE, UpdateInputs


def ready_trainer(job: UpdateJob, context: Context, inputs: UpdateInputs) -> Any:
    """Return the trainer that takes the next step."""
    from grpoctl.engines.trainers import make_trainer

    state = inputs.resume.manifest.content_digest if inputs.resume else "fresh"
    warm = context.trainers.pop(_warm_key(job, inputs.policy.weights_digest, state), None)
    with tempfile.TemporaryDirectory() as scratch:
        with context.ranks.agreed():  # loading sends nothing, so a process that can't stops all of them
            model = _model(job, context, inputs, Path(scratch) / ADAPTER)
        context.trainers.clear()
        if warm is not None and warm.policy is model:
            return warm
        trainer = make_trainer(model, job.update, job.runtime, ranks=context.ranks)
        if inputs.resume is not None:
            trainer.load_state(inputs.resume.fetch_files(STATE, Path(scratch) / STATE))
    return trainer


def _model(job: UpdateJob, context: Context, inputs: UpdateInputs, folder: Path) -> Any:
    """Return the policy to train, taken out of the warm ones because it is about to change."""
    config = job.update.lora
    if not config.rank:
        return _taken(context, inputs.policy, job)
    from grpoctl.engines.lora import Adapters, Base, attach, load_adapters, read_base

    base_policy, base = inputs.policy, Base(ref=inputs.policy.ref, weights_digest=inputs.policy.weights_digest)
    if inputs.resume is not None:
        inputs.resume.fetch_files(ADAPTER, folder)
        base = read_base(folder, config, inputs.resume.url)
        base_policy = open_policy(base.ref)
        if base_policy.weights_digest != base.weights_digest:
            raise InputRefused(
                f"{inputs.resume.url}: its adapters belong to weights {base.weights_digest[:12]}…, {base.ref} has "
                f"{base_policy.weights_digest[:12]}… now; restore that policy"
            )
    model = _taken(context, base_policy, job)
    attach(model, Adapters(config=config, base=base), seed=identity_seed("lora", base.weights_digest, job.seed))
    if inputs.resume is not None:
        load_adapters(model, folder)
    return model


def _taken(context: Context, policy: Policy, job: UpdateJob) -> Any:
    model = context.model(policy, dtype=job.update.dtype, runtime=job.runtime)
    context.models.pop((policy.weights_digest, job.update.dtype, job.runtime.device))
    return model


def keep_warm(job: UpdateJob, context: Context, trainer: Any, artifact: Artifact, digest: str) -> None:
    """Keep the trainer and its policy for the stages to come in this process, where they are what was committed.

    Adapters beside frozen weights compute what the merged weights do but for rounding, and layers that checkpoint
    can't sample, so neither is kept.
    """
    committed = artifact.manifest.policy
    changed = job.update.lora.rank or job.runtime.activation_checkpointing
    if context.ranks.world_size > 1 or changed or committed is None or committed.weights_digest != digest:
        return
    context.models[(digest, job.update.dtype, job.runtime.device)] = trainer.policy
    context.trainers[_warm_key(job, digest, artifact.manifest.content_digest)] = trainer


def _warm_key(job: UpdateJob, weights: str, state: str) -> str:
    names = ("beta1", "beta2", "adam_eps", "weight_decay", "grad_clip", "dtype", "engine")
    settings = {name: getattr(job.update, name) for name in names}
    return sha256_json({"weights": weights, "state": state, "device": job.runtime.device, **settings})
