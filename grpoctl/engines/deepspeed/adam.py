"""DeepSpeed's own kernels of AdamW."""

# DeepSpeed is an extra: where it isn't installed, pyright knows none of its types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from grpoctl.engines.base import OptimizerSettings
from grpoctl.engines.torch.adamw import decay_groups
from grpoctl.errors import UsageError

FAR_STEP: Final = 1 << 30
"""A number of steps that no training has behind or before it."""


def deepspeed_adam(parameters: Sequence[Any], settings: OptimizerSettings, *, on_cpu: bool) -> Any:
    """Return DeepSpeed's AdamW: DeepSpeedCPUAdam where its states lie in host memory, else FusedAdam.

    Args:
        parameters: all that train
        settings: of AdamW
        on_cpu: whether states lie in host memory

    Raises:
        UsageError: its kernel can't be compiled, which happens on first use.
    """
    import deepspeed.ops.adam as kernels

    groups = decay_groups(parameters, settings.weight_decay)
    shared: dict[str, Any] = {"lr": 0.0, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    try:
        if not on_cpu:
            return kernels.FusedAdam(groups, adam_w_mode=True, **shared)
        adam: Any = kernels.DeepSpeedCPUAdam(groups, adamw_mode=True, **shared)
    except (RuntimeError, OSError, ImportError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise UsageError(
            f"runtime.deepspeed.optimizer: deepspeed: its kernel can't be compiled ({reason}); it needs ninja "
            "(pip install ninja) and g++, nvcc too for a GPU: install them, or set runtime.deepspeed.optimizer: torch"
        ) from error
    adam.register_step_pre_hook(_powers_from_scratch)
    return adam


def _powers_from_scratch(adam: Any, *_: Any) -> None:
    """Have the CPU kernel compute βᵗ from t instead of from its last call, so that a resumed run's bits are the same."""
    first = adam.param_groups[0]
    nothing = [torch.zeros(1) for _ in range(4)]
    beta1, beta2 = first["betas"]
    adam.ds_opt_adam.adam_update(adam.opt_id, FAR_STEP, 0.0, beta1, beta2, first["eps"], 0.0, True, *nothing)
