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

from grpoctl.artifacts.manifest import PolicyIdentity, PolicyRecord, RowAccounting
from grpoctl.artifacts.storage import locate, storage_errors
from grpoctl.artifacts.tables import STEPS, TOKEN_STATS
from grpoctl.artifacts.writer import ArtifactWriter, parquet_bytes
from grpoctl.engines.proof import forced_logprobs
from grpoctl.errors import GateFailed
from grpoctl.inputs.policies import ADAPTER, POLICY_RECORD, PROBE_RECORD, policy_files, weights_digest
from grpoctl.processes.ranks import Ranks
from grpoctl.settings.jobs import UpdateJob
from grpoctl.stages.stage import Facts
from grpoctl.stages.update.batches import TrainingRows
from grpoctl.stages.update.inputs import STATE, UpdateInputs, UpdatePlan
from grpoctl.stages.update.report import summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What the steps left behind: the engine, their rows of the steps table, per-token values, and seconds."""

    trainer: Any
    steps: list[dict[str, Any]]
    tokens: dict[int, dict[str, Any]]
    seconds: float = 0.0


def write_update(job: UpdateJob, plan: UpdatePlan, trained: Trained, writer: ArtifactWriter, ranks: Ranks) -> Facts:
    """Write everything an update leaves behind; all ranks gather, the first one writes.

    Raises:
        GateFailed: no step was taken, or the new policy answers with numbers that are not finite.
    """
    started = time.monotonic()
    inputs, data, steps = plan.inputs, plan.data, trained.steps
    probe = ranks.broadcast(_probe(job, data, trained.trainer))
    with ranks.agreed():
        _check(job, steps, probe)
    digest = ""
    with (
        storage_errors(locate(job.out)),
        tempfile.TemporaryDirectory(
            dir=_scratch(job.out) if ranks.is_first else None, prefix=".tmp-update-"
        ) as scratch,
    ):
        folder = Path(scratch)
        trained.trainer.export(folder / "policy", adapter=folder / ADAPTER)
        trained.trainer.save_state(folder / STATE)
        with ranks.agreed():  # nobody failed on the way; the others wait here
            if ranks.is_first:
                digest = _complete_policy(folder / "policy", inputs, writer.work.fingerprint)
                (folder / "policy" / PROBE_RECORD).write_text(json.dumps(probe))
                _add_files(writer, folder, plan, trained)
    total = len(data.rows.sample_ids)
    identity = PolicyIdentity(
        ref=f"{job.out}/policy",
        version=inputs.policy.version + 1,
        weights_digest=digest,
        tokenizer_digest=inputs.policy.tokenizer_digest,
    )
    return Facts(
        rows=RowAccounting(input=total, ok=len(data.trainable), skipped=total - len(data.trainable), failed=0),
        policy=identity,
        sampling=inputs.sampling,
        stats=summary(steps, first_step=inputs.first_step),
        tokens={"trained": sum(step["num_tokens"] for step in steps)},
        timings={"training_seconds": trained.seconds, "writing_seconds": time.monotonic() - started},
    )


def _add_files(writer: ArtifactWriter, folder: Path, plan: UpdatePlan, trained: Trained) -> None:
    """Put the policy, the state and the tables into the artifact."""
    if trained.tokens:
        table = _token_table(plan.data, trained.tokens)
        (folder / "token_stats.parquet").write_bytes(parquet_bytes(table, TOKEN_STATS))
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            writer.add_file(path.relative_to(folder).as_posix(), path)
    named = [{"step": number, **step} for number, step in enumerate(trained.steps)]
    steps = pa.Table.from_pylist(named, schema=STEPS.arrow_schema())
    writer.write_shard(0, steps, counts={"ok": len(named)})


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
        "logprobs": forced_logprobs(trainer.policy, prompts, completions),
        "dtype": job.update.dtype,
    }


def _token_table(data: TrainingRows, tokens: dict[int, dict[str, Any]]) -> pa.Table:
    rows = sorted(tokens)
    columns: dict[str, Any] = {"sample_id": [data.rows.sample_ids[row] for row in rows]}
    for column in TOKEN_STATS.columns[1:]:
        columns[column.name] = [tokens[row].get(column.name) for row in rows]
    return TOKEN_STATS.build(columns)
