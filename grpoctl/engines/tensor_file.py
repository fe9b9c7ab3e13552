"""Write a safetensors file one tensor at a time: only the one being written is in memory.

The bytes are those that safetensors itself writes for float32 tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterator[tuple[str, Tensor]],
    *,
    metadata: Mapping[str, str],
) -> None:
    """Write float32 tensors.

    Args:
        path: the file
        shapes: of every tensor, by name
        tensors: (name, tensor) pairs sorted by name, each fetched when its turn comes
        metadata: text for the header
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for name in sorted(shapes):
        size = 4 * torch.Size(shapes[name]).numel()
        header[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, (given, tensor) in zip(sorted(shapes), tensors, strict=True):
            assert given == name and tuple(tensor.shape) == tuple(shapes[name]), f"{given} in the place of {name}"
            file.write(tensor.detach().to("cpu", torch.float32).flatten().numpy().data)
