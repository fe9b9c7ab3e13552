"""The commands: options rendered from the settings, results as a few lines or one JSON line, errors as exit codes."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from grpoctl.errors import GrpoctlError, PeerFailed, UsageError
from grpoctl.processes import last_words
from grpoctl.processes import launcher as launched
from grpoctl.settings.fields import Section
from grpoctl.settings.jobs import JOBS, PipelineConfig
from grpoctl.settings.load import FlagField, flag_fields, load_job

log = logging.getLogger("grpoctl")
STAGES: Final = ("rollout", "score", "logprob", "update", "sync")
SHARED_STAGES: Final = ("logprob", "update")
"""Stages that several processes can share."""
TRAIN: Final = "reward-model train"
QUIET_LOGGERS: Final = ("httpx", "httpcore", "filelock", "fsspec", "urllib3", "botocore", "s3fs", "aiobotocore")
EXTRAS: Final = {"torch": "torch", "transformers": "torch", "safetensors": "torch"}
"""Packages that a stage imports when it runs, by the extra they come with."""

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
SHARDS: Final = (str | None, typer.Option("--shards", metavar="A-B/N", help="Write only shards A to B of N, from 0."))


def add(app: typer.Typer, name: str, text: str) -> None:
    """Add one command in full to the application."""
    if name == "reward":
        from grpoctl.cli.reward import reward_app

        app.add_typer(reward_app, name="reward", help=text)
        return
    if name == "reward-model":
        group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
        train = _rendered(JOBS[TRAIN], COMMON, lambda given: _run_stage(TRAIN, given))
        group.command("train", help="Pairs of answers in, a value-head reward model out.")(train)
        app.add_typer(group, name=name, help=text)
        return
    body: Callable[[dict[str, Any]], None]
    if name in STAGES:
        command = _rendered(JOBS[name], {"shards": SHARDS, **COMMON}, lambda given: _run_stage(name, given))
    elif name == "example-data":
        options = {
            "out": (str, typer.Option("--out", metavar="FILE", help="Parquet file to write.")),
            "rows": (int, typer.Option("--rows", metavar="N", min=1, max=9000, help="Rows.")),
            "preferences": (
                bool,
                typer.Option("--preferences", help="Pairs for reward-model train instead of prompts."),
            ),
        }
        command = _rendered(None, options, _example_data)
    elif name == "status":
        command = _rendered(None, {"run_dir": _argument("RUN_DIR"), "json": COMMON["json"]}, _status)
    else:
        extra = {"pipeline": _argument("PIPELINE.yaml"), **{k: v for k, v in COMMON.items() if k != "config"}}
        if name == "run":
            extra["from_stage"] = (
                str | None,
                typer.Option(
                    "--from", metavar="RUN/iter-N/STAGE", help="Rerun from a stage of another run, in a new --run-dir."
                ),
            )
            extra["accept_changes"] = (
                bool,
                typer.Option(
                    "--accept-changes", help="Begun iterations end as they began; later ones take the edited file."
                ),
            )
        body = _run_pipeline if name == "run" else _plan
        command = _rendered(PipelineConfig, extra, body)
    app.command(name, help=text)(command)


def _argument(metavar: str) -> tuple[Any, Any]:
    return str, typer.Argument(metavar=metavar, show_default=False)


def _rendered(
    job: type[Section] | None, extra: Mapping[str, tuple[Any, Any]], body: Callable[[dict[str, Any]], None]
) -> Callable[..., None]:
    """Return a function whose signature holds the job's flags and the extra options, as typer reads it."""
    entries = list(flag_fields(job)) if job is not None else []
    parameters = []
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
    if typing.get_origin(field.annotation) is typing.Literal:
        return "|".join(map(str, typing.get_args(field.annotation)))
    names: dict[Any, str] = {int: "N", float: "X", str: "TEXT", bool: "BOOL"}
    return names.get(options[0], "TEXT")


def guarded(body: Callable[[dict[str, Any]], None], values: dict[str, Any]) -> None:
    """Run a command's body; an expected failure becomes a message on stderr, its exit code, and the JSON line."""
    set_up_logging(verbose=values.get("verbose", False))
    last_words.register(functools.partial(_tell, values=values, stream=sys.stdout))  # stages have it redirected
    try:
        with _missing_extras():
            body(values)
    except GrpoctlError as error:
        _tell(error, values)
        raise typer.Exit(error.exit_code) from error


def _tell(error: GrpoctlError, values: dict[str, Any], stream: TextIO | None = None) -> None:
    told_elsewhere = launched.has_speaker() or (isinstance(error, PeerFailed) and launched.rank() > 0)
    if not told_elsewhere:
        print(f"error: {error}", file=sys.stderr, flush=True)
    record = {"state": "error", "error": str(error), "kind": type(error).__name__, "exit_code": error.exit_code}
    emit(record, values, stream)


@contextmanager
def _missing_extras() -> Iterator[None]:
    """Turn the import error of a package that belongs to an extra into the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".", maxsplit=1)[0]
        if package not in EXTRAS:
            raise
        raise UsageError(f'{package} is not installed; pip install "grpoctl[{EXTRAS[package]}]"') from error


def set_up_logging(*, verbose: bool) -> None:
    """Send messages to stderr, those of chatty libraries only when they are errors."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    log.setLevel(logging.ERROR if launched.rank() else logging.DEBUG if verbose else logging.INFO)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def emit(record: dict[str, Any], values: dict[str, Any], stream: TextIO | None = None) -> None:
    """Print the record as one JSON line where --json asks for it, and write it where --result-file does."""
    line = json.dumps(record)
    if launched.rank() and not launched.has_speaker():
        return  # started by torchrun: the first process speaks
    if values.get("json"):
        print(line, file=stream, flush=True)
    if values.get("result_file"):
        Path(values["result_file"]).write_text(line + "\n")


