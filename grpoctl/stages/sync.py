"""Verify an update's policy and publish it: the folder first, its record last, and only then the pointer CURRENT."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from grpoctl.artifacts import Artifact, open_artifact
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.errors import Conflict, GateFailed, InputRefused, UsageError
from grpoctl.jobs import SyncJob
from grpoctl.policies import POINTER, POLICY_RECORD, PROBE_RECORD, open_policy, tensor_digests
from grpoctl.schema.manifest import PolicyRecord
from grpoctl.stages.base import Context, StageResult, check_outside, set_threads
from grpoctl.stages.sync_servers import load_servers
from grpoctl.storage import (
    Location,
    check_writable,
    create_exclusively,
    locate,
    put_file,
    read_bytes,
    read_if_there,
    storage_errors,
    write_bytes,
)


def version_name(version: int) -> str:
    """Return the folder name of a published version."""
    return f"v{version:06d}"


def run(job: SyncJob, context: Context) -> StageResult:
    """Publish an update's policy under `to`, or point CURRENT back at an earlier version.

    Raises:
        UsageError: neither an update nor a version to roll back to is named.
        InputRefused: files that differ from the manifest, or tensors that differ in name or shape from the parent's.
        GateFailed: the published folder, or a server that loaded it, doesn't answer like the update engine on the probe.
        Conflict: another policy is published under this version.
    """
    target = locate(job.to)
    if job.rollback is not None:
        return _roll_back(job, context, target, job.rollback)
    if job.update is None:
        raise UsageError("name the update artifact with --update, or a version with --rollback")
    check_outside(job.to, job.update, flag="--to")
    update = open_artifact(job.update, table="steps")
    identity = update.manifest.policy
    assert identity is not None
    name = version_name(identity.version)
    facts: dict[str, Any] = {"version": identity.version, "weights_digest": identity.weights_digest}
    if _is_current(target, name, identity.weights_digest):
        if not context.dry_run:  # servers may have been restarted since, or were down then
            facts |= _served(job, context, target.child(name))
        return StageResult(stage="sync", out=f"{job.to}/{name}", state="already_done", artifact=None, facts=facts)
    check_writable(target)
    if context.dry_run:
        return StageResult(stage="sync", out=f"{job.to}/{name}", state="planned", artifact=None, facts=facts)
    started = time.monotonic()
    with storage_errors(target):
        scratch = tempfile.TemporaryDirectory(dir=_scratch(target), prefix=".tmp-sync-")
    with scratch:
        folder = update.fetch_files("policy", Path(scratch.name) / "policy")
        num_tensors = _compare_with_parent(update, folder)
        gap = _probe_gap(job, context, update, folder)
        _publish(folder, target.child(name))
    facts |= _served(job, context, target.child(name))
    _point(target, name, identity.version, identity.weights_digest)
    facts |= {"num_tensors": num_tensors, "probe_gap_max": gap, "seconds": time.monotonic() - started}
    return StageResult(stage="sync", out=f"{job.to}/{name}", state="done", artifact=None, facts=facts)


def _scratch(target: Location) -> str | None:
    if not target.is_local:
        return None
    Path(target.path).mkdir(parents=True, exist_ok=True)
    return target.path


def _is_current(target: Location, name: str, digest: str) -> bool:
    pointer, record = read_if_there(target.child(POINTER)), read_if_there(target.child(f"{name}/{POLICY_RECORD}"))
    if record is None:
        return False
    published = PolicyRecord.model_validate_json(record)
    if published.weights_digest != digest:
        raise Conflict(
            f"{target.url}/{name}: published from another update (weights {published.weights_digest[:12]}…, this one has "
            f"{digest[:12]}…); publish to another folder"
        )
    return pointer is not None and int(json.loads(pointer)["version"]) >= published.version


def _compare_with_parent(update: Artifact, folder: Path) -> int:
    """Refuse a policy whose tensors aren't the parent's in name and shape (tied weights stay tied); return their number."""
    record = PolicyRecord.model_validate_json((folder / POLICY_RECORD).read_bytes())
    parent = open_policy(str(update.manifest.config["policy"]))
    if parent.weights_digest != record.parent_digest:
        raise InputRefused(
            f"{parent.ref}: no longer the policy that {update.url} was made from; restore it, its tensors are compared"
        )
    ours, theirs = tensor_digests(folder), tensor_digests(parent.folder)
    if set(ours) != set(theirs):
        differing = sorted(set(ours) ^ set(theirs))
        raise InputRefused(f"{update.url}: tensors differ from {parent.ref}: {differing[:5]}; the export is broken")
    for name, (_, shape, _) in ours.items():
        if shape != theirs[name][1]:
            raise InputRefused(f"{update.url}: {name} has shape {shape}, {parent.ref} has {theirs[name][1]}")
    return len(ours)


def _probe_gap(job: SyncJob, context: Context, update: Artifact, folder: Path) -> float | None:
    """Load the folder afresh and compare its log-probabilities on the stored rows with the update engine's."""
    from grpoctl.engines.hf_model import load_policy
    from grpoctl.stages.probe import largest_gap, probe_logprobs

    set_threads(job.runtime)
    probe = json.loads((folder / PROBE_RECORD).read_bytes())
    if not probe["sample_ids"]:
        return None
    model = load_policy(
        folder,
        ref=f"{update.url}/policy",
        vocab_size=load_tokenizer(folder, update.url).vocab_size,
        device=job.runtime.device,
        dtype=str(update.manifest.config["update"]["dtype"]),
    )
    found = probe_logprobs(model, probe["prompt_ids"], probe["completion_ids"])
    gap = largest_gap(found, probe["logprobs"])
    if not gap <= job.sync.max_probe_gap:
        raise GateFailed(
            f"{update.url}: the reloaded policy's log-probabilities differ by {gap:.3g} nats from the update engine's, "
            f"limit {job.sync.max_probe_gap} (sync.max_probe_gap); these are not the trained weights"
        )
    return gap


