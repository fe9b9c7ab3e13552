"""A user's prompt file as rows with an identity: any data file, text or messages, other columns carried along."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa

from grpoctl.errors import InputRefused
from grpoctl.inputs.json_columns import column_values
from grpoctl.inputs.rows import read_rows
from grpoctl.settings.fields import PromptsConfig

ROW_FIELD = "_row"
"""Field of `source` with the row number in the prompt file; never handed to rewards."""
Messages = list[dict[str, Any]]


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
    table, digest = read_rows(config.path, config.limit, split=config.split)
    origin, name = _layout(table, config)
    ids = _ids(table, config, digest)
    prompts, kind = _prompts(_values(table, name, config.path), ids, config, name)
    notes = [f"{origin} layout, {table.num_rows} prompts as {kind} from column {name}"]
    duplicates = len(ids) - len({json.dumps(prompt) for prompt in prompts})
    if duplicates:
        notes.append(f"{duplicates} prompts repeat an earlier text; each keeps a group of its own")
    return PromptSet(
        digest=digest, ids=ids, prompts=prompts, source=_source(table, name), format=kind, notes=tuple(notes)
    )


def _layout(table: pa.Table, config: PromptsConfig) -> tuple[str, str]:
    """Return whose layout the file has and the prompt column's name."""
    names = set(table.column_names)
    found = config.format
    if found == "auto":
        verl, openrlhf = {"data_source", "reward_model"} <= names, "prompt" not in names and {"input", "label"} <= names
        found = "verl" if verl else "openrlhf" if openrlhf else "trl"
    return found, config.column or ("input" if found == "openrlhf" else "prompt")


def _values(table: pa.Table, name: str, path: str) -> list[Any]:
    """Return a column's values, or those of a field within it."""
    head, *rest = name.split(".")
    if head not in table.column_names:
        close = difflib.get_close_matches(head, table.column_names, n=1, cutoff=0.4)
        hint = (
            f"; did you mean --prompt-column {close[0]}?"
            if close
            else "; name it with --prompt-column or choose a --format"
        )
        raise InputRefused(f"{path}: no column {head!r}, found {', '.join(table.column_names)}{hint}")
    values = column_values(table, head)
    for part in rest:
        objects = [cast("dict[str, Any]", value) if isinstance(value, dict) else {} for value in values]
        if not any(part in value for value in objects):
            raise InputRefused(f"{path}: column {head!r} has no field {part!r} (its type is {table.column(head).type})")
        values = [value.get(part) for value in objects]
    return values


def _ids(table: pa.Table, config: PromptsConfig, digest: str) -> list[str]:
    if config.id_column is None:
        return [f"{digest[:8]}:{row}" for row in range(table.num_rows)]
    values = _values(table, config.id_column, config.path)
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


def _prompts(values: list[Any], ids: Sequence[str], config: PromptsConfig, name: str) -> tuple[Any, str]:
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
    turns = cast("list[Any]", value)
    return turns if isinstance(value, list) and all(isinstance(t, dict) and "role" in t for t in turns) else None


def _check_messages(value: Any, where: str, allow_empty: bool) -> None:
    turns = cast("list[Any]", value)
    if not isinstance(value, list) or not value:
        found = "an empty list" if turns == [] else type(turns).__name__
        raise InputRefused(f"{where}: found {found}, expected text or a message list")
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise InputRefused(
                f"{where}[{number}]: found {type(turn).__name__}, expected a message with role and content"
            )
        fields = cast("dict[str, Any]", turn)
        for key in ("role", "content"):
            if not isinstance(fields.get(key), str):
                raise InputRefused(f"{where}[{number}].{key}: found {fields.get(key)!r}, expected text")
            if any("\ud800" <= character <= "\udfff" for character in fields[key]):
                raise InputRefused(f"{where}[{number}].{key}: half a surrogate pair is no text; re-encode the file")
    if turns[-1]["role"] == "assistant":
        raise InputRefused(f"{where}[{len(turns) - 1}].role: the last turn is the assistant's, expected the user's")
    if not allow_empty and not any(turn["content"].strip() for turn in turns):
        raise InputRefused(f"{where}: all turns are empty; remove the row or set prompts.allow_empty")


def _source(table: pa.Table, column: str) -> pa.StructArray:
    schema: list[pa.Field[Any]] = list(table.schema)
    fields = [field for field in schema if field.name != column]
    arrays: list[Any] = [pa.array(range(table.num_rows), pa.int64())]
    for field in fields:
        arrays.append(_one_array(table.column(field.name)))
    struct: Any = pa.StructArray
    return struct.from_arrays(arrays, fields=[pa.field(ROW_FIELD, pa.int64()), *fields])


def _one_array(column: Any) -> Any:
    """Return a column in one piece."""
    array: Any = column.combine_chunks()
    chunked: Any = pa.ChunkedArray
    return pa.concat_arrays(array.chunks) if isinstance(array, chunked) else array


def column_names(source: pa.StructType, prefix: str = "") -> list[str]:
    """Return the names of a source struct's fields without the row number, fields of structs with dots."""
    names: list[str] = []
    for field in (cast("Any", source).field(i) for i in range(source.num_fields)):
        if prefix or field.name != ROW_FIELD:
            names.append(f"{prefix}{field.name}")
            if pa.types.is_struct(field.type):
                names += column_names(field.type, f"{prefix}{field.name}.")
    return names
