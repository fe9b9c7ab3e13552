"""The commands that run something: a stage, a pipeline, and those that look at one."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any, cast

import typer

from grpoctl.cli.options import COMMON, SHARDS, argument, rendered
from grpoctl.cli.output import emit, stage_lines
from grpoctl.errors import UsageError
from grpoctl.processes import launcher
from grpoctl.processes.stop import STOP
from grpoctl.settings.jobs import PipelineConfig
from grpoctl.settings.load import load_job
from grpoctl.stages.registry import STAGES, stage_named

log = logging.getLogger("grpoctl")


def add(app: typer.Typer, name: str, text: str) -> None:
    """Add one command in full to the application."""
    if name == "reward":
        from grpoctl.cli.reward import reward_app

        app.add_typer(reward_app, name=name, help=text)
        return
    trained = f"{name} train"
    if trained in STAGES:
        group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
        group.command("train", help=STAGES[trained].help)(_stage_command(trained))
        app.add_typer(group, name=name, help=text)
        return
    app.command(name, help=text)(_stage_command(name) if name in STAGES else _other_command(name))


def _stage_command(name: str) -> Callable[..., None]:
    shards = {"shards": SHARDS} if STAGES[name].takes_shards else {}
    return rendered(stage_named(name).job, {**shards, **COMMON}, functools.partial(_run_stage, name))


def _other_command(name: str) -> Callable[..., None]:
    if name == "example-data":
        options = {
            "out": (str, typer.Option("--out", metavar="FILE", help="Parquet file to write.")),
            "rows": (int, typer.Option("--rows", metavar="N", min=1, max=9000, help="Rows.")),
            "preferences": (
                bool,
                typer.Option("--preferences", help="Pairs for reward-model train instead of prompts."),
            ),
        }
        return rendered(None, options, _example_data)
    if name == "status":
        return rendered(None, {"run_dir": argument("RUN_DIR"), "json": COMMON["json"]}, _status)
    extra = {"pipeline": argument("PIPELINE.yaml"), **{k: v for k, v in COMMON.items() if k != "config"}}
    if name == "plan":
        return rendered(PipelineConfig, extra, _plan)
    extra["from_stage"] = (
        str | None,
        typer.Option(
            "--from", metavar="RUN/iter-N/STAGE", help="Rerun from a stage of another run, in a new --run-dir."
        ),
    )
    extra["accept_changes"] = (
        bool,
        typer.Option("--accept-changes", help="Begun iterations end as they began; later ones take the edited file."),
    )
    return rendered(PipelineConfig, extra, _run_pipeline)


def _context(values: dict[str, Any]) -> Any:
    from grpoctl.stages.context import Context, ShardRange

    shards = values.get("shards")
    STOP.check()  # a signal that came while libraries were imported
    return Context(
        dry_run=values.get("dry_run", False),
        shards=None if shards is None else ShardRange.parse(shards),
        quiet=values.get("json", False),
        stop=STOP,
    )


def _run_stage(name: str, values: dict[str, Any]) -> None:
    from grpoctl.stages.stage import run

    stage = stage_named(name)
    if launcher.world_size() > 1 and stage.engine is None:
        shared = [other for other in STAGES if stage_named(other).engine]
        raise UsageError(f"{name} runs as one process; only {' and '.join(shared)} are started by torchrun")
    job = load_job(stage.job, flags=values["flags"], sets=values["set"] or (), file=values["config"])
    policy = stage.job.model_fields.get("policy")
    if policy is not None and policy.default is not None and "policy" not in job.model_fields_set:
        log.info("no --policy: using the built-in tiny policy, %s", policy.default)
    context = _context(values)
    with redirect_stdout(sys.stderr):
        result = run(stage, job, context)
    record = result.record()
    if not values["json"] and launcher.rank() == 0:
        for line in stage_lines(record):
            print(line)
    emit(record, values)


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
    from grpoctl.pipeline.report import reward_curve

    if launcher.world_size() > 1:
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
    from grpoctl.pipeline.report import status_lines

    lines = list(status_lines(values["run_dir"]))
    if not values["json"]:
        print("\n".join(lines))
    emit({"state": "done", "exit_code": 0, "status": lines}, values)


def _example_data(values: dict[str, Any]) -> None:
    import pyarrow.parquet as pq

    from grpoctl.builtin.example_data import example_preferences, example_prompts

    table = (example_preferences if values["preferences"] else example_prompts)(values["rows"])
    cast("Any", pq).write_table(table, values["out"])
    print(f"{values['out']}: {table.num_rows} rows ({', '.join(table.column_names)})")
