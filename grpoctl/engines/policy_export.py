"""Write a policy's weights as transformers would, gathered tensor by tensor from whatever an engine made of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from grpoctl.engines.torch.lora import merged, write_adapters
from grpoctl.processes.ranks import Ranks


def whole_tensors(module: Any, whole: Callable[[Any], Tensor], *, ranks: Ranks) -> dict[str, Tensor]:
    """Return the module's state dict with whole tensors in host memory on the first rank, an empty one on the others.

    Args:
        module: the model
        whole: returns a parameter's whole tensor; a collective on several ranks
        ranks: all processes
    """
    result: dict[str, Tensor] = {}
    kept: dict[int, Tensor] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if id(parameter) not in kept:
            tensor = whole(parameter).detach()
            kept[id(parameter)] = tensor.cpu() if ranks.is_first else tensor.new_empty(0)
        result[name] = kept[id(parameter)]
    for name, value in module.state_dict(keep_vars=True).items():
        if name not in parameters:
            result[name] = value.detach().cpu()
    return result if ranks.is_first else {}


def write_policy(folder: Path, policy: Any, tensors: dict[str, Tensor], *, adapter: Path | None = None) -> None:
    """Write whole tensors as safetensors, under the names of the policy that was loaded; tied stay tied.

    Args:
        folder: for the weights; adapters are merged into them
        policy: tells the names and whether there are adapters
        tensors: of all its parameters
        adapter: folder for the adapters by themselves
    """
    if policy.adapters is not None:
        if adapter is not None:
            write_adapters(adapter, tensors, policy.adapters)
        tensors = merged(tensors, scale=policy.adapters.scale)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # accelerate imports an installed deepspeed, which else complains
    folder.mkdir(parents=True, exist_ok=True)
    with _disk_errors():
        policy.module.save_pretrained(folder, state_dict=tensors, safe_serialization=True)
    for path in folder.iterdir():
        if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
            path.chmod(0o644)
        else:
            path.unlink()  # config, tokenizer and template are carried from the parent unchanged


def write_tensors_as_policy(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write whole tensors under the names they have, as `write_policy` does for an engine that knows no transformers."""
    from huggingface_hub import save_torch_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    with _disk_errors():
        save_torch_state_dict(tensors, folder, max_shard_size="50GB")
    for path in folder.iterdir():
        path.chmod(0o644)


@contextmanager
def _disk_errors() -> Generator[None]:
    """Raise the OSError that safetensors wraps in an error of its own."""
    try:
        yield
    except SafetensorError as error:
        code = errno.ENOSPC if "os error 28" in str(error) else errno.EIO
        raise OSError(code, str(error)) from error
