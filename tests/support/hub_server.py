"""A Hub on the loopback, standard library only, that answers what the real huggingface_hub client asks of a model repository.

It keeps commits, branches, tags and large files in memory, and can be told to fail: it proves the client's requests and
kvfit's answers to trouble, not the real Hub's semantics.
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

LARGE = re.compile(r".*\.(safetensors|png)")


@dataclass(frozen=True)
class File:
    """Content of one file, and whether it is stored as a large file."""

    data: bytes
    large: bool

    @property
    def git_id(self) -> str:
        data = self.data
        if self.large:
            data = f"version https://git-lfs\noid sha256:{self.sha256}\nsize {len(data)}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.git_id


@dataclass
class Repository:
    """One model repository."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, tree: dict[str, File], branch: str) -> str:
        text = f"{len(self.commits)} {self.branches.get(branch)} " + " ".join(
            f"{name}:{file.git_id}" for name, file in sorted(tree.items())
        )
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = tree
        self.branches[branch] = oid
        self.log.append(oid)
        return oid

    def find(self, revision: str) -> str | None:
        found = self.branches.get(revision) or self.tags.get(revision)
        return found or (revision if revision in self.commits else None)

    @property
    def tree(self) -> dict[str, File]:
        return self.commits[self.branches["main"]]


@dataclass
class Fault:
    """What goes wrong: at the requests that match, `times` times, before or after they took effect."""

    method: str
    path: str
    status: int = 500
    after: bool = False
    times: int = 1
    action: Callable[[], None] | None = None
    cut: int | None = None


