"""A stage as a value, and the one runner of all of them.

A stage opens its inputs, says what defines its result, prepares the work and does it. Everything around that is done here,
once: overlapping paths, work that is committed already, dry runs, several processes, the commit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Generic, TypeVar

from grpoctl.artifacts.artifact import Artifact
from grpoctl.artifacts.manifest import Parent, PolicyIdentity, RowAccounting, Sampling, Shard
from grpoctl.artifacts.storage import check_writable, locate
from grpoctl.artifacts.tables import Table
from grpoctl.artifacts.writer import ArtifactWriter, Work, committed
from grpoctl.engines.registry import training_engine
from grpoctl.errors import InputRefused, UsageError
from grpoctl.inputs.policies import PolicyFolder
from grpoctl.processes import launcher
from grpoctl.processes.local_ranks import run_ranks
from grpoctl.processes.ranks import ALONE, Ranks
from grpoctl.settings.fields import Flag
from grpoctl.settings.jobs import Job, PipelineConfig
from grpoctl.settings.runtime import RuntimeConfig
from grpoctl.stages.context import Context

PACKAGES: Final = ("torch", "transformers", "vllm", "deepspeed", "megatron-core", "mbridge", "peft", "pyarrow", "numpy")
JobT = TypeVar("JobT", bound=Job)
InputsT = TypeVar("InputsT")
PlanT = TypeVar("PlanT")
Shards = Sequence[Shard]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """How a stage ended.

    Args:
        stage: its name
        out: artifact or folder it wrote
        state: done, already_done, partial (other shards are still missing) or planned
        artifact: the committed artifact, where there is one
        facts: numbers for `--json` and for the line that a person reads
    """

    stage: str
    out: str
    state: str
    artifact: Artifact | None
    facts: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """Return the result as the record that `--json` prints."""
        record: dict[str, Any] = {"stage": self.stage, "out": self.out, "state": self.state, "exit_code": 0}
        if self.artifact is not None:
            manifest = self.artifact.manifest
            record |= {"fingerprint": manifest.fingerprint, "content_digest": manifest.content_digest}
            record["rows"] = manifest.rows.model_dump()
        return {**record, "facts": self.facts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What a stage's result is made of.

    Args:
        values: what the fingerprint is taken over
        parents: the artifacts read
        num_shards: parts of the result
        config: the job as the manifest keeps it, where that isn't the job as it is
    """

    values: Mapping[str, Any]
    parents: Sequence[Parent] = ()
    num_shards: int = 1
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Generic[PlanT]):
    """Work that nothing stands in the way of: what is to be computed, and what a dry run says of it."""

    plan: PlanT
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    out: str | None = None
    """What will be written, where that isn't the job's output as it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a stage knows of its result when all is written; a callable takes the committed shards.

    Args:
        then: called with the committed artifact
        out: what was written, where that isn't the job's output as it stands
    """

    stats: dict[str, Any] | Callable[[Shards], dict[str, Any]]
    rows: RowAccounting | Callable[[Shards], RowAccounting] | None = None
    policy: PolicyIdentity | None = None
    reference: PolicyIdentity | None = None
    sampling: Sampling | None = None
    tokens: dict[str, int] | Callable[[Shards], dict[str, int]] = field(default_factory=dict[str, int])
    timings: dict[str, float] = field(default_factory=dict[str, float])
    then: Callable[[Artifact], None] = lambda artifact: None
    out: str | None = None


def _committed_artifact(job: Job, inputs: Any, work: Work, context: Context) -> StageResult | None:
    """Return the result of work that is committed already, or None where it can be written.

    Raises:
        Conflict: other work is committed there.
        InputRefused: nothing can be written there.
    """
    artifact = committed(job.output, work)
    if artifact is None:
        check_writable(locate(job.output))
        return None
    stats = dict(artifact.manifest.stats)
    return StageResult(stage=work.stage, out=job.output, state="already_done", artifact=artifact, facts=stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Generic[JobT, InputsT, PlanT]):
    """A batch job over files.

    Args:
        name: its command
        job: inputs, output and settings
        table: of its artifact; None for a stage that writes something else and brings an `already` of its own
        reads: the places that a job reads, which its output must not overlap
        open: opens the inputs and refuses them; no torch
        define: says what the result is made of
        prepare: looks at everything that can go wrong before the work starts; the last thing that a dry run does
        compute: does the work; on several ranks all of them call it and the first one's facts count
        already: returns the result where this very work was done before
        engine: the training engine whose processes share the stage, by the job; None for a stage of one process
        needed: whether a pipeline's iterations have it
    """

    name: str
    job: type[JobT]
    table: Table | None
    reads: Callable[[JobT], Sequence[str | None]]
    open: Callable[[JobT], InputsT]
    define: Callable[[JobT, InputsT], Definition]
    prepare: Callable[[JobT, InputsT, Context], Prepared[PlanT]]
    compute: Callable[[JobT, PlanT, ArtifactWriter, Context], Facts]
    already: Callable[[JobT, InputsT, Work, Context], StageResult | None] = _committed_artifact
    engine: Callable[[JobT], str] | None = None
    needed: Callable[[PipelineConfig], bool] = lambda config: True


