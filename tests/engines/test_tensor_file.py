"""The streaming writer's file is the one that safetensors writes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpoctl.engines.tensor_file import write_tensors


def test_the_bytes_are_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {"exp_avg.b": torch.randn(3, 5), "exp_avg.a": torch.randn(7), "exp_avg_sq.ä": torch.zeros(0, 2)}
    metadata = {"steps": '{"a": 3, "ä": 1}'}
    save_file(tensors, str(tmp_path / "theirs"), metadata=metadata)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_tensors(tmp_path / "ours", shapes, iter(sorted(tensors.items())), metadata=metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(str(tmp_path / "ours")).items())


def test_a_tensor_of_another_name_or_shape_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="b in the place of a"):
        write_tensors(tmp_path / "x", {"a": (1,)}, iter([("b", torch.zeros(1))]), metadata={})
