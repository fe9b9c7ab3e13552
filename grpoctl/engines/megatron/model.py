"""A policy as a Megatron model: tensor-parallel ranks hold shares of every matrix, data-parallel ones whole sets of them.

Megatron numbers neighbours first: ranks 0 … TP − 1 hold one copy of the model and work on the same rows. The forward
is ours around Megatron's layers, so that a prompt runs once for all its completions here too.
"""

# Megatron is an extra: where it isn't installed, pyright knows none of its types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from grpoctl.engines.base import Unit
from grpoctl.engines.forward import LEAST_POSITIONS, Packed, unit_logprobs
from grpoctl.engines.megatron.bridge import Mbridge, WeightBridge, scattered
from grpoctl.engines.megatron.head import vocab_parallel_logprobs
from grpoctl.engines.proof import FORWARD_LIMIT
from grpoctl.engines.torch.model import load_policy, pick_device
from grpoctl.errors import InputRefused, UsageError
from grpoctl.extras import require
from grpoctl.inputs.policies import weight_files
from grpoctl.processes.memory import memory_errors
from grpoctl.processes.ranks import Ranks


@dataclass(slots=True, kw_only=True)
class MegatronPolicy:
    """A model with float32 weights, in the shape that `unit_logprobs` asks for.

    Args:
        module: this rank's part of Megatron's GPTModel
        bridge: converts its tensors
        shapes: of the Hugging Face tensors, whole
        vocab_size: real tokens; rows of the embeddings beyond are padding
        padding_id: the config's padding token, -1 without one
        tensor_parallel_size: ranks that share a copy of the model
        group: these ranks
        autocast: bfloat16 to run the forward in it, None for float32
        runner: the forward
    """

    module: Any
    bridge: WeightBridge
    shapes: dict[str, tuple[int, ...]]
    vocab_size: int
    device: torch.device
    padding_id: int
    tensor_parallel_size: int
    group: Any
    autocast: torch.dtype | None = None
    runner: Any = None
    shares_prompts: bool = True
    max_shared_tokens: int | None = None
    adapters: None = None

    @property
    def forward(self) -> Any:
        """The forward around Megatron's layers."""
        return self.runner

    def names(self) -> dict[str, list[str]]:
        """Return the Hugging Face tensors of every parameter."""
        return {name: self.bridge.names(name) for name, _ in self.module.named_parameters()}


class MegatronForward(torch.nn.Module):
    """Log-probabilities of packed rows from Megatron's embedding, layers and head."""

    def __init__(self, policy: MegatronPolicy) -> None:
        super().__init__()
        self.module = policy.module
        self._policy = policy

    def forward(self, packed: Packed, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and entropies, at least LEAST_POSITIONS of them; the spare ones repeat the first."""
        policy, model = self._policy, self.module
        with torch.autocast(policy.device.type, dtype=policy.autocast, enabled=policy.autocast is not None):
            hidden = model.decoder(
                hidden_states=self._embedded(packed),
                attention_mask=_hidden_places(packed),
                rotary_pos_emb=self._angles(packed.position_ids),
            )
        spare = max(0, LEAST_POSITIONS - packed.targets.shape[0])
        sources = torch.cat([packed.sources, packed.sources[:1].expand(spare)])
        targets = torch.cat([packed.targets, packed.targets[:1].expand(spare)])
        return vocab_parallel_logprobs(
            hidden.transpose(0, 1).reshape(-1, hidden.shape[-1])[sources],
            _head(model),
            targets,
            temperature=temperature,
            vocab_size=policy.vocab_size,
            group=policy.group,
            with_entropy=with_entropy,
        )

    def _embedded(self, packed: Packed) -> Tensor:
        """Return (T, B, H) embeddings; as in transformers, a lookup of the padding token passes no gradient on."""
        embedded = self.module.embedding(input_ids=packed.input_ids, position_ids=packed.position_ids)
        padding = (packed.input_ids == self._policy.padding_id).T[:, :, None]
        return torch.where(padding, embedded.detach(), embedded)

    def _angles(self, position_ids: Tensor) -> Tensor:
        """Return (T, B, 1, D) rotary angles of our own positions, which restart after a shared prompt."""
        frequencies = self.module.rotary_pos_emb.inv_freq.to(position_ids.device)
        angles = position_ids.T[:, :, None].to(frequencies.dtype) * frequencies
        return torch.cat((angles, angles), dim=-1)[:, :, None, :]


def _hidden_places(packed: Packed) -> Tensor:
    """Return (B or 1, 1, T, T) bool, true where a query may not look: Megatron marks the opposite of what we do."""
    if packed.mask is not None:
        return ~packed.mask
    width = packed.input_ids.shape[1]
    return torch.ones(1, 1, width, width, dtype=torch.bool, device=packed.input_ids.device).triu(1)


def _head(model: Any) -> Tensor:
    tied = model.share_embeddings_and_output_weights
    return model.embedding.word_embeddings.weight if tied else model.output_layer.weight


def load_megatron(
    folder: Path, *, ref: str, vocab_size: int, device: str, dtype: str, tensor_parallel_size: int, ranks: Ranks
) -> MegatronPolicy:
    """Load this rank's share of a policy folder and check that Megatron computes what transformers does.

    Args:
        folder: local Hugging Face folder
        ref: its name in messages
        vocab_size: of its config
        device: `auto`, `cpu` or `cuda`
        dtype: of the forward, `float32` or `bfloat16`
        tensor_parallel_size: ranks that share a copy of the model
        ranks: all processes, connected

    Raises:
        InputRefused: an architecture that Megatron's plain layers don't compute, or tensors that don't fit it.
        UsageError: the model can't be cut into that many parts.
    """
    require("megatron")
    from transformers import AutoConfig

    warnings.filterwarnings("ignore", module=r"megatron|mbridge")  # of CUDA packages that plain layers don't need
    place = pick_device(device)
    if dtype == "bfloat16" and place.type == "cpu":
        raise UsageError("engine megatron runs bfloat16 on a GPU only: Megatron's backward has no autocast on a CPU")
    config = cast("Any", AutoConfig).from_pretrained(folder, local_files_only=True)
    _check_divisible(config, tensor_parallel_size, ranks, ref)
    group = _parallel_group(tensor_parallel_size)
    with ranks.agreed(), memory_errors("loading the model", "raise runtime.megatron.tensor_parallel_size"):
        bridge = Mbridge(
            config, ref=ref, tensor_parallel_size=tensor_parallel_size
        )  # a failure leaves no rank in the check
        policy = MegatronPolicy(
            module=bridge.build(),
            bridge=bridge,
            shapes={},
            vocab_size=vocab_size,
            device=place,
            padding_id=-1 if config.pad_token_id is None else config.pad_token_id,
            tensor_parallel_size=tensor_parallel_size,
            group=group,
        )
        policy.module.to(place)
        _fill(policy, folder, ref)
    policy.runner = MegatronForward(policy)
    _check(policy, folder, ref, ranks)
    policy.autocast = torch.bfloat16 if dtype == "bfloat16" else None
    return policy


def _check_divisible(config: Any, size: int, ranks: Ranks, ref: str) -> None:
    numbers = {
        "processes": ranks.world_size,
        "attention heads": config.num_attention_heads,
        "key-value heads": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "feed-forward width": config.intermediate_size,
    }
    odd = [f"{number} {name}" for name, number in numbers.items() if number % size]
    if odd:
        raise UsageError(
            f"runtime.megatron.tensor_parallel_size {size}: {ref} has {', '.join(odd)}, which {size} doesn't divide"
        )


def _parallel_group(tensor_parallel_size: int) -> Any:
    """Return the ranks that share a copy of the model; Megatron's groups are made once in a process."""
    from megatron.core import parallel_state, tensor_parallel

    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]  Megatron asks it where to put buffers
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    return parallel_state.get_tensor_model_parallel_group()


