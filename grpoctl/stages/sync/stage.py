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
from grpoctl.artifacts.writer import ArtifactWriter, Work
from grpoctl.engines.proof import forced_logprobs, gap_between
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.engines.warm import Warm, set_threads
from grpoctl.errors import Conflict, GateFailed, InputRefused, UsageError
from grpoctl.inputs.policies import ADAPTER, POINTER, POLICY_RECORD, PROBE_RECORD, open_policy, tensor_digests
from grpoctl.settings.jobs import SyncJob
from grpoctl.stages.context import Context
from grpoctl.stages.stage import Definition, Facts, Prepared, Stage, StageResult
from grpoctl.stages.sync.hub import is_hub, open_hub
from grpoctl.stages.sync.servers import load_servers


def version_name(version: int) -> str:
    """Return the folder name of a published version."""
    return f"v{version:06d}"


class Destination(Protocol):
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

    def complete(self, name: str, digest: str, warm: Warm) -> dict[str, Any]:
        """Do again what comes after the publishing of the current version; return facts."""
        ...

    def publish(self, folder: Path, name: str, warm: Warm) -> dict[str, Any]:
        """Publish a verified folder and make it the current version; return facts."""
        ...

    def digest(self, name: str) -> str:
        """Return the weights digest of a published version."""
        ...

    def point_to(self, name: str, version: int, digest: str, warm: Warm) -> dict[str, Any]:
        """Make an earlier version the current one; return facts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncInputs:
    """Where to, and what: an update, or a version that is published already; its weights digest."""

    destination: Destination
    update: Artifact | None
    name: str
    version: int
    digest: str

    @property
    def facts(self) -> dict[str, Any]:
        """What is told of it in any case."""
        return {"version": self.version, "weights_digest": self.digest}


def open_inputs(job: SyncJob) -> SyncInputs:
    """Look at the destination and open the update.

    Raises:
        UsageError: neither an update nor a version to roll back to is named, or servers together with the hub.
        InputRefused: something else than an update.
    """
    if job.rollback is None and job.update is None:
        raise UsageError("name the update artifact with --update, or a version with --rollback")
    destination: Destination = (
        open_hub(job.to, job.servers) if is_hub(job.to) else FolderDestination(job=job, place=locate(job.to))
    )
    if job.rollback is not None:
        name, version = version_name(job.rollback), job.rollback
        digest = destination.digest(name)
        return SyncInputs(destination=destination, update=None, name=name, version=version, digest=digest)
    assert job.update is not None
    update = open_artifact(job.update, table="steps")
    policy = update.manifest.policy
    assert policy is not None
    return SyncInputs(
        destination=destination,
        update=update,
        name=version_name(policy.version),
        version=policy.version,
        digest=policy.weights_digest,
    )


def define(job: SyncJob, inputs: SyncInputs) -> Definition:
    """Return what is published; the version's record, not a manifest, tells it from others."""
    return Definition(values={"stage": "sync", **inputs.facts})


def already_current(job: SyncJob, inputs: SyncInputs, work: Work, context: Context) -> StageResult | None:
    """Return the result where this version is published and current, after what comes last was done again.

    Raises:
        Conflict: the version was published from other weights.
    """
    if inputs.update is None:
        return None
    destination, name, facts = inputs.destination, inputs.name, inputs.facts
    if not destination.is_current(name, inputs.version, inputs.digest):
        return None
    if not context.dry_run:
        facts |= destination.complete(name, inputs.digest, context.warm)
    return StageResult(stage="sync", out=destination.ref(name), state="already_done", artifact=None, facts=facts)


def prepare(job: SyncJob, inputs: SyncInputs, context: Context) -> Prepared[SyncInputs]:
    """Refuse a destination where nothing can be published."""
    if inputs.update is not None:
        inputs.destination.check()
    return Prepared(plan=inputs, facts=inputs.facts, out=inputs.destination.ref(inputs.name))


