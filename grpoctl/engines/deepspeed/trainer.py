"""Training with DeepSpeed ZeRO, held to the numbers of the torch engine.

The forward, its precision and AdamW (where DeepSpeed's own isn't asked for) are the torch engine's; DeepSpeed splits, sums
and steps. It divides gradients by the
number of processes, so losses are multiplied by it. Its checkpoints, `latest` included, are not used.
"""

# DeepSpeed is an extra: where it isn't installed, pyright knows none of its types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from grpoctl.engines.base import OptimizerSettings
from grpoctl.engines.deepspeed.adam import deepspeed_adam
from grpoctl.engines.forward import PackedForward
from grpoctl.engines.optimizer_state import MOMENTS, read_state, write_state
from grpoctl.engines.policy_export import whole_tensors, write_policy
from grpoctl.engines.torch.adamw import torch_adamw
from grpoctl.engines.torch.model import TorchPolicy, pick_device
from grpoctl.extras import require
from grpoctl.processes.ranks import Ranks

NORM_METHOD: Final = {1: "scaled_global_norm", 2: "scaled_global_norm", 3: "_get_norm_groups"}
"""What DeepSpeed's optimizer asks for the gradient norm, by stage; a norm that isn't finite makes it drop the step."""
LINEAR: Final = torch.nn.functional.linear
"""Torch's own, before ZeRO 3 puts another in its place."""


