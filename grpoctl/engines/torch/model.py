"""A causal language model as this project uses it: last hidden states, the output embedding, and proof that they fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpoctl.engines.base import TokenIds, Unit
from grpoctl.engines.forward import PackedForward, model_logprobs, unit_logprobs
from grpoctl.engines.proof import FORWARD_LIMIT
from grpoctl.errors import InputRefused
from grpoctl.extras import require

log = logging.getLogger("grpoctl")


@dataclass(slots=True, kw_only=True)
class TorchPolicy:
    """A model with float32 weights.

    Args:
        module: transformers' causal LM
        vocab_size: real tokens; rows of the output embedding beyond are padding
        shares_prompts: whether several completions may follow one prompt in a row (exact for plain attention only)
        max_shared_tokens: longest row for which that holds (sliding windows), None without limit
        autocast: bfloat16 to run the forward in it, None for float32
        runner: the engine around the forward (FSDP2, DeepSpeed), None where it is called directly
        adapters: the low-rank adapters beside its frozen weights, None where all weights train
    """

    module: Any
    vocab_size: int
    device: torch.device
    shares_prompts: bool = True
    max_shared_tokens: int | None = None
    autocast: torch.dtype | None = None
    runner: Any = None
    adapters: Any = None

    def hidden(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor | None) -> Tensor:
        """Return (B, T, H) last hidden states.

        Args:
            input_ids: (B, T) int64
            position_ids: (B, T) int64
            mask: (B, 1, T, T) bool, true where a query may look; None for plain causal attention (right padding)
        """
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            output = self.module.base_model(
                input_ids=input_ids, position_ids=position_ids, attention_mask=mask, use_cache=False
            )
        return output.last_hidden_state

    @property
    def forward(self) -> Any:
        """The forward: the engine's own around it, or the plain one."""
        return self.runner or PackedForward(self)

    @property
    def head(self) -> Tensor:
        """The (V, H) output embedding."""
        return self.module.get_output_embeddings().weight


def pick_device(name: str) -> torch.device:
    """Return the device that `runtime.device` names."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_policy(folder: Path, *, ref: str, vocab_size: int, device: str, dtype: str) -> TorchPolicy:
    """Load a policy folder with float32 weights and check that our forward computes what the model does.

    Args:
        folder: local Hugging Face folder
        ref: its name in messages
        vocab_size: of its config
        device: `auto`, `cpu`, `cuda` or `mps`
        dtype: of the forward, `float32` or `bfloat16`

    Raises:
        InputRefused: the model can't be loaded, or scales or caps its logits in a way the chunked head doesn't know.
    """
    require("transformers")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        module, loading = _loaded(AutoModelForCausalLM, folder)
    except (OSError, ValueError, RuntimeError) as error:
        if "ignore_mismatched_sizes" in str(error):
            raise InputRefused(
                f"{ref}: shapes of its tensors aren't those that config.json asks for (vocab_size {vocab_size}); "
                "config and weights don't belong together, restore one of them"
            ) from error
        raise InputRefused(f"{ref}: transformers can't load it ({str(error).splitlines()[0]})") from error
    missing = sorted(loading["missing_keys"]) + sorted(loading["unexpected_keys"])
    if missing:
        raise InputRefused(
            f"{ref}: {len(missing)} tensors don't fit the model that config.json describes, such as {missing[:3]}; "
            "transformers would fill them with random numbers: restore the folder, or name a causal language model"
        )
    place = pick_device(device)
    module.to(place).eval()
    policy = TorchPolicy(module=module, vocab_size=vocab_size, device=place)
    check_policy(policy, ref)
    policy.autocast = autocast_type(dtype)
    return policy


def autocast_type(dtype: str) -> torch.dtype | None:
    """Return what a forward in `dtype` is cast to on the way."""
    return torch.bfloat16 if dtype == "bfloat16" else None


def check_policy(policy: TorchPolicy, ref: str) -> None:
    """Check that our forward computes what the model does, and find whether prompts may be shared.

    Where the policy is split over processes each of them calls it.

    Raises:
        InputRefused: the model scales or caps its logits in a way the chunked head doesn't know.
    """
    _check_head(policy, ref)
    policy.shares_prompts, policy.max_shared_tokens = _sharing(policy)


def _loaded(kind: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    return kind.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="sdpa",
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )


def _probe_ids(policy: TorchPolicy) -> TokenIds:
    return np.array([(7 * i * i + 3 * i + 1) % policy.vocab_size for i in range(12)], dtype=np.int32)


@torch.no_grad()
def _check_head(policy: TorchPolicy, ref: str) -> None:
    head = policy.module.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise InputRefused(f"{ref}: its output embedding is missing or has a bias; only a plain matrix is supported")
    ids = _probe_ids(policy)
    probe = [Unit(prompt_ids=ids[:1], completions=(ids[1:],), rows=(0,))]
    gap = float((unit_logprobs(policy, probe, temperature=1.0)[0] - model_logprobs(policy, probe)).abs().max())
    if not gap <= FORWARD_LIMIT:
        raise InputRefused(
            f"{ref}: the model's logits differ from hidden states times output embedding by {gap:.3g} nats; "
            "architectures that scale or cap logits aren't supported"
        )


@torch.no_grad()
def _sharing(policy: TorchPolicy) -> tuple[bool, int | None]:
    ids = _probe_ids(policy)
    parts = (ids[4:8], ids[8:12])
    together = Unit(prompt_ids=ids[:4], completions=parts, rows=(0, 1))
    apart = [Unit(prompt_ids=ids[:4], completions=(part,), rows=(i,)) for i, part in enumerate(parts)]
    shared, _ = unit_logprobs(policy, [together], temperature=1.0)
    separate, _ = unit_logprobs(policy, apart, temperature=1.0)
    if float((shared - separate).abs().max()) > FORWARD_LIMIT:
        log.info("this architecture can't share a prompt between completions; each runs in a row of its own")
        return False, None
    config = policy.module.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    slides = "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", window is not None))
    return True, int(window) if window and slides else None
