"""The output embedding spread over ranks against the whole one in float64."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
import vocabulary_ranks


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_spread_vocabulary_gives_the_whole_ones_logprobs_entropies_and_gradients(
    tmp_path: Path, world_size: int
) -> None:
    mp.spawn(vocabulary_ranks.run_rank, args=(world_size, str(tmp_path)), nprocs=world_size, join=True)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world_size)]
    hidden, head, ids, upstream = vocabulary_ranks.inputs()
    hidden, head = hidden.double().requires_grad_(), head.double().requires_grad_()
    logits = hidden @ head[: vocabulary_ranks.ROWS].T / vocabulary_ranks.TEMPERATURE
    everything = torch.log_softmax(logits, dim=-1)
    logprobs = everything.gather(-1, ids[:, None])[:, 0]
    (logprobs * upstream).sum().backward()
    for part in found:
        torch.testing.assert_close(part["logprobs"].double(), logprobs.detach(), rtol=0, atol=2e-5)
        torch.testing.assert_close(
            part["entropy"].double(), -(everything.exp() * everything).sum(dim=-1).detach(), rtol=0, atol=2e-5
        )
        torch.testing.assert_close(part["hidden"].double(), hidden.grad, rtol=1e-5, atol=1e-5)
        assert torch.equal(part["logprobs"], found[0]["logprobs"])
    spread = torch.cat([part["head"] for part in found])
    torch.testing.assert_close(spread.double(), head.grad, rtol=1e-5, atol=1e-4)
