"""Verify an update's policy and publish it: to a folder of versions, or to the Hugging Face hub."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpoctl.artifacts.artifact import Artifact, open_artifact
from grpoctl.artifacts.manifest import PolicyRecord
from grpoctl.artifacts.storage import (
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
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.errors import Conflict, GateFailed, InputRefused, UsageError
from grpoctl.inputs.policies import ADAPTER, POINTER, POLICY_RECORD, PROBE_RECORD, open_policy, tensor_digests
from grpoctl.settings.jobs import SyncJob
from grpoctl.stages.stage import Context, StageResult, check_outside, set_threads
from grpoctl.stages.sync.hub import is_hub, open_hub
from grpoctl.stages.sync.servers import load_servers


def version_name(version: int) -> str:
    """Return the folder name of a published version."""
    return f"v{version:06d}"


class Target(Protocol):
    """Where versions of a policy are published, with one of them the current one."""

    def ref(self, name: str) -> str:
        """Return the REF of a version."""
        ...

    def is_current(self, name: str, version: int, digest: str) -> bool:
        """Return whether a version is published and the current one isn't behind it; refuse one with other weights."""
        ...

    def check(self) -> None:
        """Refuse a place where nothing can be published."""
        ...

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        """Return a temporary folder for the files to be published."""
        ...

    def complete(self, name: str, digest: str) -> dict[str, Any]:
        """Do again what comes after the publishing of the current version; return facts."""
        ...

    def publish(self, folder: Path, name: str) -> dict[str, Any]:
        """Publish a verified folder and make it the current version; return facts."""
        ...

    def digest(self, name: str) -> str:
        """Return the weights digest of a published version."""
        ...

    def point_to(self, name: str, version: int, digest: str) -> dict[str, Any]:
        """Make an earlier version the current one; return facts."""
        ...


def run(job: SyncJob, context: Context) -> StageResult:
    """Publish an update's policy under `to`, or go back to an earlier version there.

    Raises:
        UsageError: neither an update nor a version to roll back to is named, or servers together with the hub.
        InputRefused: files that differ from the manifest, or tensors that differ in name or shape from the parent's.
        GateFailed: the published folder, or a server that loaded it, doesn't answer like the update engine on the probe.
        Conflict: another policy is published under this version.
    """
    if job.rollback is None and job.update is None:
        raise UsageError("name the update artifact with --update, or a version with --rollback")
    target: Target = (
        open_hub(job.to, job.servers) if is_hub(job.to) else Folder(job=job, context=context, place=locate(job.to))
    )
    if job.rollback is not None:
        return _roll_back(target, job.rollback, dry_run=context.dry_run)
    assert job.update is not None
    check_outside(job.to, job.update, flag="--to")
    update = open_artifact(job.update, table="steps")
    identity = update.manifest.policy
    assert identity is not None
    name, digest = version_name(identity.version), identity.weights_digest
    facts: dict[str, Any] = {"version": identity.version, "weights_digest": digest}
    if target.is_current(name, identity.version, digest):
        if not context.dry_run:
            facts |= target.complete(name, digest)
        return _result(target, name, "already_done", facts)
    target.check()
    if context.dry_run:
        return _result(target, name, "planned", facts)
    started = time.monotonic()
    with target.scratch() as scratch:
        folder = update.fetch_files("policy", Path(scratch) / "policy")
        if job.sync.adapters == "beside" and update.has_files(ADAPTER):
            update.fetch_files(ADAPTER, folder / ADAPTER)
        num_tensors = _compare_with_parent(update, folder)
        gap = _probe_gap(job, context, update, folder)
        facts |= target.publish(folder, name)
    facts |= {"num_tensors": num_tensors, "probe_gap_max": gap, "seconds": time.monotonic() - started}
    return _result(target, name, "done", facts)


def _roll_back(target: Target, version: int, *, dry_run: bool) -> StageResult:
    name = version_name(version)
    digest = target.digest(name)
    facts: dict[str, Any] = {"version": version, "weights_digest": digest}
    if dry_run:
        return _result(target, name, "planned", facts)
    return _result(target, name, "done", facts | target.point_to(name, version, digest))


