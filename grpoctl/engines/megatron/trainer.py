"""Training with Megatron's layers, tensor and data parallel, held to the numbers of the torch engine.

The loss of every tensor-parallel rank is the same number, so a shared matrix gets its gradient from the ranks that share
it, inside the layers; copies of the model add theirs here. AdamW is torch's, each rank's over its own shares.
"""

# Megatron is an extra: where it isn't installed, pyright knows none of its types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from grpoctl.engines.base import OptimizerSettings
from grpoctl.engines.megatron.bridge import gathered, scattered
from grpoctl.engines.megatron.model import MegatronPolicy
from grpoctl.engines.optimizer_state import MOMENTS, read_state, write_state
from grpoctl.engines.policy_export import write_tensors_as_policy
from grpoctl.engines.torch.adamw import clipped_step, torch_adamw
from grpoctl.errors import InputRefused
from grpoctl.processes.ranks import Ranks

distributed: Any = torch.distributed  # its collectives are half typed
HEAD_NORMS: Final = ("q_layernorm.weight", "k_layernorm.weight")
"""Norms of single heads: every tensor-parallel rank has them whole, but its gradient is of its own heads only."""


class MegatronTrainer:
    """AdamW over this rank's float32 shares."""

    def __init__(self, policy: MegatronPolicy, settings: OptimizerSettings, ranks: Ranks) -> None:
        from megatron.core import parallel_state

        self.policy = policy
        self.settings = settings
        self.ranks = ranks
        self._copies: Any = parallel_state.get_data_parallel_group()
        self._parameters: dict[str, Any] = dict(policy.module.named_parameters())
        self._names = policy.names()
        self._optimizer = torch_adamw(list(self._parameters.values()), settings)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a scalar loss; the last one of a step completes the sums over ranks."""
        loss.backward()  # pyright: ignore[reportUnknownMemberType]  torch leaves its arguments untyped
        if last:
            by_heads = [p.grad for name, p in self._parameters.items() if name.endswith(HEAD_NORMS)]
            _add_up(by_heads, self.policy.group)
            _add_up([p.grad for p in self._parameters.values()], self._copies)

    def step(self, lr: float) -> float | None:
        """Clip, step and clear; return the norm before clipping, or None (and no step) where it isn't finite."""
        parameters = self._parameters.values()
        return clipped_step(self._optimizer, parameters, self._norm(), lr=lr, grad_clip=self.settings.grad_clip)

    def _norm(self) -> Tensor:
        """Return the norm of the whole gradient: shares added over the ranks that hold them, copies counted once."""
        shared = [p.grad for p in self._parameters.values() if getattr(p, "tensor_model_parallel", False)]
        whole = [p.grad for p in self._parameters.values() if not getattr(p, "tensor_model_parallel", False)]
        squares = torch.nn.utils.get_total_norm(shared).square()
        distributed.all_reduce(squares, group=self.policy.group)
        return (squares + torch.nn.utils.get_total_norm(whole).square()).sqrt()

    def discard(self) -> None:
        """Drop the gradient collected so far."""
        self._optimizer.zero_grad(set_to_none=True)

    def save_state(self, folder: Path) -> None:
        """Write both moments of every parameter, under the Hugging Face names that all engines use, and its steps."""
        state: Mapping[Any, Any] = self._optimizer.state
        held = {name: state[p] for name, p in self._parameters.items() if p in state}
        owners = {tensor: (name, place) for name in held for place, tensor in enumerate(self._names[name])}
        steps = {tensor: int(held[name]["step"]) for tensor, (name, _) in owners.items()}

        def moment(tensor: str, kind: str) -> Tensor:
            name, place = owners[tensor]
            return self._whole(name, held[name][kind])[place]

        write_state(folder, {tensor: self.policy.shapes[tensor] for tensor in owners}, steps, moment, ranks=self.ranks)

    def load_state(self, folder: Path) -> None:
        """Read what any engine's `save_state` wrote.

        Raises:
            InputRefused: the state belongs to a model with other parameters.
        """
        state: Any = self._optimizer.state
        owners = {tensor: name for name, tensors in self._names.items() for tensor in tensors}
        found: dict[str, Mapping[str, Tensor]] = {}

        def put(tensor: str, steps: int, moments: Mapping[str, Tensor]) -> None:
            found[tensor] = moments
            name = owners[tensor]
            if not set(self._names[name]) <= set(found):
                return
            parameter = self._parameters[name]
            parts = {part: found.pop(part) for part in self._names[name]}
            share = {
                kind: scattered(
                    self.policy.bridge, name, like=parameter, fetch=lambda part, kind=kind: parts[part][kind]
                )
                for kind in MOMENTS
            }
            state[parameter] = {"step": torch.tensor(float(steps)), **share}

        read_state(folder, self.policy.shapes, put)
        if found:
            raise InputRefused(
                f"{folder}: optimizer state for {sorted(found)[0]}, but not for the tensors that Megatron keeps with it; "
                "name a whole update"
            )

    def export(self, folder: Path, *, adapter: Path | None = None) -> None:
        """Write the float32 weights as safetensors, under the names of the policy that was loaded; tied stay tied."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            parts = self._whole(name, parameter)
            if self.ranks.is_first:
                tensors |= {tensor: part.cpu().clone() for tensor, part in zip(self._names[name], parts, strict=True)}
        if self.ranks.is_first:
            write_tensors_as_policy(folder, tensors)

    def _whole(self, name: str, share: Tensor) -> list[Tensor]:
        """Return the Hugging Face tensors of a parameter, or of its moment, from this rank's share; a collective."""
        policy = self.policy
        return gathered(
            policy.bridge,
            name,
            share,
            like=self._parameters[name],
            group=policy.group,
            size=policy.tensor_parallel_size,
        )


def _add_up(grads: Sequence[Tensor], group: Any) -> None:
    """Sum gradients over ranks in place."""
    if distributed.get_world_size(group) == 1:
        return
    for sent in [distributed.all_reduce(grad, group=group, async_op=True) for grad in grads]:
        assert sent is not None
        sent.wait()
