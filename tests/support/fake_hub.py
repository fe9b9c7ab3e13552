"""A real HTTP server that talks like the Hugging Face hub about model repositories, and misbehaves where it is told to.

It keeps every commit in memory. What it speaks is what huggingface_hub 2.4 asks for when a repository is created, read,
committed to (regular and LFS files, no Xet), tagged and downloaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

WRITER, READER = "hf_writer", "hf_reader"
"""Tokens that the hub knows."""
HIDDEN_404 = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}


class Refused(Exception):
    """An answer that isn't 200."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None, **more: str) -> None:
        super().__init__(message)
        self.status = status
        self.more = more
        self.headers = {"X-Error-Message": message} | (headers or {})


@dataclass(frozen=True)
class File:
    """A file of a commit."""

    data: bytes
    lfs: bool = False

    @property
    def sha256(self) -> str:
        """LFS's name of the content."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def blob(self) -> str:
        """Git's name of what it stores: the content, or the pointer of a large file."""
        stored = self.data
        if self.lfs:
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(stored)}\n"
            stored = pointer.encode()
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()

    def described(self, path: str) -> dict[str, Any]:
        """Return the entry of a listing."""
        lfs = {"lfs": {"oid": self.sha256, "size": len(self.data), "pointerSize": 134}} if self.lfs else {}
        return {"type": "file", "path": path, "size": len(self.data), "oid": self.blob, **lfs}


@dataclass(frozen=True)
class Commit:
    """A state of all files, and how it came about."""

    oid: str
    title: str
    files: dict[str, File]


@dataclass
class Repository:
    """A line of commits and the tags on it."""

    private: bool
    commits: list[Commit] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def head(self) -> Commit:
        """Main."""
        return self.commits[-1]

    def add(self, title: str, files: dict[str, File]) -> Commit:
        """Commit a state of all files to main."""
        oid = hashlib.sha1(f"{len(self.commits)} {title}".encode()).hexdigest()
        self.commits.append(Commit(oid, title, files))
        return self.head

    def at(self, revision: str) -> Commit:
        """Return the commit that a branch, tag or oid names."""
        if revision == "main":
            return self.head
        oid = self.tags.get(revision, revision)
        found = next((commit for commit in self.commits if commit.oid == oid), None)
        if found is None:
            raise Refused(404, f"Invalid rev id: {revision}", {"X-Error-Code": "RevisionNotFound"})
        return found

    def copy(self) -> Repository:
        """Return one that can be changed on its own."""
        return Repository(self.private, list(self.commits), dict(self.tags))


