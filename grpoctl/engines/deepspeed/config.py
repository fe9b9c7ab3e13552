"""DeepSpeed's configuration: a user's ds_config.json with our settings in it, or the keys on which the two disagree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from grpoctl.errors import UsageError
from grpoctl.settings.runtime import DeepSpeedConfig

OWNED: Final = {
    "optimizer": "update.lr, beta1, beta2, adam_eps and weight_decay set the optimizer",
    "scheduler": "update.lr_schedule sets it",
    "fp16": "float16 isn't supported; set update.dtype",
    "bf16": "it would round the master weights; set update.dtype: bfloat16",
    "amp": "set update.dtype",
    "torch_autocast": "set update.dtype; the forward switches autocast on itself",
    "data_types": "gradients are collected in float32",
    "communication_data_type": "gradients are summed in float32",
    "gradient_predivide_factor": "losses are shares of one sum already",
    "prescale_gradients": "losses are shares of one sum already",
    "sparse_gradients": "gradients are dense",
    "compression_training": "it changes the weights",
    "data_efficiency": "the order of the data is update.shuffle's",
    "curriculum_learning": "the order of the data is update.shuffle's",
    "progressive_layer_drop": "it changes the model",
    "eigenvalue": "it belongs to compression",
    "quantize_training": "it changes the weights",
    "managed_gradient_accumulation": "micro-batches are cut by runtime.micro_batch_tokens",
}
"""Sections that would change the result, and what sets it here."""
SPEED_ONLY: Final[dict[str, Any]] = {"steps_per_print": None, "wall_clock_breakdown": False}
"""Our defaults where the user's file says nothing."""


def engine_config(
    ours: DeepSpeedConfig, given: Mapping[str, Any], *, grad_clip: float | None, world_size: int
) -> dict[str, Any]:
    """Return the configuration to run with.

    Args:
        ours: stage and offload
        given: the user's ds_config.json, {} without one
        grad_clip: update.grad_clip
        world_size: processes

    Raises:
        UsageError: a key of the file contradicts our settings; all such keys are named.
    """
    if ours.offload == "all" and ours.zero_stage != 3:
        raise UsageError(f"runtime.deepspeed.offload: all needs zero_stage 3, found {ours.zero_stage}")
    if ours.offload == "optimizer" and ours.zero_stage == 0:
        raise UsageError("runtime.deepspeed.offload: optimizer needs zero_stage 1 or more, found 0")
    zero: dict[str, Any] = {"stage": ours.zero_stage}
    offloads = {"offload_optimizer": ours.offload != "none", "offload_param": ours.offload == "all"}
    zero |= {key: {"device": "cpu"} for key, wanted in offloads.items() if wanted}
    needed: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed only divides by these; micro-batches are cut by tokens
        "gradient_accumulation_steps": 1,
        "train_batch_size": world_size,
        "gradient_clipping": grad_clip or 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    wrong = [*_owned(given), *_differing(needed, given, "")]
    wrong += [
        f"zero_optimization.{key}: runtime.deepspeed.offload is {ours.offload}"
        for key, wanted in offloads.items()
        if not wanted and _device(given.get("zero_optimization", {}).get(key)) != "none"
    ]
    if wrong:
        raise UsageError(f"{ours.config_file}: " + "; ".join(wrong) + ": remove these keys or change the settings")
    merged = {**SPEED_ONLY, **given, **needed}
    merged["zero_optimization"] = _merged(given.get("zero_optimization", {}), zero)
    return merged


def _owned(given: Mapping[str, Any]) -> Iterator[str]:
    for key, reason in OWNED.items():
        value = given.get(key)
        fields = cast("Mapping[str, Any]", value)
        off = value is None or value is False or (isinstance(value, Mapping) and fields.get("enabled") is False)
        if not off:
            yield f"{key}: {reason}"


def _differing(needed: Mapping[str, Any], given: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield where the file has another value than is needed; Hugging Face's "auto" agrees with everything."""
    for key, value in needed.items():
        if key not in given or given[key] == "auto":
            continue
        if isinstance(value, Mapping) and isinstance(given[key], Mapping):
            yield from _differing(cast("Mapping[str, Any]", value), given[key], f"{prefix}{key}.")
        elif given[key] != value:
            yield f"{prefix}{key}: is {given[key]!r} there, {value!r} by our settings"


def _device(section: Any) -> str:
    return "none" if section is None else str(section.get("device", "none"))


def _merged(given: Mapping[str, Any], needed: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(given)
    for key, value in needed.items():
        both = isinstance(value, Mapping) and isinstance(given.get(key), Mapping)
        result[key] = {**given[key], **value} if both else value
    return result
