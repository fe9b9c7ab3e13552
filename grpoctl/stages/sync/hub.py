"""Publish a policy to a model repository of the Hugging Face hub: one commit on main, then the version as a tag.

`main` is what CURRENT is in a folder, and `org/name@v000001` is the REF of a published version. Knows nothing of the
checks that a policy has passed before.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from grpoctl.artifacts.manifest import PolicyRecord
from grpoctl.engines.warm import Warm
from grpoctl.errors import Conflict, GrpoctlError, InputRefused, TryAgain, UsageError
from grpoctl.extras import require
from grpoctl.inputs.policies import ADAPTER, POLICY_RECORD

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy, HfApi

SCHEME: Final = "hf://"
REPOSITORY: Final = re.compile(r"hf://(?!(?:datasets|spaces|models|buckets)/)([\w.-]+/[\w.-]+)/?")
KEPT: Final = frozenset({".gitattributes", "README.md", "LICENSE"})
"""Files of a repository that belong to its owner: never deleted, never rolled back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """What a commit holds.

    Args:
        oid: the commit
        files: a policy's names: those at the repository's root and of its adapters
        record: the policy's record, None where the commit holds no policy of ours
    """

    oid: str
    files: frozenset[str]
    record: PolicyRecord | None

    def holds(self, wanted: PolicyRecord) -> bool:
        """Return whether this is the wanted version with the wanted weights."""
        return self.record is not None and (self.record.version, self.record.weights_digest) == (
            wanted.version,
            wanted.weights_digest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDestination:
    """A repository as it was when it was looked at: every commit goes on top of that head, or isn't made.

    Args:
        head: main's commit, None where there is no such repository
        tags: {tag: commit}
    """

    url: str
    repository: str
    api: HfApi
    head: Revision | None
    tags: dict[str, str]

    def ref(self, name: str) -> str:
        """Return the REF that opens a version."""
        return f"{self.repository}@{name}"

    def is_current(self, name: str, version: int, digest: str) -> bool:
        """Return whether these weights are published as this version and main isn't behind it.

        Raises:
            Conflict: the version was published from other weights.
        """
        record = self.head.record if self.head else None
        if name in self.tags:
            self._check_same(name, self._tagged(name).record, digest)
            return record is not None and record.version >= version
        if record is None or record.version != version:
            return False
        self._check_same(name, record, digest)  # a kill between commit and tag leaves the version on main alone
        return True

    def check(self) -> None:
        """Refuse a repository that would leave files of a policy out.

        Raises:
            InputRefused: it has a .gitignore, which the hub applies to uploads.
        """
        if self.head and ".gitignore" in self.head.files:
            raise InputRefused(f"{self.url}: has a .gitignore, by which the hub may skip files; remove it from main")

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        """Return a temporary folder for the files that are verified and uploaded."""
        return tempfile.TemporaryDirectory(prefix="grpoctl-sync-")

    def complete(self, name: str, digest: str, warm: Warm) -> dict[str, Any]:
        """Tag what is on main already, where a kill came between commit and tag; return facts.

        Raises:
            Conflict: the version was published from other weights meanwhile.
        """
        assert self.head is not None
        self._tag(name, self.head.oid, digest)
        return {}

    def publish(self, folder: Path, name: str, warm: Warm) -> dict[str, Any]:
        """Commit a policy's files to main, all in one, and tag the commit; return facts.

        Raises:
            Conflict: another policy was published meanwhile.
            TryAgain: main moved meanwhile, or the hub failed.
        """
        from huggingface_hub import CommitOperationAdd

        record = PolicyRecord.model_validate_json((folder / POLICY_RECORD).read_bytes())
        files = [
            CommitOperationAdd(path_in_repo=path.relative_to(folder).as_posix(), path_or_fileobj=path)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]
        oid = self._commit(files, record, f"{name}: weights {record.weights_digest[:12]}")
        self._tag(name, oid, record.weights_digest)
        return {"commit": oid}

    def digest(self, name: str) -> str:
        """Return the weights digest of a published version.

        Raises:
            InputRefused: there is no such version.
        """
        if name not in self.tags:
            raise InputRefused(f"{self.ref(name)}: no such published version; see the tags of {self.url}")
        record = self._tagged(name).record
        if record is None:
            raise InputRefused(
                f"{self.ref(name)}: no {POLICY_RECORD} in it; the tag isn't a version that sync published"
            )
        return record.weights_digest

    def point_to(self, name: str, version: int, digest: str, warm: Warm) -> dict[str, Any]:
        """Commit the files of a published version to main again; return facts.

        Raises:
            Conflict: another policy was published meanwhile.
            TryAgain: main moved meanwhile, or the hub failed.
        """
        from huggingface_hub import CommitOperationCopy

        source = self._tagged(name)
        assert source.record is not None
        if self.head and self.head.holds(source.record):
            return {"commit": self.head.oid}
        copies = [
            CommitOperationCopy(src_path_in_repo=path, path_in_repo=path, src_revision=source.oid)
            for path in sorted(source.files - KEPT)
        ]
        return {"commit": self._commit(copies, source.record, f"back to {name}: weights {digest[:12]}")}

    def _tagged(self, name: str) -> Revision:
        oid = self.tags[name]
        return self.head if self.head and self.head.oid == oid else _revision(self.api, self.repository, oid)

    def _check_same(self, name: str, record: PolicyRecord | None, digest: str) -> None:
        if record is None:
            raise Conflict(f"{self.ref(name)}: a tag of something else than a policy; publish to another repository")
        if record.weights_digest != digest:
            raise Conflict(
                f"{self.ref(name)}: published from another update (weights {record.weights_digest[:12]}…, this one has "
                f"{digest[:12]}…); publish to another repository"
            )

    def _commit(
        self, files: Sequence[CommitOperationAdd | CommitOperationCopy], record: PolicyRecord, message: str
    ) -> str:
        """Return the commit on top of the head that was looked at, or another writer's that holds the same policy."""
        from huggingface_hub import CommitOperationDelete
        from huggingface_hub.errors import HfHubHTTPError

        head = self.head or self._create_repository()
        seen = self.head.record if self.head else None
        gone = head.files - KEPT - {operation.path_in_repo for operation in files}
        deletes = [CommitOperationDelete(path_in_repo=path, is_folder=False) for path in sorted(gone)]
        with hub_errors(self.url):
            try:
                if head.record == seen:
                    return self.api.create_commit(
                        self.repository, [*files, *deletes], commit_message=message, parent_commit=head.oid
                    ).oid
            except HfHubHTTPError as error:
                if error.response.status_code not in {409, 412}:
                    raise
        now = open_hub(self.url).head
        if now and now.holds(record):
            return now.oid
        if now is None or now.record == seen:
            raise TryAgain(
                f"{self.url}: main was changed meanwhile, though not the policy there; rerun to go on from it"
            )
        raise Conflict(f"{self.url}: another policy was published here meanwhile; publish to another repository")

    def _create_repository(self) -> Revision:
        with hub_errors(self.url):
            self.api.create_repo(self.repository, private=True, exist_ok=True)
        head = open_hub(self.url).head
        if head is None:
            raise InputRefused(f"{self.url}: created, but can't be read; credentials: HF_TOKEN must allow reading it")
        return head

    def _tag(self, name: str, oid: str, digest: str) -> None:
        from huggingface_hub.errors import HfHubHTTPError

        if name in self.tags:
            return
        with hub_errors(self.url):
            try:
                self.api.create_tag(self.repository, tag=name, revision=oid)
            except HfHubHTTPError as error:
                if error.response.status_code != 409 or name not in (now := open_hub(self.url)).tags:
                    raise
                now._check_same(name, now._tagged(name).record, digest)


def is_hub(url: str) -> bool:
    """Return whether a URL names a place on the hub."""
    return url.startswith(SCHEME)


def open_hub(url: str, servers: Sequence[str] = ()) -> HubDestination:
    """Look at a repository of the hub.

    Args:
        url: hf://org/name
        servers: what the job names with --server

    Raises:
        UsageError: not a model repository, servers are named too, or huggingface_hub isn't installed.
        InputRefused: the hub refuses the credentials.
        TryAgain: the hub can't be reached.
    """
    if servers:
        raise UsageError(
            f"--server with --to {url}: servers load weights from a folder that they and this job see under one path; "
            "publish to a shared file system"
        )
    found = REPOSITORY.fullmatch(url)
    if found is None:
        raise UsageError(f"--to {url}: expected hf://ORG/NAME, a model repository; versions become its tags")
    require("huggingface_hub")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    repository, api = found[1], HfApi(library_name="grpoctl")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"--to {url}: not a name of a repository ({error})") from error
    with hub_errors(url):
        try:
            refs = api.list_repo_refs(repository)
        except RepositoryNotFoundError as error:
            if error.response.status_code != 404:  # 401: there may be one that this token can't see
                raise
            return HubDestination(url=url, repository=repository, api=api, head=None, tags={})
    tags = {tag.name: tag.target_commit for tag in refs.tags}
    return HubDestination(url=url, repository=repository, api=api, head=_revision(api, repository, None), tags=tags)


