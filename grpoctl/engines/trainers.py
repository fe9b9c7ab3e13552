"""The training engine that the settings name, around a loaded policy."""

from __future__ import annotations

import json
from typing import Any

from grpoctl.artifacts.storage import locate, read_bytes
from grpoctl.engines.base import OptimizerSettings, Trainer
from grpoctl.engines.torch.fsdp import checkpoint_activations, shard
from grpoctl.engines.torch.trainer import TorchTrainer
from grpoctl.errors import UsageError
from grpoctl.processes.ranks import Ranks
from grpoctl.settings.fields import UpdateConfig
from grpoctl.settings.runtime import RuntimeConfig


def make_trainer(policy: Any, update: UpdateConfig, runtime: RuntimeConfig, *, ranks: Ranks) -> Trainer:
    """Return the engine, with fresh optimizer state."""
    settings = OptimizerSettings(
        beta1=update.beta1,
        beta2=update.beta2,
        eps=update.adam_eps,
        weight_decay=update.weight_decay,
        grad_clip=update.grad_clip,
    )
    if update.engine == "megatron":
        from grpoctl.engines.megatron.trainer import MegatronTrainer

        return MegatronTrainer(policy, settings, ranks)
    if runtime.activation_checkpointing:
        checkpoint_activations(policy)
    if update.engine == "deepspeed":
        from grpoctl.engines.deepspeed.config import engine_config
        from grpoctl.engines.deepspeed.trainer import DeepSpeedTrainer

        given = _read_json(runtime.deepspeed.config_file)
        config = engine_config(runtime.deepspeed, given, grad_clip=update.grad_clip, world_size=ranks.world_size)
        own_adam = runtime.deepspeed.optimizer == "deepspeed"
        return DeepSpeedTrainer(policy, settings, config, ranks, device=runtime.device, own_adam=own_adam)
    shard(policy, ranks, device=runtime.device)
    return TorchTrainer(policy, settings, ranks)


def _read_json(url: str | None) -> dict[str, Any]:
    if url is None:
        return {}
    try:
        content = json.loads(read_bytes(locate(url)))
    except ValueError as error:
        raise UsageError(f"{url}: not JSON ({error}); expected a ds_config.json") from error
    if not isinstance(content, dict):
        raise UsageError(f"{url}: found {type(content).__name__}, expected an object of DeepSpeed's settings")
    return content
