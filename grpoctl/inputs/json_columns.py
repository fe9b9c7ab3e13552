"""JSON values as Arrow columns that give them back equal: text stays text, a number the number that it was.

Nothing is inferred from how a text looks. A column whose values are of one kind becomes a column of that kind; one that
Arrow has no single type for (text beside numbers, 19 beside 7.5, objects of other fields, empty objects) is carried as JSON
text, marked in its field's metadata, and is read back as what it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import pyarrow as pa

JSON_MARK: Final = {b"grpoctl.json": b"1"}
INT64: Final = range(-(2**63), 2**63)
PLAIN: Final = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


class NoColumn(Exception):
    """A value that neither Arrow nor JSON text can carry; says which and why."""


def json_column(name: str, values: Sequence[Any]) -> tuple[pa.Field[Any], pa.Array[Any]]:
    """Return a column of JSON values.

    Raises:
        NoColumn: text that has no UTF-8 form.
    """
    kind = _kind(values)
    if kind is not None:
        try:
            return pa.field(name, kind), pa.array(values, type=kind)
        except (pa.ArrowInvalid, UnicodeEncodeError) as error:
            raise NoColumn(f"column {name!r}: {error}") from error
    texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    try:
        return pa.field(name, pa.string(), metadata=JSON_MARK), pa.array(texts, type=pa.string())
    except UnicodeEncodeError as error:
        raise NoColumn(f"column {name!r}: {error}") from error


def _kind(values: Sequence[Any]) -> pa.DataType | None:
    """Return the one Arrow type that holds all values as they are, None where there is none."""
    present = [value for value in values if value is not None]
    kinds: set[type[Any]] = {type(value) for value in present}
    if not kinds:
        return pa.null()
    only = kinds.pop()
    if kinds or (only is int and not all(value in INT64 for value in present)):
        return None
    if only is list:
        inner = _kind([item for value in present for item in value])
        return None if inner is None else pa.list_(inner)
    return _struct(present) if only is dict else PLAIN[only]


def _struct(values: Sequence[Mapping[str, Any]]) -> pa.DataType | None:
    """Return the struct of objects of equal fields; a null in the place of a missing one would be another value."""
    names = list(values[0])
    if not names or any(list(value) != names for value in values):
        return None
    kinds = {name: _kind([value[name] for value in values]) for name in names}
    fields = [pa.field(name, kind) for name, kind in kinds.items() if kind is not None]
    return pa.struct(fields) if len(fields) == len(names) else None


def is_json(field: pa.Field[Any]) -> bool:
    """Return whether a column carries its values as JSON text."""
    return (field.metadata or {}).get(b"grpoctl.json") == b"1"


def column_values(table: pa.Table, name: str) -> list[Any]:
    """Return a column's values as they were."""
    schema: Any = table.schema  # stubs leave a field's type open
    values = cast("list[Any]", table.column(name).to_pylist())
    return [None if value is None else json.loads(value) for value in values] if is_json(schema.field(name)) else values


def plain_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return a table's rows with every value as it was."""
    columns = {name: column_values(table, name) for name in table.column_names}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def decoded(row: Mapping[str, Any], fields: frozenset[str]) -> dict[str, Any]:
    """Return a row with the named columns' JSON text as the values that it stands for."""
    return {name: json.loads(value) if name in fields and value is not None else value for name, value in row.items()}


def json_fields(source: Any) -> frozenset[str]:
    """Return the names of the fields of a struct type that carry JSON text."""
    fields: list[pa.Field[Any]] = [source.field(i) for i in range(source.num_fields)]
    return frozenset(field.name for field in fields if is_json(field))
