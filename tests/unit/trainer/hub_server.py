"""A server that speaks as much of the Hub's protocol as an upload needs: repositories, large files, commits."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """What was uploaded: name of the repository -> path -> content, and the messages of its commits."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.tokens: set[str] = set()
        self.private: dict[str, Any] = {}
        self.objects: dict[str, bytes] = {}
        self.refused: list[str] = []

    def answer(self, method: str, path: str, body: bytes, address: str) -> tuple[int, Any]:
        """The status and JSON of a request."""
        if path == "/api/whoami-v2":
            return 200, {"name": "someone", "type": "user", "auth": {}}
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization') or 'someone'}/{given['name']}"
            self.private[name] = given.get("private") or given.get("visibility") == "private"  # older and newer clients
            self.files.setdefault(name, {})
            return 200, {"url": f"{address}/{name}", "name": name, "id": "1"}
        if "/preupload/" in path:
            asked = json.loads(body)["files"]
            return 200, {"files": [self._mode(file["path"]) for file in asked]}
        if path.endswith("/info/lfs/objects/batch"):
            found = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [self._target(item, address) for item in found]}
        if method == "PUT" and path.startswith("/lfs/"):
            digest = path.removeprefix("/lfs/")
            if hashlib.sha256(body).hexdigest() != digest:
                return 422, {"error": "the content is not what was announced"}
            self.objects[digest] = body
            return 200, {}
        if "/commit/" in path:
            return self._commit("/".join(path.split("/")[3:5]), body, address)
        self.refused.append(f"{method} {path}")
        return 404, {"error": "not part of this server"}

    def _mode(self, path: str) -> dict[str, Any]:
        return {
            "path": path,
            "uploadMode": "lfs" if path.endswith(".safetensors") else "regular",
            "shouldIgnore": False,
        }

    def _target(self, item: dict[str, Any], address: str) -> dict[str, Any]:
        return {**item, "actions": {"upload": {"href": f"{address}/lfs/{item['oid']}"}}}

    def _commit(self, name: str, body: bytes, address: str) -> tuple[int, Any]:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.messages.append(value["summary"])
            elif entry["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.files[name][value["path"]] = self.objects[value["oid"]]
        oid = hashlib.sha1(body).hexdigest()
        return 200, {"commitUrl": f"{address}/{name}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None}


@contextmanager
def serving() -> Iterator[tuple[Hub, str]]:
    """A Hub on a port of this machine, and its address."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self._body()
            hub.tokens.add(self.headers.get("authorization", ""))
            status, value = hub.answer(self.command, self.path.split("?")[0], body, address)
            answer = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("transfer-encoding", ""):
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            return b"".join(parts)

        do_GET = do_POST = do_PUT = do_HEAD = _serve  # noqa: N815  the base class's names

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, address
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
