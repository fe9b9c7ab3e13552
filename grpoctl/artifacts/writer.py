"""Writing an artifact: shards by any number of attempts, each recorded exclusively, and the manifest last."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa

from grpoctl import __version__
from grpoctl.artifacts.artifact import MANIFEST_NAME, SHARDS_FOLDER, Artifact, pq, read_manifest
from grpoctl.artifacts.canonical import canonical_json, sha256_json, table_digest
from grpoctl.artifacts.manifest import ArtifactFile, Manifest, Parent, Shard
from grpoctl.artifacts.storage import (
    Location,
    create_exclusively,
    locate,
    put_file,
    read_bytes,
    read_if_there,
    sha256_bytes,
    sha256_file,
    write_bytes,
)
from grpoctl.artifacts.tables import SCHEMA_VERSION_KEY, TABLE_KEY, Table
from grpoctl.errors import Conflict

ROW_GROUP_ROWS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an artifact will be: everything that defines it, and what is known before the work starts."""

    stage: str
    table: Table | None
    definition: Mapping[str, Any]
    config: Mapping[str, Any]
    parents: Sequence[Parent] = ()
    num_shards: int = 1

    @property
    def fingerprint(self) -> str:
        """sha256 of the definition's canonical JSON."""
        return sha256_json(self.definition)


def committed(url: str, work: Work) -> Artifact | None:
    """Return the artifact where this very work is committed already, None where nothing is.

    Raises:
        Conflict: another work is committed there, or its shards lie there; the keys that differ are named.
    """
    artifact = read_manifest(url)
    if artifact is not None:
        if artifact.manifest.fingerprint != work.fingerprint:
            raise conflict(url, artifact.manifest.definition, work.definition)
        return artifact
    for index in range(work.num_shards):
        shard = _read_shard_record(locate(url), index)
        if shard is not None and shard.fingerprint != work.fingerprint:
            raise Conflict(
                f"{url}: holds unfinished shards of other work (fingerprint {shard.fingerprint[:12]}…, "
                f"this is {work.fingerprint[:12]}…); choose another --out or remove the folder"
            )
    return None


def conflict(url: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Conflict:
    """Return the error that names which keys of two definitions differ."""
    differing = list(differences(found, wanted))
    shown = "; ".join(f"{key}: {before} → {after}" for key, before, after in differing[:6])
    more = f" and {len(differing) - 6} more" if len(differing) > 6 else ""
    return Conflict(f"{url}: committed from other inputs or settings ({shown}{more}); choose another --out")


def differences(
    found: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield (key path, value found, value wanted) wherever two nested mappings differ."""
    for key in sorted({*found, *wanted}):
        path = f"{prefix}{key}"
        before, after = found.get(key), wanted.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(cast("Mapping[str, Any]", before), cast("Mapping[str, Any]", after), f"{path}.")
        elif canonical_json(before) != canonical_json(after):
            yield path, _short(before), _short(after)


def _short(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _read_shard_record(location: Location, index: int) -> Shard | None:
    data = read_if_there(location.child(f"{SHARDS_FOLDER}/{index:05d}.json"))
    return None if data is None else Shard.model_validate_json(data)


@dataclass(slots=True, kw_only=True)
class ArtifactWriter:
    """Writes one artifact shard by shard, then commits it."""

    url: str
    work: Work
    attempt: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    files: list[ArtifactFile] = field(default_factory=list[ArtifactFile])

    @property
    def location(self) -> Location:
        """Where the artifact will be."""
        return locate(self.url)

    def missing_shards(self, selected: Sequence[int] | None = None) -> list[int]:
        """Return the shards still to be written, of all or of the selected ones."""
        wanted = range(self.work.num_shards) if selected is None else selected
        return [index for index in wanted if _read_shard_record(self.location, index) is None]

    def write_shard(
        self, index: int, table: pa.Table, *, counts: Mapping[str, int], stats: Mapping[str, Any] | None = None
    ) -> Shard:
        """Write a shard's part file, then its record; an equal shard committed by another writer stands."""
        schema = self.work.table
        assert schema is not None
        data = parquet_bytes(table, schema)
        part = f"data/part-{index:05d}-{self.attempt}.parquet"
        shard = Shard(
            index=index,
            part=part,
            bytes=len(data),
            sha256=sha256_bytes(data),
            content_digest=content_digest(table, schema),
            rows=table.num_rows,
            counts=dict(counts),
            attempt=self.attempt,
            fingerprint=self.work.fingerprint,
            stats=dict(stats or {}),
        )
        write_bytes(self.location.child(part), data)
        record = self.location.child(f"{SHARDS_FOLDER}/{index:05d}.json")
        if create_exclusively(record, shard.model_dump_json(indent=1).encode()):
            return shard
        theirs = Shard.model_validate_json(read_bytes(record))
        if theirs.fingerprint != self.work.fingerprint:
            raise Conflict(f"{record.url}: written by other work at the same time; choose another --out")
        return theirs

    def add_file(self, path: str, local: Path) -> None:
        """Put a finished local file into the artifact under `path`; a later change of `local` must not happen."""
        put_file(local, self.location.child(path), link=True)
        self.files.append(ArtifactFile(path=path, bytes=local.stat().st_size, sha256=sha256_file(local)))

    def commit(self, **facts: Any) -> Artifact | None:
        """Create the manifest when every shard is there; return None while some are missing.

        Args:
            facts: the manifest's remaining fields (rows, policy, sampling, stats, tokens, timings, environment); a
                callable takes the list of shards and returns the value.

        Raises:
            Conflict: another work was committed there meanwhile.
        """
        assert self.work.table is not None
        shards = [_read_shard_record(self.location, index) for index in range(self.work.num_shards)]
        done = [shard for shard in shards if shard is not None]
        if len(done) < len(shards):
            return None
        files = sorted(self.files, key=lambda file: file.path)
        settled: dict[str, Any] = {n: fact(done) if callable(fact) else fact for n, fact in facts.items()}
        manifest = Manifest(
            table=self.work.table.name,
            table_version=self.work.table.version,
            stage=self.work.stage,
            fingerprint=self.work.fingerprint,
            definition=dict(self.work.definition),
            content_digest=sha256_json(
                {"shards": [s.content_digest for s in done], "files": {f.path: f.sha256 for f in files}}
            ),
            config=dict(self.work.config),
            parents=list(self.work.parents),
            shards=done,
            files=files,
            grpoctl_version=__version__,
            **settled,
        )
        create_exclusively(self.location.child(MANIFEST_NAME), manifest.model_dump_json(indent=1).encode())
        artifact = committed(self.url, self.work)
        assert artifact is not None
        return artifact


def content_digest(table: pa.Table, schema: Table) -> str:
    """Return the digest of a table's rows without its volatile columns."""
    return table_digest(table.select([column.name for column in schema.columns if not column.volatile]))


def parquet_bytes(table: pa.Table, schema: Table) -> bytes:
    """Return a table as Parquet: zstd, page checksums, bounded row groups, schema version in the footer."""
    names = [column.name for column in schema.columns]
    assert table.column_names == names, f"{table.column_names} is not {names}"
    footer: dict[bytes, Any] = {
        **(table.schema.metadata or {}),
        TABLE_KEY: schema.name,
        SCHEMA_VERSION_KEY: str(schema.version),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata(footer),
        sink,
        compression="zstd",
        write_page_checksum=True,
        row_group_size=ROW_GROUP_ROWS,
        use_dictionary=[column.name for column in schema.columns if column.type == pa.large_string()],
    )
    return sink.getvalue().to_pybytes()
