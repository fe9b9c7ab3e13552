"""A user's data files as one table: Parquet, JSON lines or arrays, CSV, Arrow; compressed or not; a file, folder or glob.

What a file says arrives as it says it, or is refused by file and line. A folder that holds several splits is never read as
one, and columns that stand in the folders' names aren't dropped.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, Final, cast

import pyarrow as pa
import pyarrow.parquet

from grpoctl.artifacts.artifact import read_manifest, refuse_our_files
from grpoctl.artifacts.canonical import sha256_json
from grpoctl.artifacts.storage import Location, locate, read_bytes, sha256_bytes
from grpoctl.errors import InputRefused
from grpoctl.inputs.json_columns import NoColumn, json_column
from grpoctl.inputs.policies import BUILTIN

pq: Any = pyarrow.parquet  # its stubs type half of every function
arrow: Any = pa
PACKED: Final = {".gz": "gzip", ".zst": "zstd"}
KINDS: Final = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".arrow")
EXPECTED: Final = "Parquet, JSONL, a JSON array (.json), CSV or Arrow, as they are or as .gz or .zst"
BESIDE: Final = frozenset({"dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json"})
"""What `datasets` writes beside its data."""
SPLIT: Final = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval)(?=[-_.]|$)")
PARTITION: Final = re.compile(r"([^/=]+)=([^/]*)/")


def read_rows(path: str, limit: int | None = None, *, split: str | None = None) -> tuple[pa.Table, str]:
    """Return the rows of a file, folder or glob, and the digest of the files' bytes.

    Args:
        path: on any fsspec URL, or `builtin:NAME`
        limit: first rows only
        split: of a folder that holds several

    Raises:
        InputRefused: no such files, another format, damaged or ambiguous content, several splits, or no rows.
    """
    places = files_of(path, split)
    blobs = [read_bytes(place) for place in places]
    digests = [sha256_bytes(blob) for blob in blobs]
    tables = [_table(blob, place) for blob, place in zip(blobs, places, strict=True)]
    try:
        table = pa.concat_tables(tables, promote_options="permissive").slice(0, limit)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputRefused(
            f"{path}: columns of its {len(tables)} files have different types ({error}); expected one schema: name one file"
        ) from error
    if table.num_rows == 0:
        raise InputRefused(f"{path}: no rows; expected at least one")
    return table, digests[0] if len(digests) == 1 else sha256_json(digests)


def files_of(path: str, split: str | None = None) -> list[Location]:
    """Return the data files that a path names, in order.

    Raises:
        InputRefused: none, an artifact of ours, several splits without one being named, or columns in folder names.
    """
    if path.startswith("builtin:"):
        place = locate(str(BUILTIN / f"{path.removeprefix('builtin:')}.parquet"))
        if not place.filesystem.exists(place.path):
            raise InputRefused(f"{path}: no such built-in prompts; known: builtin:addition, builtin:addition_heldout")
        return [place]
    location = locate(path)
    filesystem = location.filesystem
    root = location.path.rstrip("/")
    if filesystem.isdir(location.path):
        artifact = read_manifest(path)
        if artifact is not None:
            told = f"holds {artifact.manifest.table}, expected data (prompts, pairs)"
            raise InputRefused(f"{path}: {told}; name the right folder")
        names = sorted(str(name) for name in filesystem.find(location.path))
        refuse_our_files(path, names)
        found = [name for name in names if _is_data(name)]
    elif any(character in path for character in "*?[") and not filesystem.exists(location.path):
        found = [name for name in sorted(str(name) for name in filesystem.glob(location.path)) if _is_data(name)]
        root = root.partition("*")[0].partition("?")[0].partition("[")[0].rpartition("/")[0]
    else:
        return [location]
    if not found:
        raise InputRefused(f"{path}: no data files there; expected {EXPECTED}")
    chosen = _of_split(path, {name: name.removeprefix(root).lstrip("/") for name in found}, split)
    return [Location(filesystem, name, filesystem.unstrip_protocol(name)) for name in chosen]


def _of_split(path: str, names: dict[str, str], split: str | None) -> list[str]:
    """Return the files of one split; a folder without splits is one."""
    columns = {match[1]: match[2] for inner in names.values() for match in PARTITION.finditer(inner)}
    others = sorted(set(columns) - {"split"})
    if others:
        raise InputRefused(
            f"{path}: is partitioned by {', '.join(others)}, whose values stand in folder names only; write them as "
            "columns, or name one partition's folder"
        )
    by_split: dict[str | None, list[str]] = {}
    for name, inner in names.items():
        by_split.setdefault(_split_of(inner), []).append(name)
    known = sorted(str(name) for name in by_split if name is not None)
    if split is not None and split not in by_split:
        raise InputRefused(
            f"{path}: no split {split!r}, found {', '.join(known) or 'none'}; name one of them or a file"
        )
    if split is None and len(by_split) > 1:
        rest = " and files of none" if None in by_split else ""
        raise InputRefused(
            f"{path}: holds the splits {', '.join(known)}{rest}, which are never read as one; name one split's "
            "folder or file, or of prompts choose with --set prompts.split=…"
        )
    return by_split[split] if split is not None else next(iter(by_split.values()))


def _split_of(inner: str) -> str | None:
    """Return the split that a file's folder, partition or name tells, None where none does."""
    parts = PurePosixPath(inner)
    for part in (*parts.parts[:-1], _stem(parts.name)):
        found = SPLIT.search(part.removeprefix("split=").lower())
        if found:
            return found[1]
    return None


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _is_data(name: str) -> bool:
    base = name.rsplit("/", 1)[-1]
    return _unpacked(base).endswith(KINDS) and base not in BESIDE and not base.startswith((".", "_"))


