"""A user's prompt file as rows with an identity: any Parquet or JSONL, text or messages, other columns carried along."""

from __future__ import annotations

import difflib
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.json as pj
import pyarrow.parquet as pq

from grpoctl.artifacts.artifact import read_manifest, refuse_our_files
from grpoctl.artifacts.canonical import sha256_json
from grpoctl.artifacts.storage import Location, locate, read_bytes, sha256_bytes
from grpoctl.errors import InputRefused
from grpoctl.inputs.policies import BUILTIN
from grpoctl.settings.fields import PromptsConfig

ROW_FIELD = "_row"
"""Field of `source` with the row number in the prompt file; never handed to rewards."""
Messages = list[dict[str, Any]]
pc: Any = pyarrow.compute  # its functions are made at import, unknown to type checkers


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """All prompts of a file.

    Args:
        digest: of the files' bytes
        ids: unique prompt ids
        prompts: text or message list, all of one kind
        source: struct array of the other columns and the row number
        format: `text` or `messages`
        notes: what was chosen or noticed, for stderr
    """

    digest: str
    ids: list[str]
    prompts: list[str] | list[Messages]
    source: pa.StructArray
    format: str
    notes: tuple[str, ...]


def load_prompts(config: PromptsConfig) -> PromptSet:
    """Read the prompt files that the config names.

    Raises:
        InputRefused: no rows, a missing column, null, empty or malformed prompts, duplicate ids, bytes that aren't UTF-8.
    """
    table, digest = read_rows(config.path, config.limit)
    origin, name = _layout(table, config)
    ids = _ids(table, config, digest)
    prompts, kind = _prompts(_column(table, name, config.path), ids, config, name)
    notes = [f"{origin} layout, {table.num_rows} prompts as {kind} from column {name}"]
    duplicates = len(ids) - len({json.dumps(prompt) for prompt in prompts})
    if duplicates:
        notes.append(f"{duplicates} prompts repeat an earlier text; each keeps a group of its own")
    return PromptSet(
        digest=digest, ids=ids, prompts=prompts, source=_source(table, name), format=kind, notes=tuple(notes)
    )


def read_rows(path: str, limit: int | None = None) -> tuple[pa.Table, str]:
    """Return the rows of a file, folder or glob, and the digest of the files' bytes.

    Raises:
        InputRefused: no such files, not Parquet or JSONL, not UTF-8, or no rows.
    """
    places = _places(path)
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


def _layout(table: pa.Table, config: PromptsConfig) -> tuple[str, str]:
    """Return whose layout the file has and the prompt column's name."""
    names = set(table.column_names)
    found = config.format
    if found == "auto":
        verl, openrlhf = {"data_source", "reward_model"} <= names, "prompt" not in names and {"input", "label"} <= names
        found = "verl" if verl else "openrlhf" if openrlhf else "trl"
    return found, config.column or ("input" if found == "openrlhf" else "prompt")


def _places(path: str) -> list[Location]:
    if path.startswith("builtin:"):
        place = locate(str(BUILTIN / f"{path.removeprefix('builtin:')}.parquet"))
        if not place.filesystem.exists(place.path):
            raise InputRefused(f"{path}: no such built-in prompts; known: builtin:addition, builtin:addition_heldout")
        return [place]
    location = locate(path)
    filesystem = location.filesystem
    if any(character in path for character in "*?["):
        found = sorted(str(name) for name in filesystem.glob(location.path))
    elif filesystem.isdir(location.path):
        artifact = read_manifest(path)
        if artifact is not None:
            raise InputRefused(f"{path}: holds {artifact.manifest.table}, expected prompt files; name the right folder")
        names = sorted(str(name) for name in filesystem.find(location.path))
        refuse_our_files(path, names)
        found = [name for name in names if _is_data(name)]
    else:
        return [location]
    if not found:
        raise InputRefused(f"{path}: no .parquet, .jsonl or .json files there")
    return [Location(filesystem, name, filesystem.unstrip_protocol(name)) for name in found]


def _is_data(name: str) -> bool:
    return name.endswith((".parquet", ".jsonl", ".json"))


def _table(blob: bytes, place: Location) -> pa.Table:
    if not blob:
        raise InputRefused(f"{place.url}: 0 bytes; expected Parquet or JSONL")
    try:
        if blob[:4] == b"PAR1":
            table = pq.read_table(pa.BufferReader(blob))
        elif place.path.endswith((".jsonl", ".json")):
            blob.decode("utf-8")
            table = pj.read_json(io.BytesIO(blob))
        else:
            raise InputRefused(f"{place.url}: starts with {blob[:4]!r}; expected Parquet (PAR1) or a .jsonl file")
        table.validate(full=True)
    except UnicodeDecodeError as error:
        row = blob[: error.start].count(b"\n")
        raise InputRefused(f"{place.url}: row {row} is not UTF-8; re-encode the file") from error
    except (pa.ArrowInvalid, OSError) as error:
        hint = "; re-encode the file" if "UTF" in str(error) else ""
        raise InputRefused(f"{place.url}: can't be read as a table ({str(error).splitlines()[0]}){hint}") from error
    return table


