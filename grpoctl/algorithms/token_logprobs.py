"""Log-probabilities of given tokens from hidden states, without ever holding a (N, V) matrix of logits.

The head runs over chunks of positions; the backward pass computes each chunk's logits again. Memory is chunk × V.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_TOKENS: Final = 1024


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(hidden · headᵀ / temperature) at `ids`, in float32 (float64 for float64 inputs).

    Args:
        hidden: (N, H) last hidden states at the positions that predict `ids`, flattened over the batch
        head: (V, H) output embedding; rows past `vocab_size` are padding
        ids: (N,) the tokens whose log-probability is wanted
        temperature: the sampler's temperature, > 0
        vocab_size: number of real tokens; None means all V rows are real
        with_entropy: also return each position's entropy
        chunk_tokens: positions per chunk; changes memory, not the result

    Returns:
        (N,) log-probabilities, differentiable (once) in `hidden` and `head`; and (N,) entropies in nats without
        gradient, or None. An autocast around the call changes nothing: the logits are never rounded to half precision.

    Raises:
        ValueError: temperature not positive, or an id outside the vocabulary.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    size = head.shape[0] if vocab_size is None else vocab_size
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= size):
        raise ValueError(f"token ids must be within 0 … {size - 1}, found {int(ids.min())} … {int(ids.max())}")
    chunk = _even_chunk(ids.shape[0], chunk_tokens)
    with _full_precision(hidden):
        logprobs, entropy = cast("Any", _ChunkedLogSoftmax).apply(
            hidden, head, ids, temperature, size, with_entropy, chunk
        )
    return logprobs, entropy if with_entropy else None


def _even_chunk(num_positions: int, most: int) -> int:
    """Return the size of the fewest, equal chunks: a last chunk of one to three rows would meet another matrix kernel."""
    return max(1, -(-num_positions // max(1, -(-num_positions // most))))


class _ChunkedLogSoftmax(torch.autograd.Function):
    """log softmax at the given ids, chunk by chunk, with the softmax recomputed in backward."""

    @staticmethod
    def forward(  # noqa: PLR0917  Function.apply passes arguments by position only
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        ids: Tensor,
        temperature: float,
        vocab_size: int,
        with_entropy: bool,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        weight = head[:vocab_size].to(dtype)
        normalisers = torch.empty(ids.shape, dtype=dtype, device=hidden.device)
        logprobs = torch.empty_like(normalisers)
        entropy = torch.empty_like(normalisers) if with_entropy else normalisers.new_empty(0)
        for start in range(0, ids.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = _logits(hidden[part], weight, temperature)
            normalisers[part] = torch.logsumexp(logits, dim=-1)
            logprobs[part] = logits.gather(-1, ids[part, None]).squeeze(-1) - normalisers[part]
            if with_entropy:
                logits -= normalisers[part, None]
                entropy[part] = -(logits.exp() * logits).sum(dim=-1)
        ctx.save_for_backward(hidden, head, ids, normalisers)
        ctx.settings = (temperature, vocab_size, chunk_tokens, dtype)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable  # the saved normalisers carry no graph, so a second derivative would be wrong
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator hides the parameter's name
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, head, ids, normalisers = ctx.saved_tensors
        temperature, vocab_size, chunk_tokens, dtype = ctx.settings
        weight = head[:vocab_size].to(dtype)
        upstream = gradients[0].to(dtype)
        grad_hidden = torch.empty(hidden.shape, dtype=dtype, device=hidden.device) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros(head.shape, dtype=dtype, device=head.device) if ctx.needs_input_grad[1] else None
        with _full_precision(hidden):
            for start in range(0, ids.shape[0], chunk_tokens):
                part = slice(start, start + chunk_tokens)
                logits = _logits(hidden[part], weight, temperature)
                grad_logits = torch.exp(logits - normalisers[part, None]).neg_()
                grad_logits.scatter_add_(-1, ids[part, None], torch.ones_like(ids[part, None], dtype=dtype))
                grad_logits *= (upstream[part] / temperature)[:, None]
                if grad_hidden is not None:
                    grad_hidden[part] = grad_logits @ weight
                if grad_head is not None:
                    grad_head[:vocab_size].addmm_(grad_logits.T, hidden[part].to(dtype))
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_head is None else grad_head.to(head.dtype),
            *(None,) * 5,
        )


def _full_precision(like: Tensor) -> torch.autocast:
    """Switch autocast off: it would run the head's product in half precision whatever its operands are."""
    return torch.autocast(device_type=like.device.type, enabled=False)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return (hidden.to(weight.dtype) @ weight.T) / temperature