def run(stage: Stage[JobT, InputsT, PlanT], job: JobT, context: Context) -> StageResult:
    """Run a stage; every stage of every command, pipeline and interpreter comes through here.

    Raises:
        UsageError: settings or flags that can't be used.
        InputRefused: inputs that don't fit, or a place that can't be written.
        GateFailed: a check on the numbers failed.
        Conflict: other work is committed at the output.
        PluginFailed: a user's function failed beyond its budget.
        TryAgain: a passing fault; finished shards are kept.
    """
    ranks = context.join(job.runtime) if stage.engine else ALONE
    with ranks.agreed():  # every rank reads the same files
        prepared, work = _prepare(stage, job, context)
    if isinstance(prepared, StageResult):
        return prepared
    if stage.engine and needs_group(stage.engine(job), job.runtime):
        words = [*_words(job), *([] if context.shards is None else ["--shards", str(context.shards)])]
        answer = run_ranks(stage.name, words, job.runtime.num_processes, stop=context.stop)
        return result_of(answer, artifact=committed(job.output, work))
    writer = ArtifactWriter(url=job.output, work=work)
    with ranks.lost_peers():
        facts = stage.compute(job, prepared.plan, writer, context)
        with ranks.agreed():
            if ranks.is_first:
                return _finish(stage, job, writer, facts)
    return StageResult(stage=stage.name, out=job.output, state="done", artifact=None, facts={})


def _prepare(
    stage: Stage[JobT, InputsT, PlanT], job: JobT, context: Context
) -> tuple[Prepared[PlanT] | StageResult, Work]:
    check_outside(job, *stage.reads(job))
    inputs = stage.open(job)
    definition = stage.define(job, inputs)
    work = Work(
        stage=stage.name,
        table=stage.table,
        definition=definition.values,
        config=job.model_dump(mode="json") if definition.config is None else definition.config,
        parents=definition.parents,
        num_shards=definition.num_shards,
    )
    done = stage.already(job, inputs, work, context)
    if done is not None:
        return done, work
    context.selected(work.num_shards)
    prepared = stage.prepare(job, inputs, context)
    if not context.dry_run:
        return prepared, work
    known = {} if stage.table is None else {"fingerprint": work.fingerprint, "num_shards": work.num_shards}
    facts = {**known, **prepared.facts}
    out = prepared.out or job.output
    return StageResult(stage=stage.name, out=out, state="planned", artifact=None, facts=facts), work


def _finish(stage: Stage[JobT, InputsT, PlanT], job: JobT, writer: ArtifactWriter, facts: Facts) -> StageResult:
    """Commit what was written; partial while other processes' shards are missing."""
    if stage.table is None:
        assert not callable(facts.stats)
        return StageResult(
            stage=stage.name, out=facts.out or job.output, state="done", artifact=None, facts=facts.stats
        )
    names = ("rows", "policy", "reference", "sampling", "stats", "tokens", "timings")
    artifact = writer.commit(**{name: getattr(facts, name) for name in names}, environment=package_versions())
    if artifact is None:
        missing = {"missing_shards": writer.missing_shards()}
        return StageResult(stage=stage.name, out=job.output, state="partial", artifact=None, facts=missing)
    facts.then(artifact)
    stats = dict(artifact.manifest.stats)
    return StageResult(stage=stage.name, out=job.output, state="done", artifact=artifact, facts=stats)


def result_of(record: Mapping[str, Any], *, artifact: Artifact | None) -> StageResult:
    """Return the result that another process of ours has told as a record."""
    return StageResult(
        stage=record["stage"], out=record["out"], state=record["state"], artifact=artifact, facts=record["facts"]
    )


def needs_group(engine: str, runtime: RuntimeConfig) -> bool:
    """Return whether processes have to be started: several are asked for, or the engine runs in a group only."""
    return not launcher.is_launched() and (runtime.num_processes > 1 or training_engine(engine).needs_group)


def data_parallel_ranks(engine: str, runtime: RuntimeConfig, ranks: Ranks) -> Ranks:
    """Return the processes among which rows are dealt: those that share a copy of the model are one.

    Raises:
        UsageError: the processes can't be divided into such blocks.
    """
    size = training_engine(engine).ranks_per_copy(runtime)
    if ranks.world_size % size:
        raise UsageError(
            f"runtime.megatron.tensor_parallel_size: {size} doesn't divide the {ranks.world_size} processes "
            "(runtime.num_processes, or those that the launcher started)"
        )
    return ranks.in_blocks(size)


def _words(job: Job) -> list[str]:
    """Return the arguments that say the whole job, so that neither files nor variables are read again."""
    words: list[str] = []
    for name, value in job.model_dump(mode="json").items():
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return words


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that compute."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check_outside(job: Job, *inputs: str | None) -> None:
    """Refuse an output that lies inside an input, or the other way round.

    Raises:
        UsageError: they overlap.
    """
    ours = _absolute(job.output) + "/"
    flag = next(str(m) for m in type(job).model_fields[job.output_field].metadata if isinstance(m, Flag))
    for given in inputs:
        theirs = _absolute(given or "") + "/"
        if given and (ours.startswith(theirs) or theirs.startswith(ours)):
            raise UsageError(f"{flag} {job.output}: overlaps the input {given}; choose another folder")


def _absolute(url: str) -> str:
    return url.rstrip("/") if "://" in url else os.path.realpath(url)


def require_same_tokenizer(policy: PolicyFolder, digest: str, where: str) -> None:
    """Refuse a policy whose tokenizer isn't the one that the rollouts were made with.

    Raises:
        InputRefused: the digests differ.
    """
    if policy.tokenizer_digest != digest:
        raise InputRefused(
            f"{policy.ref}: tokenizer {policy.tokenizer_digest[:12]}… differs from {digest[:12]}… of {where}; "
            "both stages must use one tokenizer and chat template"
        )