class DeepSpeedTrainer:
    """AdamW over float32 weights that DeepSpeed holds; stage 0 to 3."""

    def __init__(
        self,
        policy: TorchPolicy,
        settings: OptimizerSettings,
        config: Mapping[str, Any],
        ranks: Ranks,
        *,
        device: str,
        own_adam: bool = False,
    ) -> None:
        self.policy = policy
        self.ranks = ranks
        self.stage = int(config["zero_optimization"]["stage"])
        self._dropping = False
        self._parameters = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
        self._own_adam = own_adam
        place = pick_device(device)
        deepspeed = _deepspeed(place)
        if self.stage == 3:
            _keep_linear_exact()
        trained = list(self._parameters.values())
        if own_adam:
            on_cpu = place.type == "cpu" or "offload_optimizer" in config["zero_optimization"]
            with ranks.agreed():  # its kernel may not compile on one machine
                base = deepspeed_adam(trained, settings, on_cpu=on_cpu)
        else:
            base = torch_adamw(trained, settings)
        self._engine: Any = deepspeed.initialize(
            model=PackedForward(policy), optimizer=base, config=dict(config), dist_init_required=False
        )[0]
        policy.runner, policy.device = self._engine, self._engine.device
        self._optimizer: Any = self._engine.optimizer
        self._states: Any = self._optimizer.state if self.stage == 0 else self._optimizer.optimizer.state
        if self.stage:
            self._watch_norm()

    def _watch_norm(self) -> None:
        name = NORM_METHOD[self.stage]
        norm = getattr(self._optimizer, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            found = norm(*args, **kwargs)
            if not self._dropping:
                return found
            return [torch.full_like(part, float("nan")) for part in found] if self.stage == 3 else found * float("nan")

        setattr(self._optimizer, name, watched)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a scalar loss; the last one of a step completes the sum over ranks."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.ranks.world_size, scale_wrt_gas=False)

    def step(self, lr: float) -> float | None:
        """Clip, step and clear; return the norm before clipping, or None (and no step) where it isn't finite."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self.stage == 0:
            return self._plain_step()
        self._engine.step()
        return None if self._optimizer.overflow else float(self._engine.get_global_grad_norm())

    def _plain_step(self) -> float | None:
        """Step without ZeRO, where DeepSpeed neither tells the norm nor looks whether it is finite."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters.values() if p.grad is not None])
        if not torch.isfinite(norm):
            self._engine.zero_grad()
            return None
        self._engine.step()
        return float(norm)

    def discard(self) -> None:
        """Drop the gradient collected so far: by DeepSpeed's own way out of a step whose norm isn't finite."""
        if self.stage == 0:
            self._engine.zero_grad()
            return
        self._dropping = True
        self._engine.step()
        self._dropping = False

    def save_state(self, folder: Path) -> None:
        """Write both moments of every parameter and its number of steps."""
        from deepspeed.utils import safe_get_full_optimizer_state  # pyright: ignore[reportUnknownVariableType]  DeepSpeed types nothing

        self._link_states()
        taken = [int(state["step"]) for state in self._states.values() if state]
        count = max(self.ranks.all_gather(max(taken, default=0)))
        names = self._parameters if count else {}

        def moment(name: str, kind: str) -> Tensor:
            parameter = self._parameters[name]
            if self.stage == 0:
                return self._states[parameter][kind]
            found = safe_get_full_optimizer_state(parameter, kind)
            assert found is not None
            return found

        shapes = {name: _shape(self._parameters[name]) for name in names}
        write_state(folder, shapes, dict.fromkeys(names, count), moment, ranks=self.ranks)

    def load_state(self, folder: Path) -> None:
        """Read what any engine's `save_state` wrote.

        Raises:
            InputRefused: the state belongs to a model with other parameters.
        """
        flats: list[Tensor] = []
        if self.stage:
            flats = (
                self._optimizer.fp32_partitioned_groups_flat
                if self.stage == 3
                else self._optimizer.single_partition_of_fp32_groups
            )
            for flat in flats:
                self._states[flat] = {kind: torch.zeros_like(flat) for kind in MOMENTS} | {"step": self._count(0)}
        self._link_states()
        counts: list[int] = []

        def put(name: str, steps: int, moments: Mapping[str, Tensor]) -> None:
            counts.append(steps)
            parameter = self._parameters[name]
            if self.stage == 0:
                held = {kind: tensor.to(parameter.device) for kind, tensor in moments.items()}
                self._states[parameter] = {"step": self._count(steps), **held}
                return
            for kind, tensor in moments.items():
                self._put_share(parameter, tensor, kind)

        read_state(folder, {name: _shape(p) for name, p in self._parameters.items()}, put)
        for flat in flats:
            self._states[flat]["step"] = self._count(max(counts))

    def _count(self, steps: int) -> Any:
        """Return a number of steps as the optimizer keeps it."""
        return steps if self._own_adam else torch.tensor(float(steps))

    def _link_states(self) -> None:
        """Link parameters to their moments: DeepSpeed does it once, after its first group's first step only."""
        if self.stage in (1, 2):
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _put_share(self, parameter: Any, tensor: Tensor, kind: str) -> None:
        """Put this rank's share of a whole moment where DeepSpeed keeps it."""
        from deepspeed.utils import (
            safe_set_full_optimizer_state,  # pyright: ignore[reportUnknownVariableType]  DeepSpeed types nothing
            safe_set_local_optimizer_state,  # pyright: ignore[reportUnknownVariableType]  as above
        )

        if self.stage < 3:
            safe_set_full_optimizer_state(parameter, tensor.to(self.policy.device), kind)
            return
        size = parameter.ds_tensor.numel()  # the last rank's share is padded, which the setter of whole tensors ignores
        padded = torch.zeros(size * self.ranks.world_size)
        padded[: tensor.numel()] = tensor.flatten()
        share = padded[size * self.ranks.rank : size * (self.ranks.rank + 1)]
        safe_set_local_optimizer_state(parameter, share.to(self.policy.device), kind)

    def export(self, folder: Path, *, adapter: Path | None = None) -> None:
        """Write the float32 weights as safetensors, under the names of the policy that was loaded; tied stay tied."""
        tensors = whole_tensors(self.policy.module, self._whole, ranks=self.ranks)
        if self.ranks.is_first:
            write_policy(folder, self.policy, tensors, adapter=adapter)

    def _whole(self, parameter: Any) -> Tensor:
        if self.stage < 3:
            return parameter
        with _package().zero.GatheredParameters([parameter]):
            return parameter.detach().clone()


def _shape(parameter: Any) -> tuple[int, ...]:
    """Return a parameter's shape; ZeRO 3 leaves an empty tensor in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _keep_linear_exact() -> None:
    """Have the linear layer that ZeRO 3 puts in the place of torch's, to let go of weights, compute torch's bits.

    It adds the bias in a step of its own, which in bfloat16 moves log-probabilities by 0.05 nats away from `logprob`'s.
    """
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    def forward(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return LINEAR(
            given, weight.detach(), None if bias is None else bias.detach()
        )  # autocast keeps no copy of these

    LinearFunctionForZeroStage3.forward = staticmethod(forward)  # pyright: ignore[reportAttributeAccessIssue]


def _package() -> Any:
    """Import DeepSpeed by name: a type checker takes this folder for the package where that isn't installed."""
    return importlib.import_module("deepspeed")


def _deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a device and attach it to the process group that is there."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of names that it still uses
    require("deepspeed")
    deepspeed = _package()
    importlib.import_module("deepspeed.ops")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for minutes at every first start
    deepspeed.init_distributed(auto_mpi_discovery=False, dist_init_required=None)
    return deepspeed
