"""One YAML 1.2 mapping as plain values, with the place of every key in its file."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, SequenceNode

from grpoctl.errors import UsageError

KeyPath = tuple[str | int, ...]


def read_yaml(file: str) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Read one YAML 1.2 mapping.

    Returns:
        The plain values with `${NAME}` replaced from the environment, and `file:line:column` of every key path.

    Raises:
        UsageError: not there, not text, empty, not a mapping, several documents, duplicate keys, bad syntax.
    """
    try:
        text = Path(file).read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{file}: can't be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8 text (byte {error.start}); expected a YAML file") from error
    yaml = cast("Any", YAML(typ="rt", pure=True))  # ruamel types little of itself
    try:
        content = yaml.load(io.StringIO(text))
    except MarkedYAMLError as error:
        marked = cast("Any", error)
        mark = marked.problem_mark or marked.context_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        raise UsageError(f"{where}: {_yaml_problem(error, text)}") from error
    except YAMLError as error:
        raise UsageError(f"{file}: not YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(content, CommentedMap):
        found = "nothing" if content is None else "a list" if isinstance(content, list) else f"{content!r}"
        raise UsageError(f"{file}: found {found}, expected a mapping of settings")
    positions: dict[KeyPath, str] = {}
    return _plain(content, file, (), positions), positions


def _yaml_problem(error: MarkedYAMLError, text: str) -> str:
    marked = cast("Any", error)
    problem = str(marked.problem or marked.context)
    if "found duplicate key" in problem:
        return f"{problem.splitlines()[0]}{_first_place(error, text)}; keep one of them"
    if "but found another document" in problem:
        return "a second document starts here; expected one"
    if "\\t" in problem or "tab" in problem:
        return "a tab can't indent YAML; use spaces"
    return problem.splitlines()[0]


def _first_place(error: MarkedYAMLError, text: str) -> str:
    """Return where a key stood that is there again; the error itself only knows where its mapping begins."""
    again = cast("Any", error).problem_mark
    nodes: list[Any] = [cast("Any", YAML(typ="rt", pure=True)).compose(io.StringIO(text))]
    for node in nodes:  # grows while it is walked
        if isinstance(node, MappingNode):
            pairs: list[tuple[Any, Any]] = cast("Any", node).value
            keys = [key for key, _ in pairs]
            twin = next((key for key in keys if again and key.start_mark.index == again.index), None)
            if twin is not None:
                first = next(key for key in keys if key.value == twin.value)
                return f", first at line {first.start_mark.line + 1}"
            nodes += [value for _, value in pairs if value not in nodes]
        elif isinstance(node, SequenceNode):
            items: list[Any] = cast("Any", node).value
            nodes += [value for value in items if value not in nodes]
    return ""


def _plain(node: Any, file: str, path: KeyPath, positions: dict[KeyPath, str]) -> Any:
    if isinstance(node, CommentedMap):
        result: dict[str, Any] = {}
        mapping = cast("Any", node)
        for key, value in mapping.items():
            line, column = mapping.lc.key(key)
            positions[(*path, str(key))] = f"{file}:{line + 1}:{column + 1}"
            result[str(key)] = _plain(value, file, (*path, str(key)), positions)
        return result
    if isinstance(node, CommentedSeq):
        sequence = cast("Any", node)
        for index in range(len(sequence)):
            line, column = sequence.lc.item(index)
            positions[(*path, index)] = f"{file}:{line + 1}:{column + 1}"
        return [_plain(value, file, (*path, index), positions) for index, value in enumerate(sequence)]
    if isinstance(node, bool) or node is None:
        return node
    if isinstance(node, str):
        return _expand(str(node), positions.get(path, file))
    return int(node) if isinstance(node, int) else float(node) if isinstance(node, float) else str(node)


def _expand(text: str, where: str) -> str:
    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise UsageError(f"{where}: environment variable {name} isn't set; set it or write the value")
        return os.environ[name]

    return re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", value, text)
