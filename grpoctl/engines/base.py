"""What stages ask of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from grpoctl.settings.fields import UpdateConfig

if TYPE_CHECKING:
    import torch

TokenIds = npt.NDArray[np.int32]
FloatVector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """The distribution to draw from and where to stop."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One completion to draw."""

    prompt_ids: TokenIds
    seed: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One drawn completion.

    Args:
        completion_ids: (T,) sampled ids, the end token included when it was sampled
        logprobs: (T,) log-probability of each id under the distribution drawn from, nats
        finish_reason: stop, length, abort or error
        error: why it isn't usable, or None
    """

    completion_ids: TokenIds
    logprobs: FloatVector
    finish_reason: str
    error: str | None = None


class Sampler(Protocol):
    """Draws completions."""

    name: str
    reproducible: bool

    def sample(self, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Sample]:
        """Draw one completion for each request, in the requests' order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """How a vLLM engine is made.

    Args:
        dtype: of weights and activations, `float32` or `bfloat16`
        tensor_parallel_size: GPUs that share one copy of the model
        memory_fraction: of a GPU's memory, for weights and cache together
        cpu_cache_gib: key-value cache on a CPU, GiB
        max_context_tokens: prompt and completion together
        enforce_eager: no compilation and no CUDA graphs: slower, but starts at once
        adapter_rank: of the low-rank adapters that it will be given, 0 for none
        timeout_seconds: how long an engine may go without finishing a completion
    """

    dtype: str
    tensor_parallel_size: int
    memory_fraction: float
    cpu_cache_gib: int
    max_context_tokens: int
    enforce_eager: bool
    adapter_rank: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A prompt and some of its completions: one row of a packed forward.

    Args:
        prompt_ids: (P,) at least one id
        completions: the ids of each completion; an empty one has no positions
        rows: the caller's row number of each completion
    """

    prompt_ids: TokenIds
    completions: tuple[TokenIds, ...]
    rows: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Length of the packed row, tokens."""
        return len(self.prompt_ids) + sum(len(ids) for ids in self.completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and gradient clipping."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip: float | None

    @staticmethod
    def of(update: UpdateConfig) -> OptimizerSettings:
        """Return an update's."""
        return OptimizerSettings(
            beta1=update.beta1,
            beta2=update.beta2,
            eps=update.adam_eps,
            weight_decay=update.weight_decay,
            grad_clip=update.grad_clip,
        )


class Forward(Protocol):
    """A model's forward over packed rows: log-probabilities of the targets, and entropies on request."""

    def __call__(self, packed: Any, temperature: float, with_entropy: bool) -> tuple[Any, Any]:
        """Return (N,) log-probabilities and (N,) entropies or None; what is beyond the targets is padding."""
        ...


class PolicyModel(Protocol):
    """A loaded policy, whichever framework computes it."""

    @property
    def module(self) -> Any:
        """The framework's own model, or this process's share of it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Real tokens; rows of the embeddings beyond are padding."""
        ...

    @property
    def device(self) -> torch.device:
        """What its forward runs on."""
        ...

    @property
    def shares_prompts(self) -> bool:
        """Whether several completions may follow one prompt in a row."""
        ...

    @property
    def max_shared_tokens(self) -> int | None:
        """Longest row for which that holds, None without limit."""
        ...

    @property
    def autocast(self) -> torch.dtype | None:
        """bfloat16 where the forward runs in it, None for float32."""
        ...

    @property
    def adapters(self) -> Any:
        """The low-rank adapters beside its frozen weights, None where all weights train."""
        ...

    @property
    def forward(self) -> Forward:
        """The forward, with whatever the engine has put around it."""
        ...


class Trainer(Protocol):
    """A policy being trained: backward, step, save, load; nothing of losses or batches.

    On several ranks all of them call the same methods in the same order; the first one writes files.
    """

    @property
    def policy(self) -> PolicyModel:
        """The model, whose forward `unit_logprobs` runs with gradient."""
        ...

    def backward(self, loss: Any, *, last: bool) -> None:
        """Add the gradient of a scalar loss, summed over all ranks; `last` marks the step's last micro-batch."""
        ...

    def step(self, lr: float) -> float | None:
        """Clip, step and clear; return the norm before clipping, or None (and no step) where it isn't finite."""
        ...

    def discard(self) -> None:
        """Drop the gradient collected so far."""
        ...

    def save_state(self, folder: Path) -> None:
        """Write the optimizer's state, in the one format that every engine on any number of ranks reads."""
        ...

    def load_state(self, folder: Path) -> None:
        """Read the optimizer's state."""
        ...

    def export(self, folder: Path, *, adapter: Path | None = None) -> None:
        """Write the weights as safetensors, under the names of the policy that was loaded, adapters merged into them.

        Args:
            folder: for the weights
            adapter: where adapters go by themselves, if there are any
        """
        ...


def padded_width(num_tokens: int) -> int:
    """Return the width that a row of this length is padded to: whole blocks of 64, coarser (an eighth) for long rows.

    A row's width depends on its own length alone and only rows of one width run together. Reductions over the width then
    never change order, so a row's result came out bit-equal whatever its neighbours (CPU, float32), and the
    ratio of an on-policy first step is exactly 1.
    """
    quantum = max(64, (1 << max(0, num_tokens.bit_length() - 1)) // 8)
    return -(-num_tokens // quantum) * quantum


def micro_batches_by_tokens(units: Sequence[Unit], budget: int) -> Iterator[list[Unit]]:
    """Yield micro-batches of one width whose padded size (rows × width) stays within the budget.

    Units are taken longest first, ties by position; one wider than the budget runs alone.
    """
    order = sorted(range(len(units)), key=lambda i: (-units[i].num_tokens, i))
    batch: list[Unit] = []
    width = 0
    for i in order:
        own = padded_width(units[i].num_tokens)
        if batch and (own != width or width * (len(batch) + 1) > budget):
            yield batch
            batch = []
        width = own
        batch.append(units[i])
    if batch:
        yield batch
