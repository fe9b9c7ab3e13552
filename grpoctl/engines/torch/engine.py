"""The torch engine's record: one process runs plain torch, several split the model by FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpoctl.engines.base import OptimizerSettings, PolicyModel, Trainer
from grpoctl.engines.registry import Loading, TrainingEngine
from grpoctl.processes.memory import memory_errors
from grpoctl.processes.ranks import Ranks
from grpoctl.settings.fields import UpdateConfig
from grpoctl.settings.runtime import RuntimeConfig

if TYPE_CHECKING:
    from grpoctl.engines.torch.model import TorchPolicy


def load(loading: Loading) -> PolicyModel:
    """Return a policy's model: whole on one process, split over several.

    Raises:
        TryAgain: there is no memory for it.
        InputRefused: the model can't be loaded.
    """
    if loading.ranks.world_size == 1:
        return load_whole(loading, device=loading.runtime.device)
    from grpoctl.engines.torch.fsdp_load import load_split

    return load_split(loading)


def load_whole(loading: Loading, *, device: str) -> TorchPolicy:
    """Return a policy's whole model on a device of this process."""
    from grpoctl.engines.tokenizer import load_tokenizer
    from grpoctl.engines.torch.model import load_policy

    policy, ranks = loading.policy, loading.ranks
    size = load_tokenizer(policy.folder, policy.ref).vocab_size
    with ranks.agreed(), memory_errors("loading the model", "take another device, or more of them"):
        model = load_policy(policy.folder, ref=policy.ref, vocab_size=size, device=device, dtype=loading.dtype)
        loading.insert(model)
        loading.fill(model)
    return model


def make_trainer(policy: Any, update: UpdateConfig, runtime: RuntimeConfig, ranks: Ranks) -> Trainer:
    """Return the trainer, with fresh optimizer state."""
    from grpoctl.engines.torch.fsdp import checkpoint_activations, split
    from grpoctl.engines.torch.trainer import TorchTrainer

    if runtime.activation_checkpointing:
        checkpoint_activations(policy)
    split(policy, ranks, device=runtime.device)
    return TorchTrainer(policy, OptimizerSettings.of(update), ranks)


ENGINE = TrainingEngine(load=load, trainer=make_trainer, forward="torch", stays_warm=True)
