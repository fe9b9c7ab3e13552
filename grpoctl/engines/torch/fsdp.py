"""A policy split over processes with FSDP2: each holds a share of every tensor and gathers a layer when it runs.

Weights are gathered in float32 and rounded inside the forward (autocast), as on one process: a forward's numbers don't
depend on the number of processes. Gathering bfloat16 would halve the traffic and change them.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]  torch leaves its function untyped

from grpoctl.engines.forward import PackedForward
from grpoctl.engines.torch.model import TorchPolicy, pick_device
from grpoctl.processes.ranks import Ranks


def split(policy: TorchPolicy, ranks: Ranks, *, device: str) -> None:
    """Split the policy's weights over all ranks, layer by layer, and move them to the device; alone nothing happens."""
    if ranks.world_size == 1 or policy.runner is not None:
        return
    policy.device = pick_device(device)
    mesh = init_device_mesh(policy.device.type, (ranks.world_size,))
    runner = PackedForward(policy)
    for block in blocks(policy.module):
        fully_shard(block, mesh=mesh)
    fully_shard(runner, mesh=mesh)
    for module in runner.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses are shares of one sum, so gradients are added
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    policy.runner = runner


def blocks(module: Any) -> list[Any]:
    """Return the model's layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


def checkpoint_activations(policy: TorchPolicy) -> None:
    """Keep only each layer's input for the backward pass; the layer runs again there, to the same bits."""
    for block in blocks(policy.module):
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
        block.training = True  # transformers asks for it; the parts inside, dropout among them, stay in evaluation mode


def split_again(policy: TorchPolicy) -> None:
    """Drop what the last forward without a backward left whole, so that parameters are this rank's shares."""
    if isinstance(policy.runner, FSDPModule):
        policy.runner.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return a split tensor whole (a collective), any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor as the parameter is: this rank's share of it, on its device; nothing is sent."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