class Hub:
    """The server's state. Tokens: ``writer`` may do all in ``org``, ``reader`` may read what is public."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.url = ""
        self.lock = threading.RLock()

    def create(self, name: str, **options: Any) -> Repository:
        repository = Repository(**options)
        repository.commit({".gitattributes": File(b"*.safetensors filter=lfs\n", False)}, "main")
        self.repositories[name] = repository
        return repository

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in self.requests)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that listens while the block runs."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Problem(Exception):
    def __init__(self, status: int, code: str | None = None, text: str = "") -> None:
        super().__init__(text)
        self.status, self.code, self.text = status, code, text


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        path = unquote(parts.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        line = f"{self.command} {path}"
        with self.hub.lock:
            self.hub.requests.append(line)
            fault = next(
                (item for item in self.hub.faults if item.times and item.method == self.command and re.search(item.path, path)),
                None,
            )
        try:
            self.cut = None
            if fault is not None:
                fault.times -= 1
                if fault.action is not None:
                    fault.action()
                self.cut = fault.cut
                if fault.after:
                    with self.hub.lock:
                        self._route(path, body)
                if fault.cut is None and fault.status:
                    raise _Problem(fault.status)
            with self.hub.lock:
                answer = self._route(path, body)
        except _Problem as problem:
            headers = {"X-Error-Code": problem.code} if problem.code else {}
            self._send(
                problem.status, json.dumps({"error": problem.text}).encode(), headers | {"X-Error-Message": problem.text}
            )
            return
        if isinstance(answer, tuple):
            self._send(200, *answer)
        else:
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if self.cut is None else data[: self.cut])
        if self.cut is not None:
            self.close_connection = True

    def _token(self) -> str | None:
        found = self.headers.get("Authorization")
        return found.removeprefix("Bearer ") if found else None

    def _repository(self, name: str, *, write: bool = False, content: bool = False) -> Repository:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and self._token() != "writer"):
            raise _Problem(404 if self._token() else 401, "RepoNotFound", "Repository not found")
        if write and self._token() != "writer":
            raise _Problem(403 if self._token() else 401, None, "You don't have the rights")
        if content and repository.gated and self._token() != "writer":
            raise _Problem(403 if self._token() else 401, "GatedRepo", "Access to this model is restricted")
        return repository

    def _route(self, path: str, body: bytes) -> Any:
        for method, pattern, function in _ROUTES:
            match = re.fullmatch(pattern, path)
            if method == self.command and match:
                return function(self, body, *match.groups())
        raise _Problem(404, None, f"no such address {path}")

    # -- reading -----------------------------------------------------------------------------------------------

    def info(self, _: bytes, name: str, revision: str | None = None) -> Any:
        repository = self._repository(name)
        oid = repository.find(revision or "main")
        if oid is None:
            raise _Problem(404, "RevisionNotFound", "Invalid rev id")
        siblings = [{"rfilename": path} for path in repository.commits[oid]]
        return {"id": name, "modelId": name, "sha": oid, "private": repository.private, "tags": [], "siblings": siblings}

    def tree(self, _: bytes, name: str, revision: str) -> Any:
        repository = self._repository(name)
        oid = repository.find(revision)
        if oid is None:
            raise _Problem(404, "RevisionNotFound", "Invalid rev id")
        entries = []
        for path, file in repository.commits[oid].items():
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(file.data), "oid": file.git_id}
            if file.large:
                entry["lfs"] = {"oid": file.sha256, "size": len(file.data), "pointerSize": 130}
            entries.append(entry)
        return entries

    def refs(self, _: bytes, name: str) -> Any:
        repository = self._repository(name)

        def listed(refs: dict[str, str], prefix: str) -> list[dict[str, str]]:
            return [{"name": key, "ref": f"{prefix}/{key}", "targetCommit": oid} for key, oid in refs.items()]

        branches = {key: oid for key, oid in repository.branches.items() if not key.startswith("refs/pr/")}
        return {"branches": listed(branches, "refs/heads"), "converts": [], "tags": listed(repository.tags, "refs/tags")}

    def content(self, _: bytes, name: str, revision: str, path: str) -> Any:
        repository = self._repository(name, content=True)
        oid = repository.find(revision)
        if oid is None:
            raise _Problem(404, "RevisionNotFound", "Invalid rev id")
        file = repository.commits[oid].get(path)
        if file is None:
            raise _Problem(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": oid, "ETag": f'"{file.etag}"', "Content-Type": "application/octet-stream"}
        if file.large:
            headers |= {"X-Linked-ETag": f'"{file.etag}"', "X-Linked-Size": str(len(file.data))}
        return file.data, headers

    # -- writing -----------------------------------------------------------------------------------------------

    def create(self, body: bytes) -> Any:
        document = json.loads(body)
        name = f"{document['organization']}/{document['name']}"
        if self._token() != "writer":
            raise _Problem(403 if self._token() else 401, None, "You don't have the rights")
        if name in self.hub.repositories:
            raise _Problem(409, None, "You already created this model repo")
        self.hub.create(name, private=bool(document.get("private")) or document.get("visibility") == "private")
        return {"url": f"{self.hub.url}/{name}"}

    def validate(self, body: bytes) -> Any:
        text = json.loads(body)["content"]
        # The real Hub's complaint, which names the value.
        if re.search(r"^base_model:\s*\n- ['\"]?[./]", text, re.MULTILINE) or "not a licence" in text:
            raise _Problem(400, None, '"license" must be one of [apache-2.0, mit, ...]')
        return {"errors": [], "warnings": []}

    def preupload(self, body: bytes, name: str, _revision: str) -> Any:
        tree = self._repository(name, write="create_pr" not in self.query).tree
        return {
            "files": [
                {
                    "path": item["path"],
                    "uploadMode": "lfs" if LARGE.fullmatch(item["path"]) else "regular",
                    "shouldIgnore": False,
                    "oid": tree[item["path"]].etag if item["path"] in tree else None,
                }
                for item in json.loads(body)["files"]
            ]
        }

    def batch(self, body: bytes, name: str) -> Any:
        self._repository(name)
        objects = []
        for item in json.loads(body)["objects"]:
            answer: dict[str, Any] = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.large:
                answer["actions"] = {
                    "upload": {"href": f"{self.hub.url}/large/{item['oid']}"},
                    "verify": {"href": f"{self.hub.url}/{name}.git/info/lfs/objects/verify"},
                }
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    def put(self, body: bytes, oid: str) -> Any:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Problem(400, None, "digest")
        self.hub.large[oid] = body
        return {}

    def verify(self, body: bytes, name: str) -> Any:
        if json.loads(body)["oid"] not in self.hub.large:
            raise _Problem(404, None, f"no such object in {name}")
        return {}

    def commit(self, body: bytes, name: str, revision: str) -> Any:
        proposal = self.query.get("create_pr") == ["1"]
        repository = self._repository(name, write=not proposal)
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        head = repository.find(revision)
        if header.get("parentCommit") not in (None, head):
            raise _Problem(412, None, "A commit has happened since. Please refresh and try again.")
        assert head is not None
        tree = dict(repository.commits[head])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                tree[value["path"]] = File(base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile":
                tree[value["path"]] = File(self.hub.large[value["oid"]], True)
            elif line["key"] == "deletedFile":
                del tree[value["path"]]
        number = 1 + sum(key.startswith("refs/pr/") for key in repository.branches)
        oid = repository.commit(tree, f"refs/pr/{number}" if proposal else revision)
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"}
        return answer | ({"pullRequestUrl": f"{self.hub.url}/{name}/discussions/{number}"} if proposal else {})

    def tag(self, body: bytes, name: str, revision: str) -> Any:
        repository = self._repository(name, write=True)
        tag, oid = json.loads(body)["tag"], repository.find(revision)
        if tag in repository.tags:
            raise _Problem(409, None, "Tag reference exists already")
        if oid is None:
            raise _Problem(404, "RevisionNotFound", "Invalid rev id")
        repository.tags[tag] = oid
        return {}


_NAME = r"/([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", rf"/api/models{_NAME}", _Handler.info),
    ("GET", rf"/api/models{_NAME}/revision/(.+)", _Handler.info),
    ("GET", rf"/api/models{_NAME}/tree/([^/]+|refs/pr/\d+)", _Handler.tree),
    ("GET", rf"/api/models{_NAME}/refs", _Handler.refs),
    ("GET", rf"{_NAME}/resolve/([^/]+)/(.+)", _Handler.content),
    ("HEAD", rf"{_NAME}/resolve/([^/]+)/(.+)", _Handler.content),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("POST", rf"/api/models{_NAME}/preupload/(.+)", _Handler.preupload),
    ("POST", rf"{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", r"/large/([0-9a-f]{64})", _Handler.put),
    ("POST", rf"{_NAME}\.git/info/lfs/objects/verify", _Handler.verify),
    ("POST", rf"/api/models{_NAME}/commit/(.+)", _Handler.commit),
    ("POST", rf"/api/models{_NAME}/tag/(.+)", _Handler.tag),
]
