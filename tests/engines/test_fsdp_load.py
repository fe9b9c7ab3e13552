"""Loading in shares: the model without weights, and which folders fit it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpoctl.engines.torch.fsdp_load import empty_policy, row_range
from grpoctl.engines.torch.model import load_policy
from grpoctl.inputs.policies import BUILTIN
from grpoctl.processes.ranks import Ranks

TINY = BUILTIN / "tiny"


def test_the_empty_model_has_the_buffers_and_ties_of_the_loaded_one() -> None:
    empty = empty_policy(TINY, vocab_size=320, device="cpu")
    assert empty is not None
    loaded = load_policy(TINY, ref="tiny", vocab_size=320, device="cpu", dtype="float32")
    assert all(parameter.is_meta for parameter in empty.module.parameters())
    ours, theirs = (dict(policy.module.named_parameters()) for policy in (empty, loaded))
    assert {name: p.shape for name, p in ours.items()} == {name: p.shape for name, p in theirs.items()}
    assert empty.head is empty.module.get_input_embeddings().weight
    buffers = dict(loaded.module.named_buffers())
    assert set(dict(empty.module.named_buffers())) == set(buffers)
    for name, buffer in empty.module.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert not empty.module.training


@pytest.mark.parametrize("damage", ["missing", "spare", "shape", "integers"])
def test_a_folder_that_does_not_fit_is_left_to_the_whole_load(tmp_path: Path, damage: str) -> None:
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    tensors = load_file(str(TINY / "model.safetensors"))
    if damage == "missing":
        del tensors["model.norm.weight"]
    elif damage == "spare":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    elif damage == "shape":
        tensors["model.norm.weight"] = torch.ones(5)
    else:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].int()
    save_file(tensors, str(tmp_path / "model.safetensors"))
    assert empty_policy(tmp_path, vocab_size=320, device="cpu") is None


def test_row_ranges_are_those_of_torch_chunk() -> None:
    for num_rows in (1, 2, 3, 5, 8, 96, 97):
        for count in (1, 2, 3, 4):
            ranges = [row_range(num_rows, Ranks(rank=rank, world_size=count)) for rank in range(count)]
            chunks = torch.arange(num_rows).chunk(count)
            expected = [chunk.tolist() for chunk in chunks] + [[]] * (count - len(chunks))
            assert [list(range(*found)) for found in ranges] == expected