def compute(job: SyncJob, inputs: SyncInputs, writer: ArtifactWriter, context: Context) -> Facts:
    """Publish an update's policy, or go back to an earlier version.

    Raises:
        InputRefused: files that differ from the manifest, or tensors that differ in name or shape from the parent's.
        GateFailed: the published folder, or a server that loaded it, doesn't answer like the update engine on the probe.
        Conflict: another policy is published under this version.
    """
    destination, name, update, facts = inputs.destination, inputs.name, inputs.update, inputs.facts
    out = destination.ref(name)
    if update is None:
        told = destination.point_to(name, inputs.version, inputs.digest, context.warm)
        return Facts(stats={**facts, **told}, out=out)
    started = time.monotonic()
    with destination.scratch() as scratch:
        folder = update.fetch_files("policy", Path(scratch) / "policy")
        if job.sync.adapters == "beside" and update.has_files(ADAPTER):
            update.fetch_files(ADAPTER, folder / ADAPTER)
        num_tensors = _compare_with_parent(update, folder)
        gap = _probe_gap(job, update, folder)
        facts |= destination.publish(folder, name, context.warm)
    facts |= {"num_tensors": num_tensors, "probe_gap_max": gap, "seconds": time.monotonic() - started}
    return Facts(stats=facts, out=out)


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


def _probe_gap(job: SyncJob, update: Artifact, folder: Path) -> float | None:
    """Load the folder afresh and compare its log-probabilities on the stored rows with the update engine's."""
    from grpoctl.engines.torch.model import load_policy

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
    lengths = [len(ids) for ids in probe["completion_ids"]]
    if [len(values) for values in probe["logprobs"]] != lengths:
        raise InputRefused(f"{update.url}: {PROBE_RECORD} holds other numbers of log-probabilities than of tokens")
    found = forced_logprobs(model, probe["prompt_ids"], probe["completion_ids"])
    gap = gap_between(found, probe["logprobs"]).max
    if not gap <= job.sync.max_probe_gap:
        raise GateFailed(
            f"{update.url}: the reloaded policy's log-probabilities differ by {gap:.3g} nats from the update engine's, "
            f"limit {job.sync.max_probe_gap} (sync.max_probe_gap); these are not the trained weights"
        )
    return gap


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderDestination:
    """A folder of versions on a file system: the files first, a version's record last, and only then CURRENT."""

    job: SyncJob
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

    def complete(self, name: str, digest: str, warm: Warm) -> dict[str, Any]:
        """Load the servers: they may have been restarted since, or were down then; return facts."""
        return self._load_servers(name, warm)

    def publish(self, folder: Path, name: str, warm: Warm) -> dict[str, Any]:
        """Copy the files, have servers load them, and point CURRENT there; return facts.

        Raises:
            Conflict: another policy was published meanwhile.
        """
        _publish(folder, self.place.child(name))
        record = PolicyRecord.model_validate_json((folder / POLICY_RECORD).read_bytes())
        return self.point_to(name, record.version, record.weights_digest, warm)

    def digest(self, name: str) -> str:
        """Return the weights digest of a published version, whose files are checked.

        Raises:
            InputRefused: there is no such version, or its files aren't those of its record.
        """
        if read_if_there(self.place.child(f"{name}/{POLICY_RECORD}")) is None:
            raise InputRefused(f"{self.ref(name)}: no such published version; see the folders in {self.job.to}")
        return open_policy(self.place.child(name).url).weights_digest

    def point_to(self, name: str, version: int, digest: str, warm: Warm) -> dict[str, Any]:
        """Have servers load a published version, and only then point CURRENT there; return facts."""
        facts = self._load_servers(name, warm)
        pointer = {"name": name, "version": version, "weights_digest": digest}
        write_bytes(self.place.child(POINTER), json.dumps(pointer).encode())
        return facts

    def _load_servers(self, name: str, warm: Warm) -> dict[str, Any]:
        gaps = load_servers(self.job, warm, self.place.child(name))
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


STAGE = Stage(
    name="sync",
    job=SyncJob,
    table=None,
    reads=lambda job: () if job.rollback is not None else (job.update,),
    open=open_inputs,
    define=define,
    prepare=prepare,
    compute=compute,
    already=already_current,
)
