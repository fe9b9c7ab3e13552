"""`grpoctl reward test`: a reward function on rows of a file, without a rollout. The newcomer's first command."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import typer

from grpoctl.cli.output import emit, guarded
from grpoctl.errors import InputRefused, UsageError

log = logging.getLogger("grpoctl")

reward_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Try reward functions.")


@reward_app.callback()
def _group() -> None:
    """Try a reward function on rows of a file."""


@reward_app.command("test")
def test(  # noqa: PLR0917 - typer reads options from parameters
    ref: Annotated[str, typer.Argument(metavar="REF", help="Reward, as in score --reward.")],
    data: Annotated[str, typer.Option("--data", metavar="FILE", help="Data file, or a rollouts artifact.")],
    completion_column: Annotated[
        str | None,
        typer.Option("--completion-column", metavar="C", help="Column with completions [default: completion]."),
    ] = None,
    prompt_column: Annotated[
        str | None, typer.Option("--prompt-column", metavar="C", help="Column with the prompt.")
    ] = None,
    num_rows: Annotated[int, typer.Option("-n", "--num-rows", metavar="N", help="Rows to try.")] = 8,
    signature: Annotated[str, typer.Option("--signature", metavar="NAME", help="How the function is called.")] = "auto",
    kwarg: Annotated[
        list[str] | None, typer.Option("--kwarg", metavar="KEY=VALUE", help="Argument bound on every call; repeatable.")
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(
            "--environment", metavar="NAME", help="Variable let through although it looks secret; repeatable."
        ),
    ] = None,
    timeout_seconds: Annotated[float, typer.Option("--timeout", metavar="S", help="Deadline of a call.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line on stdout.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell more on stderr.")] = False,
) -> None:
    """Call a reward on the first rows of a file: inputs, reward, outcome and seconds of each."""
    values = {"json": as_json, "verbose": verbose}

    def body(_: dict[str, Any]) -> None:
        reference = _resolve(ref, signature, kwarg or [], environment or [])
        samples = _samples(data, reference, completion_column, prompt_column, num_rows)
        rows = _score(reference, samples, timeout_seconds, environment or [])
        if not as_json:
            _show(reference, rows)
        failed = sum(row["reward_status"] not in ("ok", "unscorable") for row in rows)
        if failed:
            log.warning("%s: %d of %d rows failed; see their reward_error", ref, failed, len(rows))
        emit({"reward": reference.name, "signature": reference.signature, "state": "done", "rows": rows}, values)

    guarded(body, values)


def _resolve(ref: str, signature: str, kwargs: Sequence[str], environment: Sequence[str]) -> Any:
    from ruamel.yaml import YAML

    from grpoctl.rewards.resolve.reference import resolve_reward

    bound: dict[str, Any] = {}
    for item in kwargs:
        key, separator, text = item.partition("=")
        if not separator:
            raise UsageError(f"--kwarg {item}: expected KEY=VALUE")
        bound[key] = cast("Any", YAML(typ="safe", pure=True)).load(text)
    return resolve_reward(ref, signature=signature, kwargs=bound, keep_environment=environment)


def _samples(
    data: str, reference: Any, completion_column: str | None, prompt_column: str | None, num_rows: int
) -> list[Any]:
    from grpoctl.artifacts.artifact import read_manifest
    from grpoctl.inputs.json_columns import plain_rows
    from grpoctl.inputs.rows import read_rows
    from grpoctl.rewards.sample import RewardSample
    from grpoctl.stages.score.scorer import COLUMNS, prompt_texts, reward_sample, source_rows

    artifact = None if data.startswith("builtin:") else read_manifest(data)
    if artifact is not None:
        if artifact.manifest.table != "rollouts" or artifact.manifest.sampling is None:
            raise InputRefused(f"{data}: holds {artifact.manifest.table}, expected a rollouts artifact or a file")
        messages = artifact.manifest.sampling.prompt_format == "messages"
        rows = source_rows(artifact.read_shard(0, COLUMNS).slice(0, num_rows))
        text_of = prompt_texts(artifact, [reference])
        return [reward_sample(row, messages, text_of) for row in rows]
    rows = plain_rows(read_rows(data, num_rows)[0])
    name = prompt_column or "prompt"
    if prompt_column is not None and prompt_column not in rows[0]:
        raise InputRefused(f"{data}: no column {prompt_column!r}, found {', '.join(rows[0])}")
    if name not in rows[0]:
        log.info("%s: no column 'prompt'; the reward gets an empty one (name it with --prompt-column)", data)
    return [
        RewardSample(
            sample_id=f"row {number}",
            prompt=row.get(name) or "",
            completion=(completion := _completion(row, completion_column, data)),
            prompt_ids=[],
            completion_ids=list(completion.encode()),
            finish_reason="stop",
            source={key: value for key, value in row.items() if key != name},
        )
        for number, row in enumerate(rows)
    ]


def _completion(row: Mapping[str, Any], column: str | None, data: str) -> str:
    name = column or "completion"
    if name not in row:
        raise InputRefused(
            f"{data}: no column {name!r} with completions, found {', '.join(row) or 'no other columns'}; "
            "name one with --completion-column, or give a rollouts artifact as --data"
        )
    value = row[name]
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = cast("list[dict[str, Any]]", value)[-1].get("content")
    if not isinstance(value, str):
        raise InputRefused(
            f"{data}: column {name!r} holds {type(cast('Any', value)).__name__}, expected text or a message list"
        )
    return value


def _score(
    reference: Any, samples: Sequence[Any], timeout_seconds: float, environment: Sequence[str]
) -> list[dict[str, Any]]:
    from grpoctl.rewards.calling.pool import RewardPool
    from grpoctl.rewards.resolve.columns_check import check_columns

    check_columns(reference, sorted({name for sample in samples for name in sample.source}))
    with RewardPool([reference], num_workers=1, timeout_seconds=timeout_seconds, keep_environment=environment) as pool:
        outcomes = pool.score(reference.name, samples)
    return [
        {
            "sample_id": sample.sample_id,
            "prompt": sample.prompt,
            "completion": sample.completion,
            "source": {key: str(value) for key, value in sample.source.items()},
            "reward": outcome.reward,
            "reward_status": outcome.status,
            "reward_error": outcome.error,
            "reward_seconds": outcome.seconds,
            "extras": outcome.extras,
        }
        for sample, outcome in zip(samples, outcomes, strict=True)
    ]


def _show(reference: Any, rows: Sequence[dict[str, Any]]) -> None:
    print(f"{reference.name}: called as {reference.signature}")
    for row in rows:
        reward = "–" if row["reward"] is None else f"{row['reward']:g}"
        print(f"  {row['sample_id']}  {row['reward_status']:10s} {reward:>8s}  {row['reward_seconds']:.4f} s")
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        print(f"    prompt      {_short(prompt)}")
        print(f"    completion  {_short(row['completion'])}")
        for key, value in row["source"].items():
            print(f"    {key:11s} {_short(value)}")
        if row["reward_error"]:
            print(f"    error       {_short(row['reward_error'].strip().splitlines()[-1])}")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:99] + "…"