def _revision(api: HfApi, repository: str, revision: str | None) -> Revision:
    where = f"{SCHEME}{repository}"
    with hub_errors(where):
        info = api.model_info(repository, revision=revision)
        everything = [file.rfilename for file in info.siblings or []]
        names = frozenset(name for name in everything if "/" not in name or name.startswith(f"{ADAPTER}/"))
        assert info.sha is not None
        data = None
        if POLICY_RECORD in names:
            with tempfile.TemporaryDirectory() as folder:  # not the hub's cache: a snapshot there must be whole
                path = api.hf_hub_download(repository, POLICY_RECORD, revision=info.sha, local_dir=folder)  # pyright: ignore[reportUnknownMemberType]  as in policies
                data = Path(path).read_bytes()
    try:
        record = PolicyRecord.model_validate_json(data) if data is not None else None
    except ValidationError as error:
        raise InputRefused(
            f"{where}: {POLICY_RECORD} of commit {info.sha[:12]} is damaged ({error.errors()[0]['msg']})"
        ) from error
    return Revision(oid=info.sha, files=names, record=record)


@contextmanager
def hub_errors(url: str) -> Generator[None]:
    """Turn what huggingface_hub raises into ours, with the repository in front.

    Raises:
        InputRefused: the hub refuses the credentials or the request.
        TryAgain: the hub can't be reached or failed.
    """
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]  # httpx's or httpx2's

    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: around what an upload met
        raise _translated(url, error) from error


def _translated(url: str, error: Exception) -> GrpoctlError:
    from huggingface_hub.errors import HfHubHTTPError

    answered = next((one for one in (error, error.__cause__) if isinstance(one, HfHubHTTPError)), None)
    status = answered.response.status_code if answered else None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = lines[0] if lines else type(error).__name__
    if answered and answered.server_message:
        told = f"{status}: {answered.server_message.splitlines()[0]}"
    if status in {401, 403} or isinstance(error, PermissionError):
        return InputRefused(
            f"{url}: the hub refused access ({told}); credentials: set HF_TOKEN to a token that may write there"
        )
    if status in {408, 429} or (status is None and not isinstance(error, ValueError)) or (status or 0) >= 500:
        return TryAgain(f"{url}: the hub can't be reached or failed ({told}); rerun to continue")
    return InputRefused(f"{url}: the hub refused the request ({told}); check the repository")
