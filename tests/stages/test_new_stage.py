"""A stage is a value: one that exists in this file alone runs by its command, by a pipeline, and by the interpreter."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pytest
from command_line import assert_refused, done, grpoctl, manifest, rows

from grpoctl.artifacts.artifact import Artifact, open_artifact
from grpoctl.artifacts.manifest import RowAccounting
from grpoctl.artifacts.tables import TABLES, Column, Table
from grpoctl.artifacts.writer import ArtifactWriter
from grpoctl.settings.fields import Flag
from grpoctl.settings.jobs import Job
from grpoctl.stages.context import Context
from grpoctl.stages.registry import STAGES, Listed
from grpoctl.stages.serve import serve
from grpoctl.stages.stage import Definition, Facts, Prepared, Stage

LENGTHS = Table(
    name="lengths",
    version=1,
    doc="Tokens of each completion.",
    columns=(
        Column(name="sample_id", type=pa.large_string(), doc="as in rollouts"),
        Column(name="num_tokens", type=pa.int64(), unit="tokens", doc="of the completion"),
    ),
)


class LengthJob(Job):
    """Count tokens."""

    rollouts: Annotated[str, Flag("--rollouts")] = "rollouts"
    """Rollouts artifact."""
    out: Annotated[str, Flag("--out")] = "lengths"
    """Artifact to write."""


@dataclass(frozen=True)
class Inputs:
    rollouts: Artifact


def compute(job: LengthJob, inputs: Inputs, writer: ArtifactWriter, context: Context) -> Facts:
    total = 0
    for index in context.follow(writer.missing_shards(context.selected(writer.work.num_shards)), "length"):
        table = inputs.rollouts.read_shard(index, ["sample_id", "completion_ids"])
        lengths = [len(ids) for ids in table["completion_ids"].to_pylist()]
        total += sum(lengths)
        built = LENGTHS.build({"sample_id": table["sample_id"].to_pylist(), "num_tokens": lengths})
        writer.write_shard(index, built, counts={"ok": len(lengths)})
    num_rows = inputs.rollouts.manifest.rows.ok
    return Facts(rows=RowAccounting(input=num_rows, ok=num_rows, skipped=0, failed=0), stats={"total": total})


STAGE = Stage(
    name="length",
    job=LengthJob,
    table=LENGTHS,
    reads=lambda job: (job.rollouts,),
    open=lambda job: Inputs(open_artifact(job.rollouts, table="rollouts")),
    define=lambda job, inputs: Definition(
        values={"stage": "length", "rollouts": inputs.rollouts.manifest.content_digest},
        parents=[inputs.rollouts.parent("rollouts")],
        num_shards=len(inputs.rollouts.manifest.shards),
    ),
    prepare=lambda job, inputs, context: Prepared(plan=inputs, facts={"num_rows": inputs.rollouts.manifest.rows.ok}),
    compute=compute,
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The one line that a stage takes in the registry, and its table's."""
    monkeypatch.setitem(STAGES, "length", Listed(module=__name__, folder="lengths", help="Rollouts in, lengths out."))
    monkeypatch.setitem(TABLES, "lengths", LENGTHS)
    yield


def total(rows: list[dict[str, Any]]) -> int:
    return sum(row["num_tokens"] for row in rows)


def test_its_command_has_options_help_and_every_state(work: Path) -> None:
    assert "--rollouts" in done("length", "--help").out
    planned = done("length", "--dry-run", "--json").record
    assert (planned["state"], planned["facts"]["num_rows"]) == ("planned", 16)
    first = done("length", "--json").record
    assert first["state"] == "done" and first["facts"]["total"] == total(rows("lengths"))
    assert manifest("lengths")["fingerprint"] == planned["facts"]["fingerprint"]
    assert done("length", "--json").record["state"] == "already_done"
    assert_refused(grpoctl("length", "--rollouts", "scores", "--out", "x"), 3, found="holds scores, expected rollouts")
    assert_refused(grpoctl("length", "--out", "rollouts/inner"), 2, found="overlaps the input rollouts")


def test_a_pipeline_runs_it(small_pipeline: Path) -> None:
    done("run", small_pipeline, "--iterations", 1)
    assert total(rows("run/iter-000000/lengths")) == manifest("run/iter-000000/rollouts")["tokens"]["completion"]
    assert "length" in done("plan", small_pipeline).out


def test_an_interpreter_of_its_own_runs_it(work: Path) -> None:
    answers = io.StringIO()
    request = {"stage": "length", "job": {"rollouts": "rollouts", "out": "there"}}
    serve(io.StringIO(json.dumps(request) + "\n"), answers)
    assert json.loads(answers.getvalue())["facts"]["total"] == total(rows("there"))
