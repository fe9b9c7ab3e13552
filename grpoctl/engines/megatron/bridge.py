"""Between a Hugging Face folder and the tensors of a Megatron model, one tensor at a time, moments of the optimizer too.

What a bridge has to know is small: which Hugging Face tensors make up a parameter (q, k and v are one there), and how
tensor-parallel ranks share it. mbridge knows it for the models below; another bridge only needs these methods.
"""

# Megatron is an extra: where it isn't installed, pyright knows none of its types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Protocol, cast

import torch
from torch import Tensor

from grpoctl.errors import InputRefused
from grpoctl.extras import require

MODEL_TYPES: Final = ("llama", "qwen2", "qwen3")
"""Architectures whose layers Megatron's local specification computes."""
PLAIN: Final[dict[str, Any]] = {
    "use_cpu_initialization": True,
    "perform_initialization": True,  # without it parameters lose the mark that they are shared, and export half tensors
    "sequence_parallel": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "attention_softmax_in_fp32": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""Megatron without what only exists in CUDA: fused kernels, TransformerEngine."""


class WeightBridge(Protocol):
    """Builds a Megatron model for a Hugging Face config and converts its tensors."""

    def build(self) -> Any:
        """Return this rank's part of the model; its weights are not those of any policy yet."""
        ...

    def names(self, parameter: str) -> list[str]:
        """Return the Hugging Face tensors that a parameter holds."""
        ...

    def joined(self, parameter: str, tensors: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter from its Hugging Face tensors, in the order of `names`."""
        ...

    def cut(self, parameter: str, whole: Tensor) -> list[Tensor]:
        """Return the Hugging Face tensors of a whole parameter, in the order of `names`."""
        ...

    def share(self, parameter: str, whole: Tensor, like: Tensor) -> Tensor:
        """Return this rank's share of a whole parameter; `like` is the parameter."""
        ...

    def merged(self, parameter: str, shares: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return the whole parameter from the shares of all tensor-parallel ranks."""
        ...


class Mbridge:
    """mbridge's knowledge of names and layouts, around Megatron's layers without TransformerEngine."""

    def __init__(self, config: Any, *, ref: str, tensor_parallel_size: int) -> None:
        """Prepare the bridge of a Hugging Face config.

        Raises:
            InputRefused: an architecture, or a variant of one, that isn't computed.
        """
        require("mbridge")
        refuse_variants(config, ref)
        self._bridge: Any = _local_bridge(config.model_type)(
            config, dtype=torch.float32, make_vocab_size_divisible_by=tensor_parallel_size
        )
        self._size = tensor_parallel_size

    def build(self) -> Any:
        """Return this rank's part of the model; its weights are not those of any policy yet."""
        return self._bridge._model_provider([])(True, True)

    def names(self, parameter: str) -> list[str]:
        """Return the Hugging Face tensors that a parameter holds."""
        return list(self._bridge._weight_name_mapping_mcore_to_hf(parameter))

    def joined(self, parameter: str, tensors: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter from its Hugging Face tensors, in the order of `names`."""
        return self._bridge._weight_to_mcore_format(parameter, list(tensors))

    def cut(self, parameter: str, whole: Tensor) -> list[Tensor]:
        """Return the Hugging Face tensors of a whole parameter, in the order of `names`."""
        return list(self._bridge._weight_to_hf_format(parameter, whole)[1])

    def share(self, parameter: str, whole: Tensor, like: Tensor) -> Tensor:
        """Return this rank's share of a whole parameter; `like` is the parameter."""
        parts = self._bridge._weight_split_across_tp(parameter, whole, like, self._size)
        return parts[self._bridge.mpu.tp_rank if self._size > 1 else 0]

    def merged(self, parameter: str, shares: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return the whole parameter from the shares of all tensor-parallel ranks."""
        return self._bridge._weight_merge_across_tp(parameter, list(shares), like)


def refuse_variants(config: Any, ref: str) -> None:
    """Refuse what would be computed in another way than transformers computes it.

    Raises:
        InputRefused: an architecture or one of its options that Megatron's plain layers don't know.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kinds = set(getattr(config, "layer_types", None) or ())
    faults = [
        (config.model_type not in MODEL_TYPES, f"model type {config.model_type!r}, known are {', '.join(MODEL_TYPES)}"),
        (
            rope.get("rope_type", "default") != "default",
            f"rope_type {rope.get('rope_type')!r}, only default is computed",
        ),
        (rope.get("partial_rotary_factor", 1.0) != 1.0, "a partial rotary embedding"),
        (
            bool(kinds - {"full_attention"}),
            f"attention layers of kind {sorted(kinds)}, only full attention is computed",
        ),
        (
            getattr(config, "hidden_act", "silu") != "silu",
            f"activation {getattr(config, 'hidden_act', None)!r}, not silu",
        ),
    ]
    found = [text for fault, text in faults if fault]
    if found:
        raise InputRefused(f"{ref}: engine megatron doesn't compute this model ({found[0]}); use engine torch")


def _local_bridge(model_type: str) -> Any:
    """Return mbridge's class for an architecture, changed to layers that need no TransformerEngine."""
    from mbridge.models.llama import LLaMABridge
    from mbridge.models.qwen2 import Qwen2Bridge
    from mbridge.models.qwen3 import Qwen3Bridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    base: Any = {"llama": LLaMABridge, "qwen2": Qwen2Bridge, "qwen3": Qwen3Bridge}[model_type]
    layer = "model.layers.{layer_number}"

    class LocalBridge(base):
        # the local layers keep their norms apart from the projections that follow them
        _MLP_MAPPING: ClassVar = {
            **base._MLP_MAPPING,
            "pre_mlp_layernorm.weight": [f"{layer}.post_attention_layernorm.weight"],
        }
        _OTHER_MAPPING: ClassVar = {
            **base._OTHER_MAPPING,
            "input_layernorm.weight": [f"{layer}.input_layernorm.weight"],
        }

        def _build_base_config(self, **options: Any) -> Any:
            return super()._build_base_config(**{**options, **PLAIN})  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  its base is found at run time

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = True
            return get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=self.config.qk_layernorm)

        def _get_gptmodel_args(self) -> dict[str, Any]:
            return {
                "vocab_size": self.hf_config.vocab_size,
                "max_sequence_length": self.hf_config.max_position_embeddings,
                "position_embedding_type": "rope",
                "rotary_base": self.hf_config.rope_parameters["rope_theta"],
            }

    return LocalBridge


def gathered(
    bridge: WeightBridge, parameter: str, share: Tensor, *, like: Tensor, group: Any, size: int
) -> list[Tensor]:
    """Return the whole Hugging Face tensors of a parameter from this rank's share; a collective over `group`.

    Args:
        bridge: knows the layout
        parameter: its name in the Megatron model
        share: this rank's, of the weights or of a moment
        like: the parameter itself
        group: the tensor-parallel ranks
        size: their number
    """
    share = share.detach().contiguous()
    if size == 1 or not getattr(like, "tensor_model_parallel", False):
        return bridge.cut(parameter, share)
    shares = [torch.empty_like(share) for _ in range(size)]
    cast("Any", torch.distributed).all_gather(shares, share, group=group)
    return bridge.cut(parameter, bridge.merged(parameter, shares, like))


def scattered(bridge: WeightBridge, parameter: str, *, like: Tensor, fetch: Callable[[str], Tensor]) -> Tensor:
    """Return this rank's share of a parameter, on its device, from whole Hugging Face tensors; nothing is sent.

    Args:
        bridge: knows the layout
        parameter: its name in the Megatron model
        like: the parameter itself
        fetch: returns a Hugging Face tensor by name
    """
    whole = bridge.joined(parameter, [fetch(name) for name in bridge.names(parameter)])
    share = bridge.share(parameter, whole, like)
    assert share.shape == like.shape, f"{parameter}: share {tuple(share.shape)}, expected {tuple(like.shape)}"
    return share.to(like.device, torch.float32).contiguous()
