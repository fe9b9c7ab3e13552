"""The engine of an update at the state to continue from: warm where this process holds it, else loaded from files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from grpoctl.algorithms.seeds import identity_seed
from grpoctl.artifacts.artifact import Artifact
from grpoctl.artifacts.canonical import sha256_json
from grpoctl.engines.base import PolicyModel, Trainer
from grpoctl.engines.registry import Loading, training_engine
from grpoctl.engines.warm import Warm, model_key
from grpoctl.errors import InputRefused
from grpoctl.inputs.policies import ADAPTER, PolicyFolder, open_policy
from grpoctl.settings.jobs import UpdateJob
from grpoctl.stages.update.inputs import STATE, UpdateInputs

if TYPE_CHECKING:
    from grpoctl.engines.torch.lora import Adapters


def load_trainer(job: UpdateJob, warm: Warm, inputs: UpdateInputs) -> Trainer:
    """Return the trainer that takes the next step."""
    state = inputs.resume.manifest.content_digest if inputs.resume else "fresh"
    kept = warm.trainers.pop(_warm_key(job, inputs.policy.weights_digest, state), None)
    with tempfile.TemporaryDirectory() as scratch:
        model = _take_model(job, warm, inputs, Path(scratch) / ADAPTER)
        warm.trainers.clear()
        if kept is not None and kept.policy is model:
            return kept
        trainer = training_engine(job.update.engine).trainer(model, job.update, job.runtime, warm.ranks)
        if inputs.resume is not None:
            trainer.load_state(inputs.resume.fetch_files(STATE, Path(scratch) / STATE))
    return trainer


def _take_model(job: UpdateJob, warm: Warm, inputs: UpdateInputs, folder: Path) -> PolicyModel:
    """Return the policy to train, taken out of the warm ones because it is about to change."""
    with warm.ranks.agreed():  # reading sends nothing, so a process that can't stops all of them
        policy, adapters = _base(job, inputs, folder)

    def insert_adapters(model: PolicyModel) -> None:
        if adapters is not None:
            from grpoctl.engines.torch.lora import insert

            insert(model, adapters)

    def fill_adapters(model: PolicyModel) -> None:
        if adapters is None:
            return
        from grpoctl.engines.torch.lora import draw, load_adapters

        if inputs.resume is not None:
            load_adapters(model, folder)
        else:
            draw(model, seed=identity_seed("lora", adapters.base.weights_digest, job.seed))

    loading = Loading(
        policy=policy,
        dtype=job.update.dtype,
        runtime=job.runtime,
        ranks=warm.ranks,
        insert=insert_adapters,
        fill=fill_adapters,
    )
    return warm.take(loading, job.update.engine)


def _base(job: UpdateJob, inputs: UpdateInputs, folder: Path) -> tuple[PolicyFolder, Adapters | None]:
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


def keep_warm(job: UpdateJob, warm: Warm, trainer: Trainer, artifact: Artifact, digest: str) -> None:
    """Keep the trainer and its policy for the stages to come in this process, where they are what was committed.

    Adapters beside frozen weights compute what the merged weights do but for rounding, and layers that checkpoint
    can't sample, so neither is kept.
    """
    committed = artifact.manifest.policy
    changed = job.update.lora.rank or job.runtime.activation_checkpointing
    engine = training_engine(job.update.engine)
    if warm.ranks.world_size > 1 or changed or not engine.stays_warm:
        return
    if committed is not None and committed.weights_digest == digest:
        key = model_key(digest, forward=engine.forward, dtype=job.update.dtype, runtime=job.runtime)
        warm.models[key] = trainer.policy
        warm.trainers[_warm_key(job, digest, artifact.manifest.content_digest)] = trainer


def _warm_key(job: UpdateJob, weights: str, state: str) -> str:
    names = ("beta1", "beta2", "adam_eps", "weight_decay", "grad_clip", "dtype", "engine")
    settings = {name: getattr(job.update, name) for name in names}
    return sha256_json({"weights": weights, "state": state, "device": job.runtime.device, **settings})
