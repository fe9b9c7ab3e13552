"""Log-probabilities, entropies and gradients from an output embedding spread over the ranks of a gloo group."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from grpoctl.engines.megatron.head import vocab_parallel_logprobs

ROWS, PADDING, WIDTH, POSITIONS, TEMPERATURE = 27, 3, 8, 40, 0.7


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, the whole embedding (its last rows are padding), ids, and upstream gradients."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(POSITIONS, WIDTH, generator=generator)
    head = torch.randn(ROWS + PADDING, WIDTH, generator=generator)
    head[ROWS:] = 50.0  # would win every softmax if it counted
    return hidden, head, torch.randint(0, ROWS, (POSITIONS,), generator=generator), torch.linspace(-1, 1, POSITIONS)


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """Run one rank and save what it found (the entry point of the spawned processes)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    hidden, head, ids, upstream = inputs()
    share = head.chunk(world_size)[rank].clone().requires_grad_()
    hidden.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(
        hidden, share, ids, temperature=TEMPERATURE, vocab_size=ROWS, group=dist.group.WORLD, with_entropy=True
    )
    (logprobs * upstream).sum().backward()
    found = {"logprobs": logprobs.detach(), "entropy": entropy, "hidden": hidden.grad, "head": share.grad}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