def _result(target: Target, name: str, state: str, facts: dict[str, Any]) -> StageResult:
    return StageResult(stage="sync", out=target.ref(name), state=state, artifact=None, facts=facts)


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
    from grpoctl.engines.torch.model import load_policy
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder of versions on a file system: the files first, a version's record last, and only then CURRENT."""

    job: SyncJob
    context: Context
    place: Location

    def ref(self, name: str) -> str:
        """Return the folder of a version."""
        return f"{self.job.to}/{name}"

    def is_current(self, name: str, version: int, digest: str) -> bool:
        """Return whether these weights are published as this version and CURRENT isn't behind it.

        Raises:
            Conflict: the version was published from other weights.
        """
        pointer = read_if_there(self.place.child(POINTER))
        record = read_if_there(self.place.child(f"{name}/{POLICY_RECORD}"))
        if record is None:
            return False
        published = PolicyRecord.model_validate_json(record)
        if published.weights_digest != digest:
            raise Conflict(
                f"{self.place.url}/{name}: published from another update (weights {published.weights_digest[:12]}…, "
                f"this one has {digest[:12]}…); publish to another folder"
            )
        return pointer is not None and int(json.loads(pointer)["version"]) >= version

    def check(self) -> None:
        """Refuse a folder in which nothing can be created."""
        check_writable(self.place)

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        """Return a temporary folder, on the target's disk where that is a local one: published files are linked."""
        with storage_errors(self.place):
            if self.place.is_local:
                Path(self.place.path).mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryDirectory(
                dir=self.place.path if self.place.is_local else None, prefix=".tmp-sync-"
            )

    def complete(self, name: str, digest: str) -> dict[str, Any]:
        """Load the servers: they may have been restarted since, or were down then; return facts."""
        return self._served(name)

    def publish(self, folder: Path, name: str) -> dict[str, Any]:
        """Copy the files, have servers load them, and point CURRENT there; return facts.

        Raises:
            Conflict: another policy was published meanwhile.
        """
        _publish(folder, self.place.child(name))
        record = PolicyRecord.model_validate_json((folder / POLICY_RECORD).read_bytes())
        return self.point_to(name, record.version, record.weights_digest)

    def digest(self, name: str) -> str:
        """Return the weights digest of a published version, whose files are checked.

        Raises:
            InputRefused: there is no such version, or its files aren't those of its record.
        """
        if read_if_there(self.place.child(f"{name}/{POLICY_RECORD}")) is None:
            raise InputRefused(f"{self.ref(name)}: no such published version; see the folders in {self.job.to}")
        return open_policy(self.place.child(name).url).weights_digest

    def point_to(self, name: str, version: int, digest: str) -> dict[str, Any]:
        """Have servers load a published version, and only then point CURRENT there; return facts."""
        facts = self._served(name)
        pointer = {"name": name, "version": version, "weights_digest": digest}
        write_bytes(self.place.child(POINTER), json.dumps(pointer).encode())
        return facts

    def _served(self, name: str) -> dict[str, Any]:
        gaps = load_servers(self.job, self.context, self.place.child(name))
        return {"server_gap_max": gaps} if gaps else {}


def _publish(folder: Path, place: Location) -> None:
    """Copy all files, config.json next to last, then create the record exclusively: without it nothing is published."""
    late = ("config.json", POLICY_RECORD)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in late:
            put_file(path, place.child(path.relative_to(folder).as_posix()), link=True)
    put_file(folder / "config.json", place.child("config.json"), link=True)
    record = (folder / POLICY_RECORD).read_bytes()
    if not create_exclusively(place.child(POLICY_RECORD), record):
        theirs = PolicyRecord.model_validate_json(read_bytes(place.child(POLICY_RECORD)))
        if theirs.weights_digest != PolicyRecord.model_validate_json(record).weights_digest:
            raise Conflict(f"{place.url}: another policy was published here meanwhile; publish to another folder")