def _column(table: pa.Table, name: str, path: str) -> pa.ChunkedArray:
    head, *rest = name.split(".")
    if head not in table.column_names:
        close = difflib.get_close_matches(head, table.column_names, n=1, cutoff=0.4)
        hint = (
            f"; did you mean --prompt-column {close[0]}?"
            if close
            else "; name it with --prompt-column or choose a --format"
        )
        raise InputRefused(f"{path}: no column {head!r}, found {', '.join(table.column_names)}{hint}")
    column = table.column(head)
    for field in rest:
        if not pa.types.is_struct(column.type) or column.type.get_field_index(field) < 0:
            raise InputRefused(f"{path}: column {head!r} has no field {field!r} (its type is {column.type})")
        column = pc.struct_field(column, field)
    return column


def _ids(table: pa.Table, config: PromptsConfig, digest: str) -> list[str]:
    if config.id_column is None:
        return [f"{digest[:8]}:{row}" for row in range(table.num_rows)]
    values = _column(table, config.id_column, config.path).to_pylist()
    missing = [row for row, value in enumerate(values) if value is None]
    if missing:
        raise InputRefused(f"{config.path}: {config.id_column} is null in rows {missing[:5]}; every prompt needs an id")
    ids = [str(value) for value in values]
    repeated = [name for name, count in Counter(ids).items() if count > 1]
    if repeated:
        raise InputRefused(
            f"{config.path}: {len(repeated)} ids occur more than once in {config.id_column}: {repeated[:5]}; "
            "make them unique or leave prompts.id_column out"
        )
    return ids


def _prompts(column: pa.ChunkedArray, ids: Sequence[str], config: PromptsConfig, name: str) -> tuple[Any, str]:
    values: list[Any] = column.to_pylist()
    missing = [ids[row] for row, value in enumerate(values) if value is None]
    if missing:
        raise InputRefused(
            f"{config.path}: the prompt is null for {len(missing)} ids: {missing[:5]}; fill or remove these rows"
        )
    if all(isinstance(value, str) for value in values):
        parsed = [json_messages(value) for value in values]
        if all(item is not None for item in parsed):
            values = parsed
    if all(isinstance(value, str) for value in values):
        empty = [ids[row] for row, value in enumerate(values) if not value.strip()]
        if empty and not config.allow_empty:
            raise InputRefused(
                f"{config.path}: {len(empty)} empty prompts: {empty[:5]}; remove them or set prompts.allow_empty"
            )
        if config.chat_template == "always":
            return [[{"role": "user", "content": value}] for value in values], "messages"
        return values, "text"
    for prompt_id, value in zip(ids, values, strict=True):
        _check_messages(value, f"{config.path}: {prompt_id}: {name}", config.allow_empty)
    if config.chat_template == "never":
        raise InputRefused(
            f"{config.path}: prompts are messages, which need a template; set prompts.chat_template: auto"
        )
    return [[{k: v for k, v in turn.items() if v is not None} for turn in value] for value in values], "messages"


def json_messages(text: str) -> Messages | None:
    """Return the message list that a text holds as JSON, or None where it is plain text."""
    if not text.lstrip().startswith("[{"):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, list) and all(isinstance(t, dict) and "role" in t for t in value) else None


def _check_messages(value: Any, where: str, allow_empty: bool) -> None:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise InputRefused(f"{where}: found {found}, expected text or a message list")
    for number, turn in enumerate(value):
        if not isinstance(turn, dict):
            raise InputRefused(
                f"{where}[{number}]: found {type(turn).__name__}, expected a message with role and content"
            )
        for key in ("role", "content"):
            if not isinstance(turn.get(key), str):
                raise InputRefused(f"{where}[{number}].{key}: found {turn.get(key)!r}, expected text")
            if any("\ud800" <= character <= "\udfff" for character in turn[key]):
                raise InputRefused(f"{where}[{number}].{key}: half a surrogate pair is no text; re-encode the file")
    if value[-1]["role"] == "assistant":
        raise InputRefused(f"{where}[{len(value) - 1}].role: the last turn is the assistant's, expected the user's")
    if not allow_empty and not any(turn["content"].strip() for turn in value):
        raise InputRefused(f"{where}: all turns are empty; remove the row or set prompts.allow_empty")


def _source(table: pa.Table, column: str) -> pa.StructArray:
    names = [name for name in table.column_names if name != column]
    arrays = [pa.array(range(table.num_rows), pa.int64())]
    arrays += [table.column(name).combine_chunks() for name in names]
    return pa.StructArray.from_arrays(
        [array if not isinstance(array, pa.ChunkedArray) else pa.concat_arrays(array.chunks) for array in arrays],
        names=[ROW_FIELD, *names],
    )


def column_names(source: pa.StructType, prefix: str = "") -> list[str]:
    """Return the names of a source struct's fields without the row number, fields of structs with dots."""
    names = []
    for field in (source.field(i) for i in range(source.num_fields)):
        if prefix or field.name != ROW_FIELD:
            names.append(f"{prefix}{field.name}")
            if pa.types.is_struct(field.type):
                names += column_names(field.type, f"{prefix}{field.name}.")
    return names
