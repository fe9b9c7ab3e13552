"""What one process keeps loaded between its stages: models, reward models, trainers, samplers."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from grpoctl.engines.base import PolicyModel, Sampler, Trainer
from grpoctl.inputs.policies import PolicyFolder
from grpoctl.inputs.reward_models import RewardModelFolder
from grpoctl.processes.memory import memory_errors
from grpoctl.processes.ranks import ALONE, Ranks
from grpoctl.settings.runtime import RuntimeConfig

if TYPE_CHECKING:
    from grpoctl.engines.registry import Loading
    from grpoctl.engines.value_head.model import RewardModel

log = logging.getLogger("grpoctl")
WARM_MODELS: Final = 2
"""Models kept in memory: the policy and the reference."""
ModelKey = tuple[str, str, str, str]


def model_key(digest: str, *, forward: str, dtype: str, runtime: RuntimeConfig) -> ModelKey:
    """Return what a loaded model is known by."""
    return digest, forward, dtype, runtime.device


def loading_key(loading: Loading, engine: str) -> ModelKey:
    """Return what the model of a load is known by."""
    from grpoctl.engines.registry import training_engine

    forward = training_engine(engine).forward
    digest = loading.policy.weights_digest
    return model_key(digest, forward=forward, dtype=loading.dtype, runtime=loading.runtime)


@dataclass(slots=True, kw_only=True)
class Warm:
    """Everything kept, each by what it was made of."""

    ranks: Ranks = ALONE
    models: OrderedDict[ModelKey, PolicyModel] = field(default_factory=OrderedDict[ModelKey, PolicyModel])
    reward_models: dict[tuple[str, str, str], RewardModel] = field(default_factory=lambda: {})
    trainers: dict[str, Trainer] = field(default_factory=dict[str, Trainer])
    samplers: dict[str, tuple[str, Sampler]] = field(default_factory=dict[str, tuple[str, Sampler]])
    told: set[str] = field(default_factory=set[str])

    def tell_once(self, message: str) -> None:
        """Say something on stderr, once in the life of this process."""
        if message not in self.told:
            self.told.add(message)
            log.info("%s", message)

    def model(self, policy: PolicyFolder, *, dtype: str, runtime: RuntimeConfig, engine: str = "torch") -> PolicyModel:
        """Return a policy's model, loaded once for each weights digest.

        Args:
            policy: the folder
            dtype: of the forward
            runtime: device and layout
            engine: whose model

        Raises:
            TryAgain: the device has no memory for it.
            InputRefused: the engine can't compute it.
        """
        from grpoctl.engines.registry import Loading

        loading = Loading(policy=policy, dtype=dtype, runtime=runtime, ranks=self.ranks)
        model = self.take(loading, engine)
        key = loading_key(loading, engine)
        self.models[key] = model  # last, so that the ones before it go first
        while len(self.models) > WARM_MODELS:
            self.models.popitem(last=False)
        return model

    def take(self, loading: Loading, engine: str) -> PolicyModel:
        """Return a policy's model, loaded or taken out of the warm ones, for a caller that is going to change it."""
        from grpoctl.engines.registry import training_engine

        set_threads(loading.runtime)
        kept = self.models.pop(loading_key(loading, engine), None)
        if kept is None:
            return training_engine(engine).load(loading)
        loading.insert(kept)
        loading.fill(kept)
        return kept

    def reward_model(self, model: RewardModelFolder, *, dtype: str, runtime: RuntimeConfig) -> RewardModel:
        """Return a reward model, loaded once for each weights digest; one is kept.

        Raises:
            TryAgain: the device has no memory for it.
        """
        from grpoctl.engines.tokenizer import load_tokenizer
        from grpoctl.engines.value_head.model import load_reward_model

        set_threads(runtime)
        key = (model.weights_digest, dtype, runtime.device)
        if key not in self.reward_models:
            self.reward_models.clear()
            size = load_tokenizer(model.folder, model.ref).context_tokens
            with memory_errors("loading the reward model", "take another device"):
                self.reward_models[key] = load_reward_model(
                    model.folder, ref=model.ref, device=runtime.device, dtype=dtype, context_tokens=size
                )
        return self.reward_models[key]


def set_threads(runtime: RuntimeConfig) -> None:
    """Apply runtime.num_threads."""
    if runtime.num_threads is not None:
        import torch

        torch.set_num_threads(runtime.num_threads)
