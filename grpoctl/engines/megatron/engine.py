"""The Megatron engine's record: its layers, tensor and data parallel."""

from __future__ import annotations

from typing import Any

from grpoctl.engines.base import OptimizerSettings, PolicyModel, Trainer
from grpoctl.engines.registry import Loading, TrainingEngine
from grpoctl.errors import UsageError
from grpoctl.processes.ranks import Ranks
from grpoctl.settings.fields import UpdateConfig
from grpoctl.settings.runtime import RuntimeConfig


def load(loading: Loading) -> PolicyModel:
    """Return this process's share of a policy's Megatron model."""
    from grpoctl.engines.megatron.model import load_megatron
    from grpoctl.engines.tokenizer import load_tokenizer

    policy, runtime = loading.policy, loading.runtime
    return load_megatron(
        policy.folder,
        ref=policy.ref,
        vocab_size=load_tokenizer(policy.folder, policy.ref).vocab_size,
        device=runtime.device,
        dtype=loading.dtype,
        tensor_parallel_size=runtime.megatron.tensor_parallel_size,
        ranks=loading.ranks,
    )


def make_trainer(policy: Any, update: UpdateConfig, runtime: RuntimeConfig, ranks: Ranks) -> Trainer:
    """Return the trainer, with fresh optimizer state."""
    from grpoctl.engines.megatron.trainer import MegatronTrainer

    return MegatronTrainer(policy, OptimizerSettings.of(update), ranks)


def refuse(update: UpdateConfig, runtime: RuntimeConfig) -> None:
    """Refuse what Megatron's plain layers don't have.

    Raises:
        UsageError: activation checkpointing, or adapters.
    """
    if runtime.activation_checkpointing:
        raise UsageError("runtime.activation_checkpointing: engine megatron doesn't have it; use torch or deepspeed")
    if update.lora.rank:
        raise UsageError("update.lora: engine megatron trains whole weights; lora needs engine torch or deepspeed")


ENGINE = TrainingEngine(
    load=load,
    trainer=make_trainer,
    forward="megatron",
    needs_group=True,
    ranks_per_copy=lambda runtime: runtime.megatron.tensor_parallel_size,
    refuse=refuse,
)
