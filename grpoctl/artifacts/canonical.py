"""Canonical JSON and digests: the same content always has the same name."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute  # its functions are made at import, unknown to type checkers


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys, no spaces and shortest floats.

    Raises:
        TypeError: a value that has no canonical form (anything but None, bool, int, finite float, str, list, tuple, dict).
    """
    return json.dumps(_canonical(value, "$"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _canonical(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"{where}: {value} has no canonical JSON form")
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, list | tuple):
        return [_canonical(item, f"{where}[{i}]") for i, item in enumerate(cast("Sequence[Any]", value))]
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        for key in entries:
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is not a string")
        return {key: _canonical(item, f"{where}.{key}") for key, item in entries.items()}
    raise TypeError(f"{where}: {type(value).__name__} has no canonical JSON form")


def sha256_json(value: Any) -> str:
    """Return the sha256 of a value's canonical JSON, hexadecimal."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def table_digest(table: pa.Table) -> str:
    """Return a digest of a table's logical content: names, types, values and nulls, not chunks, pages or compression."""
    digest = hashlib.sha256(str(table.num_rows).encode())
    for name in table.column_names:
        digest.update(f"|{name}:".encode())
        _update(digest, table.column(name).combine_chunks())
    return digest.hexdigest()


def _update(digest: Any, array: pa.Array[Any] | pa.ChunkedArray[Any]) -> None:
    if isinstance(array, pa.ChunkedArray):
        array = cast(
            "pa.Array[Any]",
            pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], type=array.type),
        )
    digest.update(f"{array.type}:{len(array)}:".encode())
    digest.update(np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes())
    kind = array.type
    if pa.types.is_null(kind):
        return
    if pa.types.is_struct(kind):
        for i, child in enumerate(cast("Any", array).flatten()):
            digest.update(f"{cast('Any', kind).field(i).name}=".encode())
            _update(digest, child)
        return
    values = array.drop_null()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        digest.update(pc.list_value_length(values).to_numpy(zero_copy_only=False).astype(np.int64).tobytes())
        _update(digest, cast("Any", values).flatten())
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        digest.update(pc.binary_length(values).to_numpy(zero_copy_only=False).astype(np.int64).tobytes())
        digest.update(b"".join(memoryview(item.as_buffer()) for item in values))
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        digest.update(np.ascontiguousarray(values.to_numpy(zero_copy_only=False)).tobytes())
    else:
        digest.update(canonical_json([str(item) for item in values.to_pylist()]).encode())
