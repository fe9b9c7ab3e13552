"""Policies: a REF becomes a local Hugging Face folder whose weights and tokenizer are known by digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from grpoctl.artifacts.artifact import MANIFEST_NAME, read_manifest
from grpoctl.artifacts.canonical import sha256_json
from grpoctl.artifacts.manifest import PolicyIdentity, PolicyRecord
from grpoctl.artifacts.storage import Location, exists, get_file, list_names, locate, read_if_there
from grpoctl.errors import InputRefused, TryAgain, UsageError

POLICY_RECORD: Final = "grpoctl_policy.json"
PROBE_RECORD: Final = "grpoctl_probe.json"
"""A few completions with their log-probabilities under this policy at temperature 1, written by the update that made it."""
ADAPTER: Final = "adapter"
"""Folder of low-rank adapters by themselves, in an update artifact and, where sync was told to, in a published policy."""
POINTER: Final = "CURRENT"
BUILTIN: Final = Path(__file__).parents[1] / "builtin"
HUB_ID: Final = re.compile(r"^[\w.-]+/[\w.-]+(@[\w./-]+)?$")
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
HUB_PATTERNS: Final = ["*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFolder:
    """A policy on this machine's disk."""

    ref: str
    folder: Path
    version: int
    weights_digest: str
    tokenizer_digest: str
    consumed: tuple[str, ...]
    adapter: Path | None = None
    """Folder of its adapters by themselves, where they are published beside the weights; checked by digest."""
    is_unchanged: bool = False
    """Whether the update that made it left its parent's weights as they were."""

    @property
    def identity(self) -> PolicyIdentity:
        """The policy as manifests name it."""
        return PolicyIdentity(
            ref=self.ref,
            version=self.version,
            weights_digest=self.weights_digest,
            tokenizer_digest=self.tokenizer_digest,
        )


def open_policy(ref: str) -> PolicyFolder:
    """Resolve a REF, bring it to the local disk and check its digests.

    Args:
        ref: `builtin:tiny`, a folder or fsspec URL (a policy, a published series with CURRENT, or an update artifact),
            or a hub id `org/name@revision`

    Raises:
        InputRefused: not a policy, weights not in safetensors, or content that differs from its own record.
        TryAgain: a download broke off.
    """
    folder = _local_folder(ref)
    if not (folder / "config.json").is_file():
        raise InputRefused(f"{ref}: no config.json in it; expected a Hugging Face model folder")
    weights = weights_digest(folder)
    tokenizer = tokenizer_digest(folder)
    record = _record(folder, ref)
    if record is not None and (record.weights_digest, record.tokenizer_digest) != (weights, tokenizer):
        what = "weights" if record.weights_digest != weights else "tokenizer"
        raise InputRefused(f"{ref}: {what} differ from the digest in {POLICY_RECORD}; the folder was damaged or edited")
    return PolicyFolder(
        ref=ref,
        folder=folder,
        version=record.version if record else 0,
        weights_digest=weights,
        tokenizer_digest=tokenizer,
        consumed=tuple(record.consumed) if record else (),
        adapter=_adapter(folder, record, ref),
        is_unchanged=record is not None and record.parent_digest == record.weights_digest,
    )


def _record(folder: Path, ref: str) -> PolicyRecord | None:
    path = folder / POLICY_RECORD
    if not path.is_file():
        return None
    try:
        return PolicyRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise InputRefused(f"{ref}: {POLICY_RECORD} is damaged ({error.errors()[0]['msg']})") from error


def _adapter(folder: Path, record: PolicyRecord | None, ref: str) -> Path | None:
    """Return the folder of adapters that the record names, None where there is none of ours."""
    place = folder / ADAPTER
    if record is None or record.adapter_digest is None or not place.is_dir():
        return None
    if weights_digest(place) != record.adapter_digest:
        raise InputRefused(
            f"{ref}: {ADAPTER}/ differs from the digest in {POLICY_RECORD}; the folder was damaged or edited"
        )
    return place


def _local_folder(ref: str) -> Path:
    if ref.startswith("builtin:"):
        folder = BUILTIN / ref.removeprefix("builtin:")
        if not (folder / "config.json").is_file():
            raise UsageError(f"{ref}: no such built-in policy; known: builtin:tiny")
        return folder
    if "://" not in ref and not Path(ref).exists():
        if HUB_ID.match(ref) and not ref.startswith("."):
            return _from_hub(ref)
        raise InputRefused(
            f"{ref}: no such folder; expected a folder, an fsspec URL, org/name@revision or builtin:tiny"
        )
    location = locate(ref)
    pointer = read_if_there(location.child(POINTER))
    if pointer is not None:
        return _local_folder(location.child(str(json.loads(pointer)["name"])).url)
    artifact = read_manifest(ref)
    if artifact is not None:
        if artifact.manifest.table != "steps":
            raise InputRefused(f"{ref}: holds {artifact.manifest.table}, expected a policy or an update artifact")
        location = location.child("policy")
    return Path(location.path) if location.is_local else _download(location)


