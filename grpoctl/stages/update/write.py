"""Write an update's artifact: the new policy whole, the optimizer's state, probe rows, and the table of steps."""

from __future__ import annotations

import json
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from grpoctl.artifacts.artifact import Artifact, ArtifactWriter, Work, parquet_bytes
from grpoctl.artifacts.manifest import PolicyIdentity, PolicyRecord, RowAccounting
from grpoctl.artifacts.storage import locate, storage_errors
from grpoctl.artifacts.tables import STEPS, TOKEN_STATS
from grpoctl.errors import GateFailed
from grpoctl.inputs.policies import ADAPTER, POLICY_RECORD, PROBE_RECORD, Policy, policy_files, weights_digest
from grpoctl.processes.ranks import ALONE, Ranks
from grpoctl.settings.jobs import UpdateJob
from grpoctl.stages.probe import probe_logprobs
from grpoctl.stages.stage import environment
from grpoctl.stages.update.batches import TrainingRows
from grpoctl.stages.update.report import summary

STATE = "trainer_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateInputs:
    """The artifacts and the policy that an update starts from."""

    rollouts: Artifact
    scores: Artifact
    logprobs: Artifact | None
    resume: Artifact | None
    policy: Policy

    @property
    def first_step(self) -> int:
        """Global steps taken before this update."""
        return int(self.resume.manifest.stats["global_step"]) if self.resume else 0

    @property
    def digest(self) -> str:
        """Content digest of the rollouts: the identity of this batch."""
        return self.rollouts.manifest.content_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What the steps left behind: the engine, their rows of the steps table, per-token values, and seconds."""

    trainer: Any
    steps: list[dict[str, Any]]
    tokens: dict[int, dict[str, Any]]
    seconds: float = 0.0


def write_update(
    job: UpdateJob,
    work: Work,
    inputs: UpdateInputs,
    data: TrainingRows,
    trained: Trained,
    *,
    ranks: Ranks = ALONE,
) -> tuple[ArtifactWriter, Artifact, str] | None:
    """Write and commit everything an update leaves behind; all ranks gather, the first one writes.

    Returns:
        The writer, the committed artifact (another writer's, where that one was first), and our weights' digest; None on
        the other ranks, once it is committed.

    Raises:
        GateFailed: no step was taken, or the new policy answers with numbers that are not finite.
    """
    started = time.monotonic()
    probe = ranks.share(_probe(job, data, trained.trainer))
    with ranks.agreed():
        _check(job, trained.steps, probe)
    with (
        storage_errors(locate(job.out)),
        tempfile.TemporaryDirectory(
            dir=_scratch(job.out) if ranks.is_first else None, prefix=".tmp-update-"
        ) as scratch,
    ):
        folder = Path(scratch)
        trained.trainer.export(folder / "policy", adapter=folder / ADAPTER)
        trained.trainer.save_state(folder / STATE)
        with ranks.agreed():  # nobody failed on the way; the others wait here for the commit
            if ranks.is_first:
                return _commit(job, work, inputs, data, trained, files=_Files(folder, probe, started))
    return None


def _check(job: UpdateJob, steps: list[dict[str, Any]], probe: dict[str, Any]) -> None:
    if steps and all(step["status"] != "ok" for step in steps):
        raise GateFailed(
            f"{job.out}: no step was taken in {len(steps)}; all tokens are masked or all steps were skipped"
        )
    if not all(math.isfinite(value) for row in probe["logprobs"] for value in row):
        raise GateFailed(
            f"{job.out}: the new policy's log-probabilities are not finite after {len(steps)} steps; nothing committed: "
            "lower update.lr or set update.max_ratio"
        )


@dataclass(frozen=True, slots=True)
class _Files:
    """What lies in the scratch folder, the probe to be put beside it, and when writing began."""

    folder: Path
    probe: dict[str, Any]
    started: float


def _commit(
    job: UpdateJob, work: Work, inputs: UpdateInputs, data: TrainingRows, trained: Trained, *, files: _Files
) -> tuple[ArtifactWriter, Artifact, str]:
    folder, steps = files.folder, trained.steps
    writer = ArtifactWriter(url=job.out, work=work)
    digest = _complete_policy(folder / "policy", inputs, work.fingerprint)
    (folder / "policy" / PROBE_RECORD).write_text(json.dumps(files.probe))
    if trained.tokens:
        (folder / "token_stats.parquet").write_bytes(parquet_bytes(_token_table(data, trained.tokens), TOKEN_STATS))
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            writer.add_file(path.relative_to(folder).as_posix(), path)
    schema = STEPS.arrow_schema()
    named = [{"step": number, **step} for number, step in enumerate(steps)]
    writer.write_shard(0, pa.Table.from_pylist(named, schema=schema), counts={"ok": len(steps)})
    identity = PolicyIdentity(
        ref=f"{job.out}/policy",
        version=inputs.policy.version + 1,
        weights_digest=digest,
        tokenizer_digest=inputs.policy.tokenizer_digest,
    )
    total = len(data.rows.sample_ids)
    artifact = writer.commit(
        rows=RowAccounting(input=total, ok=len(data.trainable), skipped=total - len(data.trainable), failed=0),
        policy=identity,
        sampling=inputs.rollouts.manifest.sampling,
        stats=summary(steps, first_step=inputs.first_step),
        tokens={"trained": sum(step["num_tokens"] for step in steps)},
        timings={"training_seconds": trained.seconds, "writing_seconds": time.monotonic() - files.started},
        environment=environment(),
    )
    assert artifact is not None
    return writer, artifact, digest


def _scratch(out: str) -> str | None:
    """Return a folder on the output's disk, so that finished files are linked and not copied; None for object stores."""
    location = locate(out)
    if not location.is_local:
        return None
    Path(location.path).mkdir(parents=True, exist_ok=True)
    return location.path


def _complete_policy(folder: Path, inputs: UpdateInputs, fingerprint: str) -> str:
    """Put beside the trainer's weights everything else as the parent has it, and the record; return their digest."""
    for path in policy_files(inputs.policy.folder):
        content = path.read_bytes()
        if path.name == "config.json":
            config = json.loads(content)
            key = "dtype" if "dtype" in config or "torch_dtype" not in config else "torch_dtype"
            config[key] = "float32"
            content = (json.dumps(config, indent=2) + "\n").encode()
        (folder / path.name).write_bytes(content)
    digest = weights_digest(folder)
    record = PolicyRecord(
        version=inputs.policy.version + 1,
        parent_digest=inputs.policy.weights_digest,
        weights_digest=digest,
        tokenizer_digest=inputs.policy.tokenizer_digest,
        update_fingerprint=fingerprint,
        consumed=[*inputs.policy.consumed, inputs.digest],
        dtype="float32",
        adapter_digest=weights_digest(adapter) if (adapter := folder.parent / ADAPTER).is_dir() else None,
    )
    (folder / POLICY_RECORD).write_text(record.model_dump_json(indent=1))
    return digest


def _probe(job: UpdateJob, data: TrainingRows, trainer: Any) -> dict[str, Any]:
    """Return a few completions with their log-probabilities under the new policy, at temperature 1."""
    apart = max(1, len(data.trainable) // max(1, job.update.num_probe_rows))
    rows = data.trainable[::apart][: job.update.num_probe_rows]  # of different prompts: a probe sees more of the model
    prompts = [data.rows.prompt_ids[row].tolist() for row in rows]
    completions = [data.rows.completion_ids[row].tolist() for row in rows]
    return {
        "sample_ids": [data.rows.sample_ids[row] for row in rows],
        "prompt_ids": prompts,
        "completion_ids": completions,
        "logprobs": probe_logprobs(trainer.policy, prompts, completions),
        "dtype": job.update.dtype,
    }


def _token_table(data: TrainingRows, tokens: dict[int, dict[str, Any]]) -> pa.Table:
    rows = sorted(tokens)
    columns: dict[str, Any] = {"sample_id": [data.rows.sample_ids[row] for row in rows]}
    for column in TOKEN_STATS.columns[1:]:
        columns[column.name] = [tokens[row].get(column.name) for row in rows]
    schema = TOKEN_STATS.arrow_schema()
    return pa.table({f.name: pa.array(columns[f.name], type=f.type) for f in schema}, schema=schema)
