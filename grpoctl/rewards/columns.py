"""Find in a prompt row the values that other systems call ground truth, label or data source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

GROUND_TRUTH_PATHS = ("reward_model.ground_truth", "ground_truth", "answer")
LABEL_PATHS = ("label", "labels", "answer")


def value_at(source: Mapping[str, Any], path: str) -> Any:
    """Return the value of a column or of a dotted path into structs; None where there is none."""
    if path in source:
        return source[path]
    value: Any = source
    for part in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = cast("Mapping[str, Any]", value).get(part)
    return value


def first_value(source: Mapping[str, Any], paths: Sequence[str]) -> Any:
    """Return the first value among the paths that is not null."""
    return next((value for path in paths if (value := value_at(source, path)) is not None), None)


def provides(columns: Sequence[str], path: str) -> bool:
    """Tell whether the columns hold a path, by its full name or by its first part."""
    return path in columns or path.partition(".")[0] in columns
