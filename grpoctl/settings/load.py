"""From flags, environment, file and defaults to one checked config, with every error placed where it was written.

Precedence: flag > environment (GRPOCTL_UPDATE__LR) > file > default.
"""

from __future__ import annotations

import difflib
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from grpoctl.errors import UsageError
from grpoctl.settings.fields import Flag, Section
from grpoctl.settings.jobs import Job, PipelineConfig
from grpoctl.settings.yaml_source import KeyPath, read_yaml

PREFIX: Final = "GRPOCTL_"
JobType = TypeVar("JobType", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagField:
    """A command-line flag and the setting it writes."""

    flag: str
    path: tuple[str, ...]
    field: FieldInfo


def flag_fields(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[FlagField]:
    """Yield every flag of a job, in the order of declaration."""
    for name, field in model.model_fields.items():
        if name == "runtime" and not getattr(model, "runs_forward", True):
            continue
        for flag in (item for item in field.metadata if isinstance(item, Flag)):
            yield FlagField(flag=str(flag), path=(*prefix, name), field=field)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from flag_fields(field.annotation, (*prefix, name))


def load_job(
    job: type[JobType],
    *,
    flags: Mapping[str, Any],
    sets: Sequence[str] = (),
    file: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> JobType:
    """Merge all sources into a checked job.

    Args:
        job: the model to fill
        flags: flag → text (or list of texts), only those given
        sets: `key=value` texts of --set
        file: a pipeline-shaped YAML file; keys that the job doesn't share with a pipeline are left alone
        environment: variables; the process's own by default

    Raises:
        UsageError: anything that isn't a valid setting, with file:line:column, flag or variable in front.
    """
    values: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    if file is not None:
        content, positions = read_yaml(file)
        _refuse_unknown_top(content, positions, file)
        values = {key: content[key] for key in content if key in _shared_fields(job)}
        origins = positions
    for path, text, origin in _from_environment(job, os.environ if environment is None else environment):
        _put(values, path, _parse(job, path, text), origins, origin)
    for item in sets:
        key, separator, text = item.partition("=")
        if not separator:
            raise UsageError(f"--set {item}: expected key=value, as in --set update.lr=1e-6")
        path = tuple(key.strip().split("."))
        _put(values, path, _parse(job, path, text), origins, f"--set {item}")
    for entry in flag_fields(job):
        if entry.flag in flags:
            given = flags[entry.flag]
            value = (
                list(cast("Sequence[Any]", given))
                if isinstance(given, list | tuple)
                else _parse(job, entry.path, given)
            )
            _put(values, entry.path, value, origins, entry.flag)
    try:
        return job.model_validate(values)
    except ValidationError as error:
        raise UsageError("\n".join(_messages(error, job, origins, file))) from error


def _shared_fields(job: type[BaseModel]) -> set[str]:
    if job is PipelineConfig:
        return set(job.model_fields)
    shared = PipelineConfig.model_fields
    return {n for n, f in job.model_fields.items() if n in shared and shared[n].annotation == f.annotation}


def _refuse_unknown_top(content: Mapping[str, Any], positions: Mapping[KeyPath, str], file: str) -> None:
    for key in content:
        if key not in PipelineConfig.model_fields:
            raise UsageError(
                f"{positions.get((key,), file)}: unknown key {key!r}{_closest(key, PipelineConfig.model_fields)}"
            )


def _closest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"


def _from_environment(job: type[BaseModel], variables: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    for name in sorted(variables):
        if not name.startswith(PREFIX):
            continue
        path = tuple(name.removeprefix(PREFIX).lower().split("__"))
        if len(path) == 1 and path[0] not in _shared_fields(job):
            continue
        if path[0] in _shared_fields(job):
            yield path, variables[name], name
        elif len(path) > 1 and path[0] not in PipelineConfig.model_fields:
            raise UsageError(f"{name}: unknown section {path[0]!r}{_closest(path[0], PipelineConfig.model_fields)}")


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any, origins: dict[KeyPath, str], origin: str) -> None:
    target = values
    for key in path[:-1]:
        inner = target.get(key)
        target[key] = dict(cast("Mapping[str, Any]", inner)) if isinstance(inner, Mapping) else {}
        target = target[key]
    target[path[-1]] = value
    for known in [known for known in origins if known[: len(path)] == path]:
        del origins[known]
    origins[path] = origin


def _parse(job: type[BaseModel], path: tuple[str, ...], text: str) -> Any:
    field = _field(job, path)
    if field is not None and _is_text(field.annotation):
        return None if text in ("null", "~") and type(None) in typing.get_args(field.annotation) else text
    try:
        return cast("Any", YAML(typ="safe", pure=True)).load(text)
    except YAMLError as error:
        raise UsageError(f"{'.'.join(path)}={text}: not a YAML value ({str(error).splitlines()[0]})") from error


def _field(model: type[BaseModel], path: Sequence[str]) -> FieldInfo | None:
    field: FieldInfo | None = None
    for name in path:
        field = model.model_fields.get(name)
        if field is None:
            return None
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    return field


def _is_text(annotation: Any) -> bool:
    if typing.get_origin(annotation) in (dict, tuple, list):
        return False
    options = typing.get_args(annotation) if typing.get_origin(annotation) is not typing.Literal else (annotation,)
    kinds = [option for option in (options or (annotation,)) if option is not type(None)]
    return all(kind is str or typing.get_origin(kind) is typing.Literal for kind in kinds)


def _messages(
    error: ValidationError, job: type[BaseModel], origins: Mapping[KeyPath, str], file: str | None
) -> Iterator[str]:
    for item in error.errors():
        path: KeyPath = tuple(item["loc"])
        around = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), None)
        where = around or next((origins[known] for known in origins if known[: len(path)] == path), file or "config")
        key = ".".join(str(part) for part in path) or "config"
        if item["type"] == "extra_forbidden":
            yield f"{where}: unknown key {key!r}{_closest(str(path[-1]), _siblings(job, path))}"
        elif item["type"] == "missing":
            yield f"{where}: {key} is missing; add it"
        elif item["type"] == "value_error":
            yield f"{where}: {key}: {item['msg'].removeprefix('Value error, ')}"
        else:
            expected = re.sub(r"^Input should be ", "", item["msg"])
            yield f"{where}: {key}: found {item['input']!r}, expected {expected}"


def _siblings(job: type[BaseModel], path: KeyPath) -> list[str]:
    model: type[BaseModel] = job
    for name in (part for part in path[:-1] if isinstance(part, str)):
        field = model.model_fields.get(name)
        kinds = () if field is None else (field.annotation, *typing.get_args(field.annotation))
        found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not found:
            return sorted({name for kind in Job.__subclasses__() for name in kind.model_fields})
        model = found[0]
    return list(model.model_fields)
