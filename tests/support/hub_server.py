"""A server on the loopback that speaks the Hub's protocol: repositories, large files in parts, commits, downloads with ranges."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from unittest import mock
from urllib.parse import unquote

TOKEN = "hf_" + "uploadSecret" * 3
"""The token that may write; requests with another one are refused."""


class Answer(NamedTuple):
    """Status, body and headers of a response."""

    status: int
    body: bytes = b"{}"
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, text: str, code: str = "") -> None:
        super().__init__(text)
        self.answer = Answer(
            status,
            json.dumps({"error": text}).encode(),
            {"x-error-code": code, "x-error-message": text} if code else {},
        )


@dataclass
class Commit:
    """One commit: its message and all files of the repository after it."""

    oid: str
    message: str
    files: dict[str, bytes]


@dataclass
class Repository:
    """Branches of one repository, and the names of its large files."""

    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)

    def head(self, revision: str) -> Commit:
        """Return the newest commit of a branch, or the commit of this hash."""
        if revision in self.branches:
            return self.branches[revision][-1]
        matching_commits = [
            commit
            for branch in self.branches.values()
            for commit in branch
            if commit.oid == revision
        ]
        if not matching_commits:
            raise Refused(404, f"revision {revision} not found", "RevisionNotFound")
        return matching_commits[0]


@dataclass
class Hub:
    """Repositories and large objects, the requests that arrived, and the faults to produce."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    part_size: int | None = None
    """Files above this size are uploaded in parts."""
    received: Counter[str] = field(default_factory=Counter)
    """Uploads that have arrived whole, by object or object/part."""
    tokens: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    refuse_after: int | None = None
    """Number of large uploads after which further ones are refused."""
    refused: set[int] = field(default_factory=set)
    """Numbers of large uploads, from 1, that are refused."""
    gate: threading.Event = field(default_factory=threading.Event)
    """Large uploads beyond the first `before_gate` wait for it."""
    before_gate: int | None = None
    repeats_token: bool = False
    """True if refusals quote the token that they refuse."""
    breaks_after: int | None = None
    """Number of bytes after which the connection of the next download of a large object breaks."""
    ranges: list[str] = field(default_factory=list)
    """Ranges of downloads that asked for a part of a large object."""
    num_uploads: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Return the content of a repository."""
        return self.repositories[name].head(revision).files

    def messages(self, name: str, revision: str = "main") -> list[str]:
        """Return the messages of a branch's commits after the first, which the Hub makes."""
        return [
            commit.message for commit in self.repositories[name].branches[revision][1:]
        ]

    # -- routes ---------------------------------------------------------------------------------------------------
    def answer(self, method: str, path: str, body: bytes, headers: Any) -> Answer:
        """Return the response to a request."""
        routes = (
            (r"GET /api/agent-harnesses", self.harnesses),
            (r"GET /api/whoami-v2", self.whoami),
            (r"POST /api/validate-yaml", self.validate),
            (r"POST /api/repos/create", self.create),
            (r"POST /api/models/([^/]+/[^/]+)/preupload/(.+)", self.preupload),
            (r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch", self.batch),
            (r"PUT /lfs/([0-9a-f]{64})(?:/(\d+))?", self.put),
            (r"POST /lfs/([0-9a-f]{64})/complete", self.complete),
            (r"POST /lfs/([0-9a-f]{64})/verify", self.verify),
            (r"POST /api/models/([^/]+/[^/]+)/branch/(.+)", self.branch),
            (r"POST /api/models/([^/]+/[^/]+)/commit/(.+)", self.commit),
            (r"POST /api/models/([^/]+/[^/]+)/paths-info/(.+)", self.paths_info),
            (r"GET /api/models/([^/]+/[^/]+)/refs", self.refs),
            (r"GET /api/models/([^/]+/[^/]+)/tree/([^/]+)", self.tree),
            (r"GET /api/models/([^/]+/[^/]+)(?:/revision/(.+))?", self.info),
            (r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.resolve),
            (r"(?:GET|HEAD) /objects/([0-9a-f]{64})", self.object),
        )
        for pattern, handler in routes:
            if match := re.fullmatch(pattern, f"{method} {path}"):
                arguments = [
                    value if value is None else unquote(value)
                    for value in match.groups()
                ]
                return handler(headers, body, *arguments)  # type: ignore[arg-type]
        self.unknown.append(f"{method} {path}")
        return Answer(404, b'{"error": "not part of this server"}')

    def check(self, headers: Any) -> None:
        """Refuse a request without the right token."""
        authorization = headers.get("authorization", "")
        self.tokens.add(authorization)
        if authorization != f"Bearer {TOKEN}":
            echoed_token = f" {authorization}" if self.repeats_token else ""
            raise Refused(401, f"invalid credentials{echoed_token}")

    def find(self, headers: Any, name: str) -> Repository:
        """Return a repository; private ones exist only for their owner."""
        repository = self.repositories.get(name)
        if repository is None or (
            repository.private and headers.get("authorization") != f"Bearer {TOKEN}"
        ):
            raise Refused(404, f"repository {name} not found", "RepoNotFound")
        self.tokens.add(headers.get("authorization", ""))
        return repository

    def harnesses(self, headers: Any, body: bytes) -> Answer:
        return _json({})

    def whoami(self, headers: Any, body: bytes) -> Answer:
        self.check(headers)
        return _json({"name": "someone", "type": "user", "auth": {}})

    def validate(self, headers: Any, body: bytes) -> Answer:
        return _json({"errors": [], "warnings": []})

    def create(self, headers: Any, body: bytes) -> Answer:
        self.check(headers)
        request = json.loads(body)
        name = f"{request.get('organization') or 'someone'}/{request['name']}"
        created = {"url": f"{self.address}/{name}", "name": name, "id": "1"}
        if name in self.repositories:
            return _json(created, 409)
        # older and newer clients
        private = bool(request.get("private") or request.get("visibility") == "private")
        first = Commit(
            hashlib.sha1(name.encode()).hexdigest(),
            "initial commit",
            {".gitattributes": b""},
        )
        self.repositories[name] = Repository(private, {"main": [first]})
        return _json(created)

    def branch(self, headers: Any, body: bytes, name: str, branch: str) -> Answer:
        self.check(headers)
        repository = self.find(headers, name)
        if branch in repository.branches:
            return _json({"error": "exists"}, 409)
        repository.branches[branch] = list(repository.branches["main"])
        return _json({})

    # -- uploads --------------------------------------------------------------------------------------------------
    def preupload(self, headers: Any, body: bytes, name: str, revision: str) -> Answer:
        self.check(headers)
        existing_files = self.find(headers, name).head(revision).files
        requested_files = json.loads(body)["files"]
        modes = {
            file["path"]: "lfs" if file["path"].endswith((".safetensors", ".bin")) or file["size"] > 10_000_000 else "regular"
            for file in requested_files
        }  # fmt: skip
        return _json(
            {
                "files": [
                    {
                        "path": path,
                        "uploadMode": mode,
                        "shouldIgnore": False,
                        "oid": _sha256(existing_files[path])
                        if mode == "lfs" and path in existing_files
                        else None,
                    }
                    for path, mode in modes.items()
                ]
            }
        )

    def batch(self, headers: Any, body: bytes, name: str) -> Answer:
        self.check(headers)
        actions = [self.upload_actions(item) for item in json.loads(body)["objects"]]
        return _json({"transfer": "basic", "objects": actions})

    def upload_actions(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return the addresses to upload an object to; none if it is there already."""
        oid, size = item["oid"], item["size"]
        if oid in self.objects:
            return dict(item)
        verify = {"href": f"{self.address}/lfs/{oid}/verify"}
        if self.part_size is None or size <= self.part_size:
            return {
                **item,
                "actions": {
                    "upload": {"href": f"{self.address}/lfs/{oid}"},
                    "verify": verify,
                },
            }
        header = {"chunk_size": str(self.part_size)}
        header |= {
            str(part_index + 1): f"{self.address}/lfs/{oid}/{part_index + 1}"
            for part_index in range(-(-size // self.part_size))
        }
        upload = {"href": f"{self.address}/lfs/{oid}/complete", "header": header}
        return {**item, "actions": {"upload": upload, "verify": verify}}

    def put(
        self, headers: Any, body: bytes, oid: str, part_number: str | None
    ) -> Answer:
        assert "authorization" not in headers, (
            "upload addresses are signed; a token must not reach the object store"
        )
        with self.lock:
            self.num_uploads += 1
            upload_number = self.num_uploads
        if (
            self.before_gate is not None
            and upload_number > self.before_gate
            and not self.gate.wait(60)
        ):
            raise Refused(503, "the gate was not opened")
        if upload_number in self.refused or (
            self.refuse_after is not None and upload_number > self.refuse_after
        ):
            raise Refused(403, "the signature has expired")
        with self.lock:
            self.received[oid if part_number is None else f"{oid}/{part_number}"] += 1
        if part_number is not None:
            self.parts.setdefault(oid, {})[int(part_number)] = body
        else:
            self.store(oid, body)
        return Answer(200, b"", {"etag": f'"{hashlib.md5(body).hexdigest()}"'})

    def store(self, oid: str, content: bytes) -> None:
        """Keep an object whose content is what was announced."""
        if _sha256(content) != oid:
            raise Refused(422, "the content is not what was announced")
        self.objects[oid] = content

    def complete(self, headers: Any, body: bytes, oid: str) -> Answer:
        listed, received_parts = json.loads(body)["parts"], self.parts.pop(oid)
        for item in listed:
            digest = hashlib.md5(received_parts[item["partNumber"]]).hexdigest()
            if item["etag"].strip('"') != digest:
                raise Refused(400, f"part {item['partNumber']} has another ETag")
        self.store(oid, b"".join(received_parts[item["partNumber"]] for item in listed))
        return _json({})

    def verify(self, headers: Any, body: bytes, oid: str) -> Answer:
        self.check(headers)
        if (
            oid not in self.objects
            or len(self.objects[oid]) != json.loads(body)["size"]
        ):
            raise Refused(404, "the object has not arrived")
        return _json({})

    def commit(self, headers: Any, body: bytes, name: str, revision: str) -> Answer:
        self.check(headers)
        repository = self.find(headers, name)
        files, message = dict(repository.head(revision).files), ""
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            match entry["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.objects[value["oid"]]
                    repository.large.add(value["path"])
                case "deletedFile":
                    del files[value["path"]]
        oid = hashlib.sha1(
            body + str(len(repository.branches[revision])).encode()
        ).hexdigest()
        repository.branches[revision].append(Commit(oid, message, files))
        return _json(
            {
                "commitUrl": f"{self.address}/{name}/commit/{oid}",
                "commitOid": oid,
                "pullRequestUrl": None,
            }
        )

    # -- downloads ------------------------------------------------------------------------------------------------
    def info(
        self, headers: Any, body: bytes, name: str, revision: str | None
    ) -> Answer:
        repository = self.find(headers, name)
        head = repository.head(revision or "main")
        siblings = [{"rfilename": path} for path in head.files]
        return _json(
            {
                "_id": "1",
                "id": name,
                "sha": head.oid,
                "private": repository.private,
                "siblings": siblings,
            }
        )

    def refs(self, headers: Any, body: bytes, name: str) -> Answer:
        branches = self.find(headers, name).branches
        heads = [
            {"name": b, "ref": f"refs/heads/{b}", "targetCommit": c[-1].oid}
            for b, c in branches.items()
        ]
        return _json({"branches": heads, "tags": [], "converts": []})

    def tree(self, headers: Any, body: bytes, name: str, revision: str) -> Answer:
        repository = self.find(headers, name)
        files = repository.head(revision).files
        return _json(
            [self.entry(repository, path, content) for path, content in files.items()]
        )

    def paths_info(self, headers: Any, body: bytes, name: str, revision: str) -> Answer:
        repository = self.find(headers, name)
        files = repository.head(revision).files
        form = unquote(body.decode())
        requested_paths = (
            json.loads(form)["paths"]
            if form.startswith("{")
            else re.findall(r"paths=([^&]+)", form)
        )
        return _json(
            [
                self.entry(repository, path, files[path])
                for path in requested_paths
                if path in files
            ]
        )

    def entry(
        self, repository: Repository, path: str, content: bytes
    ) -> dict[str, Any]:
        """Return the description of a file in a listing."""
        description: dict[str, Any] = {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": _git_oid(content),
        }
        if path in repository.large:
            description["lfs"] = {
                "oid": _sha256(content),
                "size": len(content),
                "pointerSize": 130,
            }
        return description

    def resolve(
        self, headers: Any, body: bytes, name: str, revision: str, path: str
    ) -> Answer:
        repository = self.find(headers, name)
        head = repository.head(revision)
        if path not in head.files:
            missing = Refused(404, f"{path} is not in {name}", "EntryNotFound").answer
            return Answer(
                404, missing.body, {**missing.headers, "x-repo-commit": head.oid}
            )
        content = head.files[path]
        if path not in repository.large:
            return _ranged(
                content,
                headers,
                {"x-repo-commit": head.oid, "etag": f'"{_git_oid(content)}"'},
            )
        oid = _sha256(content)
        self.objects.setdefault(oid, content)
        # another host, as the Hub's storage is
        elsewhere = self.address.replace("127.0.0.1", "localhost")
        moved = {
            "location": f"{elsewhere}/objects/{oid}",
            "x-linked-etag": f'"{oid}"',
            "x-linked-size": str(len(content)),
        }
        return Answer(302, b"", {**moved, "x-repo-commit": head.oid, "etag": f'"{oid}"'})  # fmt: skip

    def object(self, headers: Any, body: bytes, oid: str) -> Answer:
        self.ranges += [headers["range"]] if "range" in headers else []
        return _ranged(self.objects[oid], headers, {"etag": f'"{oid}"'})


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(
        status, json.dumps(value).encode(), {"content-type": "application/json"}
    )


def _ranged(content: bytes, headers: Any, answer_headers: dict[str, str]) -> Answer:
    """Return the content, or the range of it that the request names."""
    range_match = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
    if range_match is None:
        return Answer(200, content, {**answer_headers, "accept-ranges": "bytes"})
    start, end = int(range_match[1]), int(range_match[2] or len(content) - 1)
    return Answer(
        206,
        content[start : end + 1],
        {**answer_headers, "content-range": f"bytes {start}-{end}/{len(content)}"},
    )


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body, path = self._body(), self.path.split("?")[0]
            hub.requests.append(f"{self.command} {path}")
            try:
                answer = hub.answer(self.command, path, body, self.headers)
            except Refused as refusal:
                answer = refusal.answer
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(answer.body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if (
                self.command == "GET"
                and path.startswith("/objects/")
                and hub.breaks_after is not None
            ):
                first_bytes, hub.breaks_after = answer.body[: hub.breaks_after], None
                self.wfile.write(first_bytes)
                self.close_connection = True
                return
            self.wfile.write(answer.body)

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("transfer-encoding", ""):
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            chunks = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            return b"".join(chunks)

        do_GET = do_POST = do_PUT = do_HEAD = _serve  # noqa: N815  the base class's names

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    return Handler


@contextmanager
def serving() -> Iterator[Hub]:
    """Run a Hub on a port of this machine; its `address` is for HF_ENDPOINT."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def client_at(address: str, cache: str) -> Iterator[None]:
    """Point this process's Hub client to the address, as HF_ENDPOINT does for a new process."""
    from huggingface_hub import constants  # optional
    from tqdm import tqdm

    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    with (
        mock.patch.object(constants, "ENDPOINT", address),
        mock.patch.object(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template),
        mock.patch.object(constants, "HF_HUB_CACHE", cache),
        mock.patch.object(constants, "HF_HUB_DISABLE_XET", True),
        # no thread that outlives a test
        mock.patch.object(tqdm, "monitor_interval", 0),
        warnings.catch_warnings(),
    ):
        # the client, about its own calls
        warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)
        yield


def environment(address: str, home: str) -> dict[str, str]:
    """Return the variables that point a new process's Hub client to the address."""
    return {
        "HF_ENDPOINT": address,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": home,
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
