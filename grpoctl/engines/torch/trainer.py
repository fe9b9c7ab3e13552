"""Training with plain torch: on one process the reference that every other engine is measured against, on several FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpoctl.engines.base import OptimizerSettings
from grpoctl.engines.optimizer_state import read_state, write_state
from grpoctl.engines.policy_export import whole_tensors, write_policy
from grpoctl.engines.torch.adamw import clipped_step, torch_adamw
from grpoctl.engines.torch.fsdp import split_again, split_like, whole
from grpoctl.engines.torch.model import TorchPolicy
from grpoctl.processes.ranks import ALONE, Ranks


class TorchTrainer:
    """AdamW over float32 master weights, split where the policy is; the forward runs in the policy's autocast type."""

    def __init__(self, policy: TorchPolicy, settings: OptimizerSettings, ranks: Ranks = ALONE) -> None:
        self.policy = policy
        self.settings = settings
        self.ranks = ranks
        self._parameters = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
        self._optimizer = torch_adamw(list(self._parameters.values()), settings)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a scalar loss, summed over all ranks at once, so that no rank holds it whole."""
        loss.backward()  # pyright: ignore[reportUnknownMemberType]  torch leaves its arguments untyped

    def step(self, lr: float) -> float | None:
        """Clip, step and clear; return the norm before clipping, or None (and no step) where it isn't finite."""
        parameters = [p for p in self._parameters.values() if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        return clipped_step(self._optimizer, parameters, norm, lr=lr, grad_clip=self.settings.grad_clip)

    def discard(self) -> None:
        """Drop the gradient collected so far."""
        self._optimizer.zero_grad(set_to_none=True)

    def save_state(self, folder: Path) -> None:
        """Write both moments of every parameter and its number of steps."""
        state: Mapping[Any, Any] = self._optimizer.state
        held = {name: state[p] for name, p in self._parameters.items() if p in state}
        shapes = {name: tuple(self._parameters[name].shape) for name in held}
        steps = {name: int(values["step"]) for name, values in held.items()}
        write_state(folder, shapes, steps, lambda name, kind: whole(held[name][kind]), ranks=self.ranks)

    def load_state(self, folder: Path) -> None:
        """Read what any engine's `save_state` wrote.

        Raises:
            InputRefused: the state belongs to a model with other parameters.
        """
        state: Any = self._optimizer.state

        def put(name: str, steps: int, moments: Mapping[str, Tensor]) -> None:
            parameter = self._parameters[name]
            split = {kind: split_like(tensor, parameter) for kind, tensor in moments.items()}
            state[parameter] = {"step": torch.tensor(float(steps)), **split}

        read_state(folder, {name: tuple(p.shape) for name, p in self._parameters.items()}, put)

    def export(self, folder: Path, *, adapter: Path | None = None) -> None:
        """Write the float32 weights as safetensors, under the names of the policy that was loaded; tied stay tied."""
        split_again(self.policy)
        tensors = whole_tensors(self.policy.module, whole, ranks=self.ranks)
        if self.ranks.is_first:
            write_policy(folder, self.policy, tensors, adapter=adapter)