def _publish(folder: Path, place: Location) -> None:
    """Copy all files, config.json next to last, then create the record exclusively: without it nothing is published."""
    late = ("config.json", POLICY_RECORD)
    for path in sorted(folder.iterdir()):
        if path.name not in late:
            put_file(path, place.child(path.name), link=True)
    put_file(folder / "config.json", place.child("config.json"), link=True)
    record = (folder / POLICY_RECORD).read_bytes()
    if not create_exclusively(place.child(POLICY_RECORD), record):
        theirs = PolicyRecord.model_validate_json(read_bytes(place.child(POLICY_RECORD)))
        if theirs.weights_digest != PolicyRecord.model_validate_json(record).weights_digest:
            raise Conflict(f"{place.url}: another policy was published here meanwhile; publish to another folder")


def _point(target: Location, name: str, version: int, digest: str) -> None:
    pointer = {"name": name, "version": version, "weights_digest": digest}
    write_bytes(target.child(POINTER), json.dumps(pointer).encode())


def _served(job: SyncJob, context: Context, place: Location) -> dict[str, Any]:
    gaps = load_servers(job, context, place)
    return {"server_gap_max": gaps} if gaps else {}


def _roll_back(job: SyncJob, context: Context, target: Location, version: int) -> StageResult:
    name = version_name(version)
    record = read_if_there(target.child(f"{name}/{POLICY_RECORD}"))
    if record is None:
        raise InputRefused(f"{job.to}/{name}: no such published version; see the folders in {job.to}")
    policy = open_policy(target.child(name).url)
    facts: dict[str, Any] = {"version": version, "weights_digest": policy.weights_digest}
    if context.dry_run:
        return StageResult(stage="sync", out=f"{job.to}/{name}", state="planned", artifact=None, facts=facts)
    facts |= _served(job, context, target.child(name))
    _point(target, name, version, policy.weights_digest)
    return StageResult(stage="sync", out=f"{job.to}/{name}", state="done", artifact=None, facts=facts)
