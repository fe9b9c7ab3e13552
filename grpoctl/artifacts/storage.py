"""Bytes on any fsspec URL: checked reads, whole writes, and creation that exactly one writer wins.

Knows nothing of tables or stages. Bytes are always complete before they are sent: streaming into the final object would
publish half a file when an exception leaves the `with` block.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from grpoctl.errors import InputRefused, TryAgain, UsageError


@dataclass(frozen=True, slots=True)
class Location:
    """A place on a file system."""

    filesystem: Any
    path: str
    url: str

    @property
    def is_local(self) -> bool:
        """True on a disk of this machine, where hard links and renames exist."""
        return isinstance(self.filesystem, LocalFileSystem)

    def child(self, name: str) -> Location:
        """Return the place called `name` below this one; `name` may hold slashes."""
        return Location(self.filesystem, f"{self.path.rstrip('/')}/{name}", f"{self.url.rstrip('/')}/{name}")


def locate(url: str) -> Location:
    """Return the place that a URL or a local path names.

    Raises:
        UsageError: a chained URL (`::`), or a protocol whose package isn't installed.
    """
    if "::" in url:
        raise UsageError(f"{url}: chained URLs are refused; name the final place directly")
    try:
        filesystem, path = cast("Any", fsspec).url_to_fs(url, **_options(url))
    except (ImportError, ValueError) as error:
        protocol = url.split("://", maxsplit=1)[0]
        extra = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "hf": "hub"}.get(protocol)
        hint = f'; pip install "grpoctl[{extra}]"' if extra else ""
        raise UsageError(f"{url}: no file system for this URL ({error}){hint}") from error
    return Location(filesystem, path.rstrip("/") or path, url.rstrip("/") or url)


def _options(url: str) -> dict[str, Any]:
    if "://" not in url or url.startswith(("file://", "local://")):
        return {"auto_mkdir": True}
    return {"use_listings_cache": False} if url.startswith(("s3://", "gs://", "gcs://", "az://", "abfs://")) else {}


@contextmanager
def storage_errors(location: Location) -> Generator[None]:
    """Turn a file system's exceptions into ours, with the place in front."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputRefused(f"{location.url}: not found; check the path") from error
    except PermissionError as error:
        raise InputRefused(f"{location.url}: access refused ({error}); check permissions or credentials") from error
    except (NotADirectoryError, IsADirectoryError) as error:
        raise InputRefused(f"{location.url}: {error.strerror or error}; a folder was expected, or a file") from error
    except (OSError, TimeoutError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise TryAgain(f"{location.url}: no space left; free some and rerun, finished shards are kept") from error
        if getattr(error, "errno", None) == errno.EROFS:
            raise InputRefused(f"{location.url}: read-only file system; choose another --out") from error
        raise TryAgain(f"{location.url}: {type(error).__name__}: {error}; rerun, finished shards are kept") from error


def check_writable(location: Location) -> None:
    """Refuse a local folder in which nothing can be created, before hours of work go into it.

    Raises:
        InputRefused: a file stands in its place, the file system is read-only, or permission is missing.
    """
    if not location.is_local:
        return
    place = location.path
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise InputRefused(f"{location.url}: {place} is a file, expected a folder; choose another place")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputRefused(
            f"{location.url}: {place} is read-only or permission is missing; check permissions or choose another place"
        )


def exists(location: Location) -> bool:
    """Return whether a file or folder is there."""
    with storage_errors(location):
        return bool(location.filesystem.exists(location.path))


def read_bytes(location: Location) -> bytes:
    """Return a file's bytes.

    Raises:
        InputRefused: it isn't there or may not be read.
        TryAgain: the store failed.
    """
    with storage_errors(location):
        return location.filesystem.cat_file(location.path)


def read_if_there(location: Location) -> bytes | None:
    """Return a file's bytes, or None where there is no such file."""
    try:
        with storage_errors(location):
            return location.filesystem.cat_file(location.path)
    except InputRefused as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise


def list_names(location: Location) -> list[str]:
    """Return the names in a folder, sorted; empty where there is no folder."""
    with storage_errors(location):
        if not location.filesystem.isdir(location.path):
            return []
        return sorted(
            str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in location.filesystem.ls(location.path, False)
        )


def write_bytes(location: Location, data: bytes) -> None:
    """Write a whole file, replacing what is there."""
    with storage_errors(location):
        if not location.is_local:
            location.filesystem.pipe_file(location.path, data)
            return
        temporary = _local_temporary(location, data)
        os.replace(temporary, location.path)
        _sync_folder(Path(location.path).parent)


def create_exclusively(location: Location, data: bytes) -> bool:
    """Create a file that must not exist; exactly one of several writers gets True.

    A lost acknowledgement looks like somebody else's file, so on any conflict the file is read back: our own bytes mean
    success. Callers put an attempt id into `data` where two writers could send equal bytes.

    Returns:
        True where the file now holds `data`; False where another file was there first.
    """
    if location.is_local:
        return _create_local(location, data)
    try:
        location.filesystem.pipe_file(location.path, data, mode="create")
    except OSError as error:  # FileExistsError, or s3fs's bare OSError for 409 and 412
        there = read_if_there(location)
        if there is None:
            with storage_errors(location):
                raise error
        return there == data
    return True


def _create_local(location: Location, data: bytes) -> bool:
    with storage_errors(location):
        temporary = _local_temporary(location, data)
        try:
            os.link(temporary, location.path)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        _sync_folder(Path(location.path).parent)
        return True


def _local_temporary(location: Location, data: bytes) -> str:
    folder = Path(location.path).parent
    folder.mkdir(parents=True, exist_ok=True)
    temporary = str(folder / f".tmp-{uuid.uuid4().hex}")
    if shutil.disk_usage(folder).free < len(data):
        raise OSError(errno.ENOSPC, "No space left on device")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_file(local: Path, location: Location, *, link: bool = False) -> None:
    """Copy a finished local file to its place; `link` uses a hard link where both are on one disk.

    Only files that are never changed in place may be linked.
    """
    with storage_errors(location):
        if not location.is_local:
            location.filesystem.put_file(str(local), location.path)
            return
        target = Path(location.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".tmp-{uuid.uuid4().hex}"
        try:
            if link:
                _link_or_copy(local, temporary)
            else:
                _copy(local, temporary)
            os.replace(temporary, target)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reader, target.open("wb") as writer:
        while block := reader.read(1 << 22):
            writer.write(block)
        writer.flush()
        os.fsync(writer.fileno())


def get_file(location: Location, local: Path) -> None:
    """Bring a file to this machine's disk (a hard link where it is there already)."""
    with storage_errors(location):
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            if location.is_local:
                _link_or_copy(Path(location.path), local)
            else:
                location.filesystem.get_file(location.path, str(local))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise TryAgain(f"{local}: no space left; free some and rerun, finished shards are kept") from error


def remove(location: Location) -> None:
    """Remove a file or a folder with all in it; nothing happens where it isn't there."""
    with storage_errors(location):
        if location.filesystem.exists(location.path):
            location.filesystem.rm(location.path, recursive=True)


def sha256_file(path: Path) -> str:
    """Return a local file's sha256, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file)


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 22):
        digest.update(block)
    return digest.hexdigest()


def sha256_bytes(data: bytes) -> str:
    """Return the sha256 of bytes, hexadecimal."""
    return hashlib.sha256(data).hexdigest()
