"""One optimizer step's loss and gradient on a rank of a gloo group, for every loss and aggregation."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from strategies import SETTINGS, MiniBatch, denominator, make_mini_batch, numerator
from torch import Tensor

from grpoctl.algorithms.aggregation import AGGREGATIONS
from grpoctl.algorithms.token_logprobs import token_logprobs

LENGTHS = [5, 1, 0, 3, 4, 2, 5]
SHARES = {1: [slice(0, 7)], 2: [slice(0, 2), slice(2, 7)]}
"""Rows of each rank, unequal in number and in tokens; a rank cuts its share into micro-batches of 2 rows."""


def step(rank: int, world_size: int) -> dict[tuple[str, str], Tensor]:
    """Return loss and gradient (flattened) of a small model, summed over the ranks where there are several."""
    batch = make_mini_batch(23, LENGTHS, 5)
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(*batch.mask.shape, 4, generator=generator, dtype=torch.float64)
    head = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 9, batch.mask.shape, generator=generator)
    weight = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        batch = _centred(batch, _logprobs(features, weight, head, ids))
    rows = range(*SHARES[world_size][rank].indices(len(LENGTHS)))
    results: dict[tuple[str, str], Tensor] = {}
    for loss in SETTINGS:
        for aggregation in AGGREGATIONS:
            total = denominator(batch, aggregation)  # of the whole mini-batch, known to every rank before the forward
            leaf = weight.clone().requires_grad_()
            value = torch.zeros((), dtype=torch.float64)
            for start in range(rows.start, rows.stop, 2):
                micro = slice(start, min(start + 2, rows.stop))
                logprobs = _logprobs(features[micro], leaf, head, ids[micro])
                part = numerator(batch.rows(micro), logprobs, loss, aggregation) / total
                part.backward()
                value += part.detach()
            assert leaf.grad is not None
            result = torch.cat([value[None], leaf.grad.flatten()])
            if world_size > 1:
                dist.all_reduce(result, op=dist.ReduceOp.SUM)
            results[loss, aggregation] = result
    return results


def _logprobs(features: Tensor, weight: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    flat, _ = token_logprobs((features @ weight).flatten(0, 1), head, ids.flatten(), temperature=0.8)
    return flat.view(ids.shape)


def _centred(batch: MiniBatch, logprobs: Tensor) -> MiniBatch:
    """Return the batch with old and reference near the model's own log-probabilities, so that some tokens clip."""
    noise = batch.logprobs - batch.old_logprobs
    return MiniBatch(
        logprobs=logprobs,
        old_logprobs=logprobs - noise,
        ref_logprobs=logprobs - 0.5 * noise.flip(0),
        rollout_logprobs=logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
    )


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """Run one rank and, on rank 0, save the result (the entry point of the spawned processes)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    results = step(rank, world_size)
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    dist.destroy_process_group()