class FakeHub:
    """All repositories, who asks for what, and what goes wrong when.

    `faults` holds statuses by kind of request, each used once; `before` holds what happens just before a kind of request
    is answered for the first time.
    """

    def __init__(
        self, repositories: dict[str, Repository] | None = None, stored: dict[str, bytes] | None = None
    ) -> None:
        self.repositories = {name: one.copy() for name, one in (repositories or {}).items()}
        self.stored = dict(stored or {})
        self.faults: dict[str, int] = {}
        self.before: dict[str, Callable[[], object]] = {}
        self.asked: list[str] = []
        self.lock = threading.Lock()
        self.url = ""

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a new repository: private where that is asked for, with the hub's first commit."""
        name = f"{body['organization']}/{body['name']}"
        if name in self.repositories:
            raise Refused(409, "You already created this model repo", url=f"{self.url}/{name}")
        self.repositories[name] = Repository(private=body.get("visibility") == "private")
        self.repositories[name].add("initial commit", {".gitattributes": File(b"*.safetensors filter=lfs\n")})
        return {"url": f"{self.url}/{name}"}

    def info(self, name: str, commit: Commit) -> dict[str, Any]:
        """Answer what a repository holds."""
        siblings = [{"rfilename": path} for path in commit.files]
        return {"id": name, "sha": commit.oid, "private": self.repositories[name].private, "siblings": siblings}

    def refs(self, one: Repository) -> dict[str, Any]:
        """Answer branches and tags."""
        main = {"name": "main", "ref": "refs/heads/main", "targetCommit": one.head.oid}
        tags = [{"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": oid} for tag, oid in one.tags.items()]
        return {"branches": [main], "converts": [], "tags": tags}

    def preupload(self, one: Repository, body: dict[str, Any]) -> dict[str, Any]:
        """Answer how each file is to be sent, and what is there of it."""
        files: list[dict[str, Any]] = []
        for entry in body["files"]:
            path, there = entry["path"], one.head.files.get(entry["path"])
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            oid = None if there is None else there.sha256 if there.lfs else there.blob
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": files}

    def batch(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer where to put large files that aren't stored yet."""
        objects: list[dict[str, Any]] = []
        for entry in body["objects"]:
            action = {"actions": {"upload": {"href": f"{self.url}/lfs/{entry['oid']}"}}}
            objects.append({**entry, **({} if entry["oid"] in self.stored else action)})
        return {"transfer": "basic", "objects": objects}

    def commit(self, name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Commit, on top of the parent that is asked for."""
        one, header = self.repositories[name], lines[0]["value"]
        if header.get("parentCommit") not in {None, one.head.oid}:
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        files = dict(one.head.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.stored:
                    raise Refused(400, f"LFS pointer of {value['path']} points to a file that does not exist")
                files[value["path"]] = File(self.stored[value["oid"]], lfs=True)
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise AssertionError(f"not spoken here: {line['key']}")
        made = one.add(header["summary"], files)
        return {"commitUrl": f"{self.url}/{name}/commit/{made.oid}", "commitOid": made.oid}

    def tag(self, one: Repository, revision: str, body: dict[str, Any]) -> dict[str, Any]:
        """Tag a commit, once."""
        if body["tag"] in one.tags:
            raise Refused(409, f"Tag already exists: {body['tag']}")
        one.tags[body["tag"]] = one.at(revision).oid
        return {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answered()

    def do_HEAD(self) -> None:
        self._answered()

    def do_POST(self) -> None:
        self._answered()

    def do_PUT(self) -> None:
        self._answered()

    def _answered(self) -> None:
        body = self._body()
        try:
            with self.hub.lock:
                status, data, headers = self._answer(urlsplit(self.path).path, body)
        except Refused as refusal:
            status, headers = refusal.status, refusal.headers
            data = json.dumps({"error": str(refusal), **refusal.more}).encode()
        self.send_response(status)
        for key, value in ({"Content-Type": "application/json", "Content-Length": str(len(data))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts: list[bytes] = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if found := re.fullmatch(r"/lfs/(\w+)", path):
            return self._large(found[1], body)
        if path == "/api/repos/create":
            self._asked("create", writes=True)
            return self._json(self.hub.create(json.loads(body)))
        if found := re.fullmatch(r"/(\w+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            self._repository(found[1], "batch", writes=True)
            return self._json(self.hub.batch(json.loads(body)))
        if found := re.fullmatch(r"/(\w+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
            return self._resolved(self._repository(found[1], "resolve").at(unquote(found[2])), found[3])
        if found := re.fullmatch(r"/api/models/(\w+/[\w.-]+)(?:/([\w-]+)(?:/([^/]+))?)?", path):
            return self._json(self._spoken(found[1], found[2] or "info", unquote(found[3] or "main"), body))
        raise Refused(501, f"not spoken here: {self.command} {path}")

    def _spoken(self, name: str, kind: str, revision: str, body: bytes) -> Any:
        one = self._repository(name, kind, writes=kind in {"preupload", "commit", "tag"})
        answers: dict[str, Callable[[], Any]] = {
            "info": lambda: self.hub.info(name, one.at(revision)),
            "revision": lambda: self.hub.info(name, one.at(revision)),
            "refs": lambda: self.hub.refs(one),
            "tree": lambda: _listed(one.at(revision), None),
            "paths-info": lambda: _listed(one.at(revision), parse_qs(body.decode())["paths"]),
            "preupload": lambda: self.hub.preupload(one, json.loads(body)),
            "commit": lambda: self.hub.commit(name, [json.loads(line) for line in body.splitlines()]),
            "tag": lambda: self.hub.tag(one, revision, json.loads(body)),
        }
        return answers[kind]()

    def _large(self, oid: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if self.command == "PUT":
            self._asked("put", writes=None)
            assert hashlib.sha256(body).hexdigest() == oid
            self.hub.stored[oid] = body
            return self._json({})
        return 200, self.hub.stored[oid], {"ETag": f'"{oid}"', "Content-Type": "application/octet-stream"}

    def _resolved(self, commit: Commit, path: str) -> tuple[int, bytes, dict[str, str]]:
        file = commit.files.get(path)
        headers = {"X-Repo-Commit": commit.oid}
        if file is None:
            raise Refused(404, "Entry not found", headers | {"X-Error-Code": "EntryNotFound"})
        if not file.lfs:
            return 200, file.data, headers | {"ETag": f'"{file.blob}"', "Content-Type": "text/plain"}
        linked = {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.data))}
        elsewhere = self.hub.url.replace("127.0.0.1", "localhost")  # as the hub sends large files from another host
        return 302, b"", headers | linked | {"Location": f"{elsewhere}/lfs/{file.sha256}"}

    def _repository(self, name: str, kind: str, *, writes: bool = False) -> Repository:
        self._asked(kind, writes=writes)
        if name not in self.hub.repositories:
            raise Refused(404, "Repository not found", HIDDEN_404)
        return self.hub.repositories[name]

    def _asked(self, kind: str, *, writes: bool | None) -> None:
        """Note the request, let happen what is planned before it, and refuse it without a good token."""
        self.hub.asked.append(kind)
        if kind in self.hub.before:
            self.hub.before.pop(kind)()
        if kind in self.hub.faults:
            raise Refused(self.hub.faults.pop(kind), "something broke")
        if writes is None:  # a signed address needs no token
            return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not token:
            raise Refused(401, "Repository not found", HIDDEN_404)  # as the hub hides what may be there
        if token not in {WRITER, READER}:
            raise Refused(401, "Invalid credentials in Authorization header")
        if writes and token != WRITER:
            raise Refused(403, "You don't have the required permissions")

    def _json(self, answer: Any) -> tuple[int, bytes, dict[str, str]]:
        return 200, json.dumps(answer).encode(), {}


def _listed(commit: Commit, wanted: list[str] | None) -> list[dict[str, Any]]:
    return [file.described(path) for path, file in commit.files.items() if wanted is None or path in wanted]


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve a hub on a port of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
