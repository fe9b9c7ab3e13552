"""Artifacts: a folder that exists only once its manifest does.

Part files may be written by any number of attempts; a shard's record is created exclusively and names the part that
counts; the manifest is created exclusively, last. Readers go through the manifest, never through a listing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa
import pyarrow.parquet
from pydantic import ValidationError

from grpoctl import __version__
from grpoctl.artifacts.manifest import MANIFEST_SCHEMA, ArtifactFile, Manifest, Parent
from grpoctl.artifacts.storage import (
    Location,
    exists,
    get_file,
    locate,
    read_if_there,
    sha256_bytes,
    sha256_file,
)
from grpoctl.artifacts.tables import TABLES
from grpoctl.errors import InputRefused

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
