"""Log-probabilities from an output embedding whose rows are spread over tensor-parallel ranks.

Each rank sees the distribution over its own part of the vocabulary, p(v | part r). With L_r the log of its normaliser and
L = log Σ_r exp(L_r), the part's weight is w_r = exp(L_r − L), and

    log p(v) = z_v − L        H(p) = L − Σ_r w_r · (L_r − H(p | part r))

so the chunked head of one rank serves all of them, and only numbers of size (N,) are exchanged.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from grpoctl.algorithms.token_logprobs import token_logprobs

distributed: Any = torch.distributed  # its collectives are half typed


def vocab_parallel_logprobs(
    hidden: Tensor,
    head: Tensor,
    ids: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: Any,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return what `token_logprobs` returns for the whole output embedding; a collective over `group`.

    Args:
        hidden: (N, H) last hidden states, the same on all ranks of the group
        head: (V / size, H) this rank's rows
        ids: (N,) the tokens whose log-probability is wanted
        temperature: the sampler's temperature, > 0
        vocab_size: number of real tokens; rows beyond are padding
        group: the tensor-parallel ranks, in the order of their rows
        with_entropy: also return each position's entropy

    Returns:
        (N,) log-probabilities with gradient, and (N,) entropies in nats without, or None; the same on all ranks.
    """
    if torch.distributed.get_world_size(group) == 1:
        return token_logprobs(
            hidden, head, ids, temperature=temperature, vocab_size=vocab_size, with_entropy=with_entropy
        )
    first = torch.distributed.get_rank(group) * head.shape[0]
    size = min(vocab_size - first, head.shape[0])
    hidden = _shared(hidden, group)
    own = (ids >= first) & (ids < first + size)
    places = torch.where(own, ids - first, 0)
    part, part_entropy = token_logprobs(
        hidden, head, places, temperature=temperature, vocab_size=size, with_entropy=with_entropy
    )
    with torch.autocast(device_type=hidden.device.type, enabled=False):
        scores = (hidden.float() * head[places].float()).sum(dim=-1) / temperature
        own_normaliser = scores - part
        largest = own_normaliser.detach().clone()
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=group)
        total = _summed((own_normaliser - largest).exp(), group)
        normaliser = largest + total.log()
        score = _summed(torch.where(own, scores, 0.0), group)
        if part_entropy is None:
            return score - normaliser, None
        with torch.no_grad():
            weight = (own_normaliser - normaliser).exp()
            mean_score = weight * (own_normaliser - part_entropy)
            distributed.all_reduce(mean_score, group=group)
            entropy = normaliser.detach() - mean_score
    return score - normaliser, entropy


def _shared(tensor: Tensor, group: Any) -> Tensor:
    """Return a tensor that all ranks have; its gradient is the sum of theirs."""
    return cast("Any", _Shared).apply(tensor, group)


def _summed(tensor: Tensor, group: Any) -> Tensor:
    """Return the sum over ranks; its gradient is the same on all of them and belongs to each summand.

    Megatron's own function sums in place, which would spoil what autograd keeps of the summand.
    """
    return cast("Any", _Summed).apply(tensor, group)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        distributed.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
