"""Damaging files on purpose: bytes as a disk would, rows and manifests as other software would."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from command_line import manifest, part

from grpoctl.inputs.policies import BUILTIN

TINY = BUILTIN / "tiny"


def flip_bit(path: Path, place: int | None = None) -> None:
    """Flip one bit, by default in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    replace(path, bytes(data))


def replace(path: Path, data: bytes) -> None:
    """Put other bytes at a path without writing through a hard link."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    replace(path, json.dumps(content).encode())


def rewrite_rows(artifact: Path | str, change: Callable[[list[dict[str, Any]]], None], *, index: int = 0) -> None:
    """Change a shard's rows and write it with the right size and digest, as a writer with a bug would."""
    place = part(artifact, index)
    table = pq.read_table(place)
    found = table.to_pylist()
    change(found)
    pq.write_table(pa.Table.from_pylist(found, schema=table.schema), place)
    data = place.read_bytes()

    def describe(content: dict[str, Any]) -> None:
        content["shards"][index] |= {
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "rows": len(found),
        }

    edit_json(Path(artifact) / "_MANIFEST.json", describe)


def policy_copy(
    target: Path,
    *,
    source: Path = TINY,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    template: str | None = "as it is",
) -> Path:
    """Copy a policy with other settings; a value of None removes the key, template None removes the chat template."""
    shutil.copytree(source, target)
    changes = {"config.json": config, "generation_config.json": generation, "tokenizer_config.json": tokenizer}
    for name, change in changes.items():
        if change is not None:
            edit_json(target / name, lambda content, change=change: _merge(content, change))
    if template is None:
        (target / "chat_template.jinja").unlink()
    elif template != "as it is":
        replace(target / "chat_template.jinja", template.encode())
    return target


def _merge(content: dict[str, Any], change: dict[str, Any]) -> None:
    for key, value in change.items():
        content.pop(key, None)
        if value is not None:
            content[key] = value


def scaled_weights(target: Path, factor: float) -> Path:
    """Copy the tiny policy with other weights."""
    from safetensors.torch import load_file, save_file

    policy_copy(target)
    tensors = {name: tensor * factor for name, tensor in load_file(target / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def without_manifest(artifact: Path | str) -> dict[str, Any]:
    """Take an artifact's manifest away, as a kill just before the commit leaves it; return the manifest."""
    content = manifest(artifact)
    (Path(artifact) / "_MANIFEST.json").unlink()
    return content
