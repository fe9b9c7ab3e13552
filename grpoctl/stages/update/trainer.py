"""The engine of an update at the state to continue from: warm where this process holds it, else loaded from files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from grpoctl.algorithms.seeds import identity_seed
from grpoctl.artifacts.artifact import Artifact
from grpoctl.artifacts.canonical import sha256_json
from grpoctl.errors import InputRefused, UsageError
from grpoctl.inputs.policies import ADAPTER, Policy, open_policy
from grpoctl.settings.jobs import UpdateJob
from grpoctl.stages.split_model import split_model
from grpoctl.stages.stage import Context
from grpoctl.stages.update.write import STATE, UpdateInputs


def ready_trainer(job: UpdateJob, context: Context, inputs: UpdateInputs) -> Any:
    """Return the trainer that takes the next step."""
    from grpoctl.engines.trainers import make_trainer

    state = inputs.resume.manifest.content_digest if inputs.resume else "fresh"
    warm = context.trainers.pop(_warm_key(job, inputs.policy.weights_digest, state), None)
    with tempfile.TemporaryDirectory() as scratch:
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
    ranks, dtype, runtime = context.ranks, job.update.dtype, job.runtime
    if job.update.engine == "megatron":
        if runtime.activation_checkpointing:
            raise UsageError(
                "runtime.activation_checkpointing: engine megatron doesn't have it; use torch or deepspeed"
            )
        model = context.megatron_model(inputs.policy, dtype=dtype, runtime=runtime)
        context.models.clear()
        return model
    with ranks.agreed():  # reading sends nothing, so a process that can't stops all of them
        policy, adapters = _base(job, inputs, folder)

    def insert_adapters(model: Any) -> None:
        if adapters is not None:
            from grpoctl.engines.torch.lora import insert

            insert(model, adapters)

    def fill_adapters(model: Any) -> None:
        if adapters is None:
            return
        from grpoctl.engines.torch.lora import draw, load_adapters

        if inputs.resume is not None:
            load_adapters(model, folder)
        else:
            draw(model, seed=identity_seed("lora", adapters.base.weights_digest, job.seed))

    if job.update.engine == "torch" and ranks.world_size > 1:
        model = split_model(policy, context, dtype=dtype, runtime=runtime, before=insert_adapters, after=fill_adapters)
    else:
        with ranks.agreed():
            in_host = job.update.engine == "deepspeed" and runtime.deepspeed.zero_stage == 3
            model = context.model(policy, dtype=dtype, runtime=runtime, device="cpu" if in_host else None)
            insert_adapters(model)
            fill_adapters(model)
    context.models.pop((policy.weights_digest, dtype, runtime.device))
    return model


def _base(job: UpdateJob, inputs: UpdateInputs, folder: Path) -> tuple[Policy, Any]:
    """Return the policy to load, and the adapters to put beside it or None; stored ones are fetched into the folder."""
    config = job.update.lora
    if not config.rank:
        return inputs.policy, None
    from grpoctl.engines.torch.lora import Adapters, Base, read_base

    policy, base = inputs.policy, Base(ref=inputs.policy.ref, weights_digest=inputs.policy.weights_digest)
    if inputs.resume is not None:
        inputs.resume.fetch_files(ADAPTER, folder)
        base = read_base(folder, config, inputs.resume.url)
        policy = open_policy(base.ref)
        if policy.weights_digest != base.weights_digest:
            raise InputRefused(
                f"{inputs.resume.url}: its adapters belong to weights {base.weights_digest[:12]}…, {base.ref} has "
                f"{policy.weights_digest[:12]}… now; restore that policy"
            )
    return policy, Adapters(config=config, base=base)


def keep_warm(job: UpdateJob, context: Context, trainer: Any, artifact: Artifact, digest: str) -> None:
    """Keep the trainer and its policy for the stages to come in this process, where they are what was committed.

    Adapters beside frozen weights compute what the merged weights do but for rounding, and layers that checkpoint
    can't sample, so neither is kept.
    """
    committed = artifact.manifest.policy
    changed = job.update.lora.rank or job.runtime.activation_checkpointing or job.update.engine == "megatron"
    if context.ranks.world_size > 1 or changed or committed is None or committed.weights_digest != digest:
        return
    context.models[(digest, job.update.dtype, job.runtime.device)] = trainer.policy
    context.trainers[_warm_key(job, digest, artifact.manifest.content_digest)] = trainer


def _warm_key(job: UpdateJob, weights: str, state: str) -> str:
    names = ("beta1", "beta2", "adam_eps", "weight_decay", "grad_clip", "dtype", "engine")
    settings = {name: getattr(job.update, name) for name in names}
    return sha256_json({"weights": weights, "state": state, "device": job.runtime.device, **settings})
