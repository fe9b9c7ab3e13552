"""Low-rank adapters: attach them to a policy, merge them into whole weights, keep them beside.

While training, a layer computes W·x + s·B·(A·x) with W frozen. What is published is W + s·B·A, computed once in float32; it
answers like the adapters but for rounding. Training continues from A, B and the base, never from merged weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]  paths of unknown type
from torch import Tensor

from grpoctl.engines.torch.fsdp import split_like
from grpoctl.errors import InputRefused, UsageError
from grpoctl.extras import require
from grpoctl.settings.fields import LoraConfig

RECORD: Final = "grpoctl_adapter.json"
WEIGHTS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
"""What peft puts before every name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The policy that adapters were trained beside."""

    ref: str
    weights_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """What a policy's adapters are: their settings and the base that they belong to."""

    config: LoraConfig
    base: Base

    @property
    def scale(self) -> float:
        """Factor of the adapters' product."""
        return self.config.alpha / self.config.rank


def insert(policy: Any, adapters: Adapters) -> None:
    """Freeze a policy's weights and make room for adapters, on no device where its weights aren't either.

    Raises:
        UsageError: no layer has one of the target names.
    """
    require("peft")
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(_peft_config(adapters), policy.module)
    except ValueError as error:
        raise UsageError(
            f"update.lora.targets {list(adapters.config.targets)}: {str(error).splitlines()[0]}"
        ) from error
    policy.adapters = adapters


@torch.no_grad()
def draw(policy: Any, *, seed: int) -> None:
    """Give adapters their values of a fresh start, on every rank its share."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    for name, parameter in sorted(policy.module.named_parameters()):
        if ".lora_A." in name:
            bound = parameter.shape[1] ** -0.5  # peft's kaiming_uniform_(a=√5), from a seed of our own
            drawn = torch.rand(parameter.shape, generator=generator) * 2 * bound - bound
            parameter.copy_(split_like(drawn, parameter))
        elif ".lora_B." in name:
            parameter.zero_()


def _peft_config(adapters: Adapters) -> Any:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=adapters.config.rank,
        lora_alpha=adapters.config.alpha,  # pyright: ignore[reportArgumentType]  peft takes floats too
        target_modules=list(adapters.config.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=adapters.base.ref,
    )


def merged(tensors: Mapping[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """Return the state dict of the plain model: W + scale · B·A where there are adapters, in float32."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".lora_" in name:
            continue
        layer = name.removesuffix(".base_layer.weight")
        if layer == name:
            result[name.replace(".base_layer.", ".")] = tensor
        else:
            a, b = tensors[f"{layer}.lora_A.default.weight"], tensors[f"{layer}.lora_B.default.weight"]
            result[f"{layer}.weight"] = tensor + (b @ a) * scale
    return result


def write_adapters(folder: Path, tensors: Mapping[str, Tensor], adapters: Adapters) -> None:
    """Write the adapters as peft does (`PeftModel.from_pretrained` reads them), and a record of their base."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {
        PREFIX + name.replace(".default.", "."): tensor.contiguous()
        for name, tensor in tensors.items()
        if ".lora_" in name
    }
    save_file(named, str(folder / WEIGHTS), metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    config = _peft_config(adapters).to_dict()
    config["target_modules"] = sorted(config["target_modules"])  # peft keeps a set, whose order is another each time
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
    record = {"base": asdict(adapters.base), "lora": adapters.config.model_dump(mode="json")}
    (folder / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def read_record(folder: Path) -> Adapters:
    """Return what the adapters in a folder are."""
    record = json.loads((folder / RECORD).read_bytes())
    return Adapters(config=LoraConfig.model_validate_json(json.dumps(record["lora"])), base=Base(**record["base"]))


def read_base(folder: Path, config: LoraConfig, where: str) -> Base:
    """Return the base of the adapters in a folder.

    Raises:
        InputRefused: they were trained with other settings.
    """
    adapters = read_record(folder)
    found = adapters.config
    if found != config:
        raise InputRefused(
            f"{where}: its adapters have rank {found.rank}, alpha {found.alpha} and targets {list(found.targets)}; "
            f"update.lora says {config.rank}, {config.alpha} and {list(config.targets)}: make them equal"
        )
    return adapters.base


@torch.no_grad()
def load_adapters(policy: Any, folder: Path) -> None:
    """Put stored adapters in the place of a policy's fresh ones, on every rank its share."""
    stored = load_file(str(folder / WEIGHTS))
    parameters = {name: p for name, p in policy.module.named_parameters() if ".lora_" in name}
    for name, parameter in parameters.items():
        parameter.copy_(split_like(stored[PREFIX + name.replace(".default.", ".")], parameter))