def _from_hub(ref: str) -> Path:
    name, _, revision = ref.partition("@")
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  a callback without types
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise UsageError(f'{ref}: hub ids need huggingface_hub; pip install "grpoctl[hub]"') from error
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=HUB_PATTERNS))
    except RepositoryNotFoundError as error:
        raise InputRefused(f"{ref}: no such folder here and no such model on the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        first = str(error).splitlines()[0]
        raise TryAgain(
            f"{ref}: no such folder here, and the hub can't be reached ({first}); rerun when online"
        ) from error


def cache_folder() -> Path:
    """Return the folder for downloaded policies (GRPOCTL_CACHE, else ~/.cache/grpoctl)."""
    return Path(os.environ.get("GRPOCTL_CACHE") or Path.home() / ".cache" / "grpoctl")


def _download(location: Location) -> Path:
    """Bring a remote folder to the cache; its name depends on what the folder holds, so a changed folder is new."""
    names = _remote_files(location)
    if "config.json" not in names:
        raise InputRefused(f"{location.url}: no config.json in it; expected a Hugging Face model folder")
    sizes = {name: location.filesystem.info(location.child(name).path) for name in names}
    facts = {
        name: [info.get("size"), str(info.get("ETag") or info.get("created") or "")] for name, info in sizes.items()
    }
    target = cache_folder() / "policies" / sha256_json({"url": location.url, "files": facts})[:24]
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        for name in names:
            get_file(location.child(name), temporary / name)
        os.replace(temporary, target)
    except OSError:
        if not target.is_dir():  # another process may have finished the same download first
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _remote_files(location: Location) -> list[str]:
    """Return the names of a policy's files, those of its adapters among them."""
    names = [name for name in list_names(location) if not name.startswith(".") and exists(location.child(name))]
    inner = [f"{ADAPTER}/{name}" for name in list_names(location.child(ADAPTER))] if ADAPTER in names else []
    return [name for name in names if name != ADAPTER] + inner


def policy_files(folder: Path) -> Iterator[Path]:
    """Yield the files that an update carries over unchanged, sorted: config, tokenizer, template, generation config."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in {".json", ".txt", ".jinja", ".model"} and not _belongs_to_weights(path):
            yield path


def _belongs_to_weights(path: Path) -> bool:
    """Return whether a file tells of these very weights, so that other weights need another."""
    return path.name in {POLICY_RECORD, PROBE_RECORD, MANIFEST_NAME} or path.name.endswith(".safetensors.index.json")


def weights_digest(folder: Path) -> str:
    """Return a digest over every tensor's name, dtype, shape and bytes, whatever the files they are spread over.

    Raises:
        InputRefused: no safetensors, or a damaged or incomplete set of files.
    """
    return sha256_json(dict(sorted(tensor_digests(folder).items())))


def tensor_digests(folder: Path) -> dict[str, list[Any]]:
    """Return {tensor name: [dtype, shape, sha256 of its bytes]} of a folder's safetensors files."""
    tensors: dict[str, list[Any]] = {}
    for path in weight_files(folder):
        status = path.stat()
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if identity not in _HASHED:
            _HASHED[identity] = _file_tensors(path, status.st_size)
        tensors.update(_HASHED[identity])
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a policy folder, checked against the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InputRefused(f"{folder}: {missing[0]} is named by {index.name} but missing; copy the whole folder")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputRefused(f"{folder}: no .safetensors weights; other formats are refused, convert the model first")
    return files


_HASHED: Final[dict[tuple[int, int, int, int], dict[str, list[Any]]]] = {}
"""What was hashed in this process, by device, inode, size and time: a published hard link isn't hashed again, a
replaced file is."""


def _file_tensors(path: Path, size: int) -> dict[str, list[Any]]:
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= min(size - 8, 100_000_000):
            raise InputRefused(f"{path}: not a safetensors file ({size} bytes); the file was truncated or replaced")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise InputRefused(f"{path}: damaged safetensors header ({error})") from error
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise InputRefused(f"{path}: {size} bytes, its header says {8 + length + end}; the file was truncated")
        result: dict[str, list[Any]] = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            first, last = entry["data_offsets"]
            file.seek(8 + length + first)
            result[name] = [entry["dtype"], entry["shape"], _hash(file, last - first)]
        return result


def _hash(file: Any, count: int) -> str:
    digest = hashlib.sha256()
    while count:
        block = file.read(min(count, 1 << 22))
        if not block:
            raise InputRefused(f"{file.name}: ended early; the file was truncated")
        digest.update(block)
        count -= len(block)
    return digest.hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """Return a digest over the tokenizer's vocabulary files, chat template and special tokens."""
    parts: dict[str, Any] = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in TOKENIZER_FILES
        if (folder / name).is_file()
    }
    config = folder / "tokenizer_config.json"
    if config.is_file():
        settings = json.loads(config.read_bytes())
        names = ("chat_template", "bos_token", "eos_token", "pad_token", "add_bos_token", "add_eos_token")
        parts["config"] = {name: settings[name] for name in names if settings.get(name) is not None}
    if not parts:
        raise InputRefused(f"{folder}: no tokenizer files; expected tokenizer.json beside the weights")
    return sha256_json(parts)
