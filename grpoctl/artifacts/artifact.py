"""Artifacts: a folder that exists only once its manifest does.

Part files may be written by any number of attempts; a shard's record is created exclusively and names the part that
counts; the manifest is created exclusively, last. Readers go through the manifest, never through a listing.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa
import pyarrow.parquet
from pydantic import ValidationError

from grpoctl import __version__
from grpoctl.artifacts.canonical import canonical_json, sha256_json, table_digest
from grpoctl.artifacts.manifest import MANIFEST_SCHEMA, ArtifactFile, Manifest, Parent, Shard
from grpoctl.artifacts.storage import (
    Location,
    create_exclusively,
    exists,
    get_file,
    locate,
    put_file,
    read_bytes,
    read_if_there,
    sha256_bytes,
    sha256_file,
    write_bytes,
)
from grpoctl.artifacts.tables import SCHEMA_VERSION_KEY, TABLE_KEY, TABLES, Table
from grpoctl.errors import Conflict, InputRefused

MANIFEST_NAME: Final = "_MANIFEST.json"
SHARDS_FOLDER: Final = "_shards"
ROW_GROUP_ROWS: Final = 512
pq: Any = pyarrow.parquet  # its stubs type half of every function


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A committed artifact, opened through its manifest."""

    url: str
    location: Location
    manifest: Manifest
    manifest_sha256: str

    def parent(self, role: str) -> Parent:
        """Return the lineage record for an artifact made from this one."""
        return Parent(
            role=role,
            url=self.url,
            fingerprint=self.manifest.fingerprint,
            manifest_sha256=self.manifest_sha256,
            content_digest=self.manifest.content_digest,
        )

    def read_shard(self, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return one shard after checking its size, digest and schema.

        Raises:
            InputRefused: the part is missing, truncated, changed, or of another schema.
        """
        shard = self.manifest.shards[index]
        place = self.location.child(shard.part)
        data = read_if_there(place)
        manifest_url = f"{self.url}/{MANIFEST_NAME}"
        remedy = f"restore it, or remove {self.url} and rerun its stage"
        if data is None:
            raise InputRefused(f"{place.url}: missing, but {manifest_url} names it; {remedy}")
        if len(data) != shard.bytes:
            raise InputRefused(
                f"{place.url}: {len(data)} bytes, but {manifest_url} says {shard.bytes}; "
                f"the file was truncated or replaced: {remedy}"
            )
        if sha256_bytes(data) != shard.sha256:
            raise InputRefused(f"{place.url}: content differs from the sha256 in {manifest_url}; {remedy}")
        try:
            table: pa.Table = pq.read_table(pa.BufferReader(data), columns=columns, page_checksum_verification=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise InputRefused(f"{place.url}: not a readable Parquet file ({error}); {remedy}") from error
        if columns is None:
            self._check_columns(table, place)
        return table

    def _check_columns(self, table: pa.Table, place: Location) -> None:
        expected = [column.name for column in TABLES[self.manifest.table].columns]
        if table.column_names != expected:
            raise InputRefused(
                f"{place.url}: columns {table.column_names}, expected {expected} of {self.manifest.table}"
            )

    def read_shards(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield every shard in order."""
        for shard in self.manifest.shards:
            yield self.read_shard(shard.index, columns)

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return all shards as one table."""
        return pa.concat_tables(self.read_shards(columns), promote_options="permissive")

    def has_files(self, prefix: str) -> bool:
        """Return whether the manifest names files under `prefix`."""
        return any(file.path.startswith(f"{prefix}/") for file in self.manifest.files)

    def fetch_files(self, prefix: str, folder: Path) -> Path:
        """Bring the files under `prefix` to a local folder, checked against the manifest; return the folder.

        Raises:
            InputRefused: there are none, or one differs from its digest.
        """
        wanted = [file for file in self.manifest.files if file.path.startswith(f"{prefix}/")]
        if not wanted:
            raise InputRefused(f"{self.url}: the manifest names no files under {prefix}/")
        for file in wanted:
            local = folder / file.path.removeprefix(f"{prefix}/")
            place = self.location.child(file.path)
            if not exists(place):
                raise InputRefused(
                    f"{place.url}: missing, but the manifest names it (dropped by runtime.keep_states?); remove "
                    f"{self.url} and rerun its stage"
                )
            get_file(place, local)
            check_file(local, file, place.url)
        return folder


def check_file(local: Path, file: ArtifactFile, url: str) -> None:
    """Raise InputRefused where a local copy isn't the file that the manifest names."""
    size = local.stat().st_size
    if size != file.bytes or sha256_file(local) != file.sha256:
        raise InputRefused(
            f"{url}: {size} bytes with another content than the manifest names ({file.bytes} bytes, "
            f"sha256 {file.sha256[:12]}…); restore it, or remove the artifact and rerun its stage"
        )


def read_manifest(url: str) -> Artifact | None:
    """Open an artifact, or return None where none is committed.

    Raises:
        InputRefused: the manifest can't be read, or was written by a newer grpoctl.
    """
    location = locate(url)
    data = read_if_there(location.child(MANIFEST_NAME))
    if data is None:
        return None
    where = f"{url}/{MANIFEST_NAME}"
    try:
        raw = json.loads(data)
    except ValueError as error:
        raise InputRefused(f"{where}: not JSON ({error}); restore it, or remove {url} and rerun its stage") from error
    _check_version(raw, where)
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputRefused(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}; not a manifest") from error
    return Artifact(url=url, location=location, manifest=manifest, manifest_sha256=sha256_bytes(data))


def _check_version(raw: Any, where: str) -> None:
    if not isinstance(raw, dict) or "table" not in raw:
        raise InputRefused(
            f"{where}: JSON without a table, expected a manifest; remove the artifact and rerun its stage"
        )
    said = cast("dict[str, Any]", raw)
    table, version, document = said["table"], said.get("table_version"), said.get("manifest_schema")
    known = TABLES[table].version if table in TABLES else 0
    if not isinstance(version, int) or version > known or document != MANIFEST_SCHEMA:
        raise InputRefused(
            f"{where}: table {table!r} version {version}, written by grpoctl {said.get('grpoctl_version', '?')} in manifest "
            f"version {document}; this is grpoctl {__version__}, which reads up to version {known} in manifest version "
            f"{MANIFEST_SCHEMA}: upgrade it"
        )


def open_artifact(url: str, *, table: str) -> Artifact:
    """Open a committed artifact of the expected table.

    Raises:
        InputRefused: nothing is committed there, or it is another kind of artifact.
    """
    artifact = read_manifest(url)
    if artifact is None:
        raise not_committed(url, expected=f"a committed {table} artifact")
    if artifact.manifest.table != table:
        raise InputRefused(f"{url}: holds {artifact.manifest.table}, expected {table}; name the right artifact")
    return artifact


def not_committed(url: str, *, expected: str) -> InputRefused:
    """Return the error of a place without a manifest."""
    state = "a folder without a manifest (unfinished work?)" if exists(locate(url)) else "nothing"
    return InputRefused(f"{url}: found {state}, expected {expected}; rerun the stage that makes it")


def refuse_our_files(url: str, names: Iterable[str]) -> None:
    """Refuse a folder that a user names as data where files of ours lie in it, committed or not.

    Args:
        url: the folder
        names: paths of the files below it

    Raises:
        InputRefused: with the artifact, or the unfinished work, that they belong to.
    """
    location = locate(url)
    for name in names:
        head, found, _ = name.partition(f"/{SHARDS_FOLDER}/")
        if not found:
            continue
        inner = head.removeprefix(location.path.rstrip("/")).strip("/")
        place = location.child(inner).url if inner else url
        if read_manifest(place) is None:
            raise not_committed(place, expected="data files, or a committed artifact")
        raise InputRefused(f"{url}: holds an artifact of grpoctl ({place}); name data files, or that artifact itself")


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
