"""The DeepSpeed engine's record: torch's model and forward, split and stepped by ZeRO."""

from __future__ import annotations

import json
from typing import Any, cast

from grpoctl.artifacts.storage import locate, read_bytes
from grpoctl.engines.base import OptimizerSettings, PolicyModel, Trainer
from grpoctl.engines.registry import Loading, TrainingEngine
from grpoctl.engines.torch.engine import load_whole
from grpoctl.errors import UsageError
from grpoctl.processes.ranks import Ranks
from grpoctl.settings.fields import UpdateConfig
from grpoctl.settings.runtime import RuntimeConfig


def load(loading: Loading) -> PolicyModel:
    """Return a policy's whole model, in host memory where ZeRO 3 is to split it."""
    in_host = loading.runtime.deepspeed.zero_stage == 3
    return load_whole(loading, device="cpu" if in_host else loading.runtime.device)


def make_trainer(policy: Any, update: UpdateConfig, runtime: RuntimeConfig, ranks: Ranks) -> Trainer:
    """Return the trainer, with fresh optimizer state.

    Raises:
        UsageError: runtime.deepspeed.config_file isn't DeepSpeed's JSON, or contradicts our settings.
    """
    from grpoctl.engines.deepspeed.config import engine_config
    from grpoctl.engines.deepspeed.trainer import DeepSpeedTrainer
    from grpoctl.engines.torch.fsdp import checkpoint_activations

    if runtime.activation_checkpointing:
        checkpoint_activations(policy)
    given = _read_json(runtime.deepspeed.config_file)
    config = engine_config(runtime.deepspeed, given, grad_clip=update.grad_clip, world_size=ranks.world_size)
    own_adam = runtime.deepspeed.optimizer == "deepspeed"
    settings = OptimizerSettings.of(update)
    return DeepSpeedTrainer(policy, settings, config, ranks, device=runtime.device, own_adam=own_adam)


def _read_json(url: str | None) -> dict[str, Any]:
    if url is None:
        return {}
    try:
        content = json.loads(read_bytes(locate(url)))
    except ValueError as error:
        raise UsageError(f"{url}: not JSON ({error}); expected a ds_config.json") from error
    if not isinstance(content, dict):
        raise UsageError(f"{url}: found {type(content).__name__}, expected an object of DeepSpeed's settings")
    return cast("dict[str, Any]", content)


ENGINE = TrainingEngine(load=load, trainer=make_trainer, forward="torch", needs_group=True)