@torch.no_grad()
def _fill(policy: MegatronPolicy, folder: Path, ref: str) -> None:
    """Put this rank's share of every tensor in its place; each is read by itself."""
    files: dict[str, Path] = {}
    for path in weight_files(folder):
        with cast("Any", safe_open(str(path), framework="pt")) as file:
            files |= dict.fromkeys(file.keys(), path)
    needed = {name for names in policy.names().values() for name in names}
    spare = set(files) - needed
    if policy.module.share_embeddings_and_output_weights:
        spare.discard("lm_head.weight")
    if needed - set(files) or spare:
        raise InputRefused(
            f"{ref}: tensors don't fit Megatron's model of this type: missing {sorted(needed - set(files))[:3]}, without "
            f"a place {sorted(spare)[:3]}; use engine torch"
        )

    def fetch(name: str) -> Tensor:
        with cast("Any", safe_open(str(files[name]), framework="pt")) as file:
            return file.get_tensor(name)

    def noted(name: str) -> Tensor:
        tensor = fetch(name)
        policy.shapes[name] = tuple(tensor.shape)
        return tensor

    for name, parameter in policy.module.named_parameters():
        parameter.copy_(scattered(policy.bridge, name, like=parameter, fetch=noted))


@torch.no_grad()
def _check(policy: MegatronPolicy, folder: Path, ref: str, ranks: Ranks) -> None:
    """Compare a shared prompt's two completions with transformers' answer, which the first rank computes.

    Raises:
        InputRefused: they differ.
    """
    ids = [
        np.asarray([(7 * i * i + 3 * i + part) % policy.vocab_size for i in range(8)], np.int32) for part in range(3)
    ]
    unit = Unit(prompt_ids=ids[0], completions=(ids[1], ids[2]), rows=(0, 1))
    found, _ = unit_logprobs(policy, [unit], temperature=1.0)
    with ranks.agreed():
        if not ranks.is_first:
            return
        plain = load_policy(folder, ref=ref, vocab_size=policy.vocab_size, device="cpu", dtype="float32")
        expected, _ = unit_logprobs(plain, [unit], temperature=1.0)
        gap = float((found.cpu() - expected).abs().max())
        if not gap <= FORWARD_LIMIT:
            raise InputRefused(
                f"{ref}: Megatron's log-probabilities differ by {gap:.3g} nats from transformers', limit "
                f"{FORWARD_LIMIT}; use engine torch"
            )
