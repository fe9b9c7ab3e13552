"""A command's options, rendered from the settings that they set."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from grpoctl.cli.output import guarded
from grpoctl.settings.engines import OneOf
from grpoctl.settings.fields import Section
from grpoctl.settings.load import FlagField, flag_fields

COMMON: Final[dict[str, tuple[Any, Any]]] = {
    "config": (str | None, typer.Option("--config", metavar="FILE", help="Settings in a pipeline-shaped YAML file.")),
    "set": (
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as update.lr=1e-6; repeatable."),
    ),
    "dry_run": (bool, typer.Option("--dry-run", help="Check inputs and say what would be done.")),
    "json": (bool, typer.Option("--json", help="Print one JSON line on stdout, nothing else there.")),
    "result_file": (str | None, typer.Option("--result-file", metavar="PATH", help="Write that JSON line to a file.")),
    "verbose": (bool, typer.Option("--verbose", "-v", help="Tell more on stderr.")),
}
SHARDS: Final = (
    str | None,
    typer.Option("--shards", metavar="A-B/N", help="Write only shards A to B (or A/N: one) of N, from 0."),
)


def argument(metavar: str) -> tuple[Any, Any]:
    return str, typer.Argument(metavar=metavar, show_default=False)


def rendered(
    job: type[Section] | None, extra: Mapping[str, tuple[Any, Any]], body: Callable[[dict[str, Any]], None]
) -> Callable[..., None]:
    """Return a function whose signature holds the job's flags and the extra options, as typer reads it."""
    entries = list(flag_fields(job)) if job is not None else []
    parameters: list[inspect.Parameter] = []
    for entry in entries:
        parameters.append(_parameter(_variable(entry), Annotated[_kind(entry.field), _option(entry)], None))
    for name, (kind, option) in extra.items():
        default = {bool: False, str: inspect.Parameter.empty, int: inspect.Parameter.empty}.get(kind)
        parameters.append(_parameter(name, Annotated[kind, option], default))
    parameters.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)

    def command(**values: Any) -> None:
        flags = {entry.flag: values.pop(_variable(entry)) for entry in entries}
        given = {flag: value for flag, value in flags.items() if value not in (None, [], ())}
        values["flags"] = {flag: "true" if value is True else value for flag, value in given.items()}
        guarded(body, values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _variable(entry: FlagField) -> str:
    return "flag_" + "_".join(entry.path)


def _kind(field: FieldInfo) -> Any:
    if field.annotation is bool:
        return bool | None
    return list[str] | None if typing.get_origin(field.annotation) is tuple else str | None


def _option(entry: FlagField) -> Any:
    default = entry.field.get_default()
    shown = "" if default in (None, PydanticUndefined, ()) else f" [default: {default}]"
    text = " ".join((entry.field.description or "").split())
    return typer.Option(entry.flag, metavar=_metavar(entry.field), help=text + shown, show_default=False)


def _metavar(field: FieldInfo) -> str:
    options: list[Any] = [
        kind for kind in (typing.get_args(field.annotation) or (field.annotation,)) if kind is not type(None)
    ]
    choices = choices_of(field)
    if choices:
        return "|".join(choices)
    names: dict[Any, str] = {int: "N", float: "X", str: "TEXT", bool: "BOOL"}
    return names.get(options[0], "TEXT")


def choices_of(field: FieldInfo) -> list[str]:
    """Return the values that a setting can have, where they are few and named."""
    if typing.get_origin(field.annotation) is typing.Literal:
        return [str(choice) for choice in typing.get_args(field.annotation)]
    return next((list(item.names()) for item in field.metadata if isinstance(item, OneOf)), list[str]())