def _context(values: dict[str, Any]) -> Any:
    from grpoctl.stages.stage import Context, ShardRange

    shards = values.get("shards")
    context = Context(
        dry_run=values.get("dry_run", False),
        shards=None if shards is None else ShardRange.parse(shards),
        quiet=values.get("json", False),
    )
    context.stop.install()
    return context


def _run_stage(name: str, values: dict[str, Any]) -> None:
    launched.die_with_starter()
    if launched.world_size() > 1 and name not in SHARED_STAGES:
        raise UsageError(f"{name} runs as one process; only {' and '.join(SHARED_STAGES)} are started by torchrun")
    job = load_job(JOBS[name], flags=values["flags"], sets=values["set"] or (), file=values["config"])
    if name in ("rollout", "update") and "policy" not in job.model_fields_set:
        log.info("no --policy: using the built-in tiny policy, builtin:tiny")
    context = _context(values)
    with redirect_stdout(sys.stderr):
        result = _stage_function(name)(job, context)
    record: dict[str, Any] = {"stage": name, "out": result.out, "state": result.state, "exit_code": 0}
    if result.artifact is not None:
        manifest = result.artifact.manifest
        record |= {"fingerprint": manifest.fingerprint, "content_digest": manifest.content_digest}
        record["rows"] = manifest.rows.model_dump()
    record["facts"] = result.facts
    if not values["json"] and launched.rank() == 0:
        for line in _stage_lines(record):
            print(line)
    emit(record, values)


def _stage_function(name: str) -> Callable[[Any, Any], Any]:
    if name == TRAIN:
        from grpoctl.stages.reward_model.stage import run

        return run
    return importlib.import_module(f"grpoctl.stages.{name}").run  # not by the pipeline: score needs no torch


def _stage_lines(record: dict[str, Any]) -> Iterator[str]:
    words = {"done": "done", "already_done": "already done", "partial": "shards are missing", "planned": "would run"}
    yield f"{record['stage']}: {words[record['state']]} → {record['out']}"
    if "rows" in record:
        rows = record["rows"]
        counts = ", ".join(f"{rows[name]} {name}" for name in ("ok", "skipped", "failed") if rows[name])
        yield f"  rows: {counts or 0}"
    for name, value in record["facts"].items():
        if isinstance(value, dict):
            yield f"  {name}: " + ", ".join(f"{key} {_short(item)}" for key, item in value.items())
        elif value is not None:
            yield f"  {name}: {_short(value)}"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _load_pipeline(values: dict[str, Any]) -> PipelineConfig:
    return load_job(PipelineConfig, flags=values["flags"], sets=values["set"] or (), file=values["pipeline"])


def _pipeline(values: dict[str, Any]) -> Any:
    from grpoctl.pipeline.run import Origin, Pipeline

    origin = None if values.get("from_stage") is None else Origin.parse(values["from_stage"])
    if origin is not None and "--run-dir" not in values["flags"]:
        raise UsageError(
            "--from needs --run-dir: a stage is rerun into a new run directory, the old one stays as it is"
        )
    return Pipeline(
        config=_load_pipeline(values),
        context=_context(values),
        origin=origin,
        accept_changes=values.get("accept_changes", False),
        tell=log.info if values["json"] else functools.partial(print, flush=True),
    )


def _run_pipeline(values: dict[str, Any]) -> None:
    from grpoctl.pipeline.run import reward_curve

    if launched.world_size() > 1:
        raise UsageError("run starts its stages itself; set runtime.num_processes instead of starting it by torchrun")
    if values["dry_run"]:
        _plan(values)
        return
    pipeline = _pipeline(values)
    try:
        summary = pipeline.run()
    finally:
        pipeline.close()
    if not values["json"]:
        print()
        print(reward_curve(summary["metrics"]))
        if summary["wall_seconds"]:
            engine, wall = summary["engine_seconds"], summary["wall_seconds"]
            print(
                f"\nthe stages' timed work took {engine:.1f} s of {wall:.1f} s; loading and publishing {wall - engine:.1f} s"
            )
        print(f"\nartifacts: {summary['run_dir']}  (metrics.jsonl, iter-…/, policies/)")
    emit({"state": "done", "exit_code": 0, **summary}, values)


def _plan(values: dict[str, Any]) -> None:
    lines = list(_pipeline(values).plan())
    if not values["json"]:
        print("\n".join(lines))
    emit({"state": "planned", "exit_code": 0, "stages": lines}, values)


def _status(values: dict[str, Any]) -> None:
    from grpoctl.pipeline.run import status_lines

    lines = list(status_lines(values["run_dir"]))
    if not values["json"]:
        print("\n".join(lines))
    emit({"state": "done", "exit_code": 0, "status": lines}, values)


def _example_data(values: dict[str, Any]) -> None:
    import pyarrow.parquet as pq

    from grpoctl.builtin.example_data import example_preferences, example_prompts

    table = (example_preferences if values["preferences"] else example_prompts)(values["rows"])
    pq.write_table(table, values["out"])
    print(f"{values['out']}: {table.num_rows} rows ({', '.join(table.column_names)})")