def _unpacked(name: str) -> str:
    for suffix in PACKED:
        name = name.removesuffix(suffix)
    return name


def _table(blob: bytes, place: Location) -> pa.Table:
    if not blob:
        raise InputRefused(f"{place.url}: 0 bytes; expected {EXPECTED}")
    name = _unpacked(place.path)
    try:
        for suffix, method in PACKED.items():
            if place.path.endswith(suffix):
                blob = arrow.CompressedInputStream(pa.BufferReader(blob), method).read()
        if blob[:4] == b"PAR1":
            _refuse_twins(pq.read_schema(pa.BufferReader(blob)).names, place)
            table: pa.Table = pq.read_table(pa.BufferReader(blob))
        elif name.endswith((".jsonl", ".ndjson", ".json")):
            table = _from_values(list(_json_rows(_text(blob, place), place)), place)
        elif name.endswith(".csv"):
            table = _from_values(list(_csv_rows(_text(blob, place), place)), place)
        elif name.endswith(".arrow"):
            opened = pa.ipc.open_file if blob[:6] == b"ARROW1" else pa.ipc.open_stream
            table = opened(pa.BufferReader(blob)).read_all()
        else:
            raise InputRefused(f"{place.url}: starts with {blob[:4]!r}; expected {EXPECTED}")
        table.validate(full=True)
    except (pa.ArrowInvalid, OSError) as error:
        hint = "; re-encode the file" if "UTF" in str(error) else ""
        raise InputRefused(f"{place.url}: can't be read as a table ({str(error).splitlines()[0]}){hint}") from error
    _refuse_twins(table.column_names, place)
    return _without_dictionaries(table)


def _refuse_twins(names: Sequence[str], place: Location) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputRefused(f"{place.url}: {len(repeated)} columns stand twice: {repeated[:5]}; rename one of each")


def _without_dictionaries(table: pa.Table) -> pa.Table:
    """Return a table whose columns hold their values plainly: another file may have written them so."""
    schema: list[pa.Field[Any]] = list(table.schema)
    for index, field in enumerate(schema):
        if pa.types.is_dictionary(field.type):
            plain: Any = field.type.value_type
            table = table.set_column(index, pa.field(field.name, plain), table.column(index).cast(plain))
    return table


def _text(blob: bytes, place: Location) -> str:
    try:
        return blob.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = blob[: error.start].count(b"\n")
        raise InputRefused(f"{place.url}: row {row} is not UTF-8; re-encode the file") from error


def _json_rows(text: str, place: Location) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON lines, or of one array of objects."""
    if text.lstrip().startswith("["):
        whole = _json(text, f"{place.url}", place)
        for number, value in enumerate(cast("list[Any]", whole) if isinstance(whole, list) else [whole]):
            yield _object(value, f"{place.url}: item {number}")
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{place.url}:{number}"
            yield _object(_json(line, where, place), where)


def _json(text: str, where: str, place: Location) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InputRefused(f"{where}: {twice!r} stands twice in one object; keep one of them")
        return found

    def no_number(word: str) -> Any:
        raise InputRefused(f"{where}: {word} is no number that a column can hold; write it as text or null")

    def finite(word: str) -> float:
        return value if math.isfinite(value := float(word)) else no_number(word)

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=no_number, parse_float=finite)
    except json.JSONDecodeError as error:
        spread = "; one object a line, or .json with an array of objects" if text.lstrip()[:1] == "{" else ""
        shown = f"{where}:{error.colno}" if error.lineno == 1 else f"{place.url}:{error.lineno}:{error.colno}"
        raise InputRefused(f"{shown}: can't be read as JSON ({error.msg}){spread}") from error
    except RecursionError as error:
        raise InputRefused(f"{where}: nested too deeply for JSON; flatten it") from error
    except ValueError as error:  # a number with more digits than Python reads
        raise InputRefused(f"{where}: can't be read as JSON ({error}); write it as text") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputRefused(f"{where}: found {json.dumps(value)[:40]}, expected an object with a field a column")
    return cast("dict[str, Any]", value)


def _csv_rows(text: str, place: Location) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV file with a header; every value is text, as it stands."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, list[str]())
        _refuse_twins(header, place)
        for row in reader:
            if row and len(row) != len(header):
                raise InputRefused(
                    f"{place.url}:{reader.line_num}: {len(row)} values for {len(header)} columns; quote values with commas"
                )
            if row:
                yield dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise InputRefused(f"{place.url}:{reader.line_num}: can't be read as CSV ({error})") from error


def _from_values(rows: Sequence[dict[str, Any]], place: Location) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        columns = [json_column(name, [row.get(name) for row in rows]) for name in names]
    except NoColumn as error:
        row = next((number for number, row in enumerate(rows) if not _is_text(row)), None)
        where = place.url if row is None else f"{place.url}: row {row}"
        raise InputRefused(f"{where}: can't be read as a table ({error}); re-encode the file") from error
    return arrow.table([array for _, array in columns], schema=pa.schema([field for field, _ in columns]))


def _is_text(row: dict[str, Any]) -> bool:
    """Return whether all text of a row has a UTF-8 form; halves of surrogate pairs have none."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
