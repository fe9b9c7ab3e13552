"""A policy loaded in shares: each process builds the model without weights, splits it and reads its rows of every tensor.

No process ever holds the whole model, in host memory or elsewhere. Folders whose tensors aren't the model's parameters
one to one (another layout, missing or spare tensors) are left to `load_policy`, which converts or refuses them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpoctl.engines.registry import Loading
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.engines.torch.fsdp import split, split_again
from grpoctl.engines.torch.model import TorchPolicy, autocast_type, check_policy, load_policy, pick_device
from grpoctl.extras import require
from grpoctl.inputs.policies import weight_files
from grpoctl.processes.memory import memory_errors
from grpoctl.processes.ranks import Ranks

FLOATS: Final = ("F32", "BF16", "F16")


def empty_policy(folder: Path, *, vocab_size: int, device: str) -> TorchPolicy | None:
    """Return the folder's model with parameters on no device, or None where its files don't fit them one to one.

    Args:
        folder: local Hugging Face folder
        vocab_size: of its config
        device: where it will run
    """
    require("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = cast("Any", AutoConfig).from_pretrained(folder, local_files_only=True)
        with _parameters_nowhere():
            module = (
                cast("Any", AutoModelForCausalLM)
                .from_config(config, dtype=torch.float32, attn_implementation="sdpa")
                .eval()
            )
        found = _shapes(folder)
    except (OSError, ValueError, RuntimeError):
        return None  # what is wrong with it is for `load_policy` to tell
    needed = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    kept = set(module.state_dict()) - {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if found != needed or kept:
        return None
    return TorchPolicy(module=module, vocab_size=vocab_size, device=pick_device(device))


@contextmanager
def _parameters_nowhere() -> Generator[None]:
    """Put every parameter that a module registers on the meta device; buffers are computed where they are."""
    register = torch.nn.Module.register_parameter

    def registered(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = registered  # pyright: ignore[reportAttributeAccessIssue]  names of arguments
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of the folder; one that isn't of floating point has none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        with cast("Any", safe_open(str(path), framework="pt")) as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                part = file.get_slice(name)
                shapes[name] = tuple(part.get_shape()) if part.get_dtype() in FLOATS else ()
    return shapes


def materialize(policy: TorchPolicy) -> None:
    """Give every parameter of a split model memory for this rank's share; buffers keep their values, ties hold."""
    buffers = dict(policy.runner.named_buffers(remove_duplicate=False))
    policy.runner.to_empty(device=policy.device)
    for name, buffer in policy.runner.named_buffers(remove_duplicate=False):
        buffer.copy_(buffers[name])


@torch.no_grad()
def fill(policy: TorchPolicy, folder: Path, ranks: Ranks) -> None:
    """Read this rank's rows of every tensor of the folder; adapters are left as they are."""
    parameters = {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in policy.module.named_parameters()
        if ".lora_" not in name
    }
    for path in weight_files(folder):
        with cast("Any", safe_open(str(path), framework="pt")) as file:
            names = list(file.keys())
        for name in names:
            start, stop = row_range(parameters[name].shape[0], ranks)
            with cast(
                "Any", safe_open(str(path), framework="pt")
            ) as file:  # anew: no page of an earlier tensor stays mapped
                _share(parameters[name]).copy_(file.get_slice(name)[start:stop])


def _share(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def row_range(num_rows: int, ranks: Ranks) -> tuple[int, int]:
    """Return which rows of a tensor are this rank's: blocks of one size, the last ones smaller or empty."""
    size = -(-num_rows // ranks.world_size)
    return min(num_rows, size * ranks.rank), min(num_rows, size * (ranks.rank + 1))


def load_split(loading: Loading) -> TorchPolicy:
    """Return a policy's model split over all processes.

    A folder whose tensors don't fit the model one to one is loaded whole on every process first.

    Raises:
        TryAgain: there is no memory for it.
        InputRefused: the model can't be loaded.
    """
    policy, ranks, device = loading.policy, loading.ranks, loading.runtime.device
    memory = "loading the model", "take more devices (runtime.num_processes)"
    with ranks.agreed(), memory_errors(*memory):
        size = load_tokenizer(policy.folder, policy.ref).vocab_size
        model = empty_policy(policy.folder, vocab_size=size, device=device)
    in_shares = all(ranks.all_gather(model is not None))
    with ranks.agreed(), memory_errors(*memory):
        if not in_shares or model is None:
            model = load_policy(policy.folder, ref=policy.ref, vocab_size=size, device="cpu", dtype=loading.dtype)
        loading.insert(model)
    split(model, ranks, device=device)
    with ranks.agreed(), memory_errors(*memory):
        if in_shares:
            materialize(model)
            fill(model, policy.folder, ranks)
        loading.fill(model)
    if in_shares:
        check_policy(model, policy.ref)  # every process computes the same, so that all refuse it or none
        split_again(model)
        model.autocast = autocast_type(loading.dtype)
    return model
