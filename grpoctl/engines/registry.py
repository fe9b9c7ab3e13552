"""An engine as a value: what a stage needs to know of it, looked up by name when it is used.

The modules of these records import neither torch nor an engine's package; their functions do when they are called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpoctl.engines.base import PolicyModel, Sampler, Trainer
from grpoctl.engines.warm import Warm
from grpoctl.inputs.policies import PolicyFolder
from grpoctl.processes.ranks import Ranks
from grpoctl.settings.engines import sampling_engines, training_engines
from grpoctl.settings.fields import UpdateConfig
from grpoctl.settings.jobs import RolloutJob
from grpoctl.settings.runtime import RuntimeConfig


def _unchanged(model: PolicyModel) -> None:
    """Leave a model as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What a training engine is to load.

    Args:
        policy: the folder
        dtype: of the forward, `float32` or `bfloat16`
        runtime: device, threads, layout
        ranks: all processes, connected
        insert: changes the model before its weights are put in their places, while they may be on no device
        fill: gives values to what `insert` added
    """

    policy: PolicyFolder
    dtype: str
    runtime: RuntimeConfig
    ranks: Ranks
    insert: Callable[[PolicyModel], None] = _unchanged
    fill: Callable[[PolicyModel], None] = _unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEngine:
    """A training framework.

    Args:
        load: returns a policy as this engine's model, on this process's share of the devices; raises InputRefused where it
            can't compute it, UsageError where the layout doesn't fit, TryAgain without memory
        trainer: returns the model's trainer, with fresh optimizer state
        forward: the engine whose forward runs, by which models are kept apart
        needs_group: it has to run in a process group, be it of one
        ranks_per_copy: processes that share one copy of the model and work on the same rows
        stays_warm: its trained model can be kept for the next stages of this process
        refuse: raises UsageError for settings that it doesn't have
    """

    load: Callable[[Loading], PolicyModel]
    trainer: Callable[[Any, UpdateConfig, RuntimeConfig, Ranks], Trainer]
    forward: str
    needs_group: bool = False
    ranks_per_copy: Callable[[RuntimeConfig], int] = lambda runtime: 1
    stays_warm: bool = False
    refuse: Callable[[UpdateConfig, RuntimeConfig], None] = lambda update, runtime: None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingEngine:
    """A sampler's program.

    Args:
        sampler: returns a job's sampler with the policy's weights in it; raises InputRefused where it doesn't compute it
        asks_servers: whether it samples on servers, which `run` may start
        refuse: raises UsageError for a job whose longest row, in tokens, it has no room for
    """

    sampler: Callable[[RolloutJob, PolicyFolder, Warm], Sampler]
    asks_servers: bool = False
    refuse: Callable[[RolloutJob, int], None] = lambda job, longest: None


def training_engine(name: str) -> TrainingEngine:
    """Return a training engine's record."""
    return importlib.import_module(training_engines()[name]).ENGINE


def sampling_engine(name: str) -> SamplingEngine:
    """Return a sampling engine's record."""
    return importlib.import_module(sampling_engines()[name]).ENGINE
