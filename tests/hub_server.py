"""A Hugging Face Hub on the loopback interface: enough of its protocol to push a model and to load it again.

Repositories live in memory. Every request body is kept in `received`, so that a test can read each byte that left.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".png")


class HubServer(ThreadingHTTPServer):
    """`files`: repository → its files now; `uploaded`: each file of each commit; `received`: each request body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.forget()

    def forget(self) -> None:
        """Starts anew, without any repository."""
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.uploaded: list[tuple[str, bytes]] = []
        self.objects: dict[str, bytes] = {}
        self.received: list[tuple[str, bytes]] = []
        self.unknown: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def sha(self) -> str:
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()


@contextmanager
def hub_server():
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *args) -> None:
        pass

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        self.server.received.append((path, body))
        for method, pattern, action in _ROUTES:
            found = re.fullmatch(pattern, path)
            if self.command == method and found:
                return action(self, body, *found.groups())
        self.server.unknown.append(f"{self.command} {path}")
        return self._answer({"error": f"not here: {self.command} {path}"}, status=404)

    do_GET = do_HEAD = do_POST = do_PUT = _handle  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, value=None, status: int = 200, data: bytes | None = None, headers=()) -> None:
        data = json.dumps(value).encode() if data is None else data
        self.send_response(status)
        for name, content in headers:
            self.send_header(name, content)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound" if "/resolve/" in self.path else "RepoNotFound")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # -- uploads -----------------------------------------------------------------------------------------------------

    def create_repo(self, body: bytes) -> None:
        asked = json.loads(body)
        repo = "/".join([asked.get("organization") or "someone", asked["name"]])
        self.server.files.setdefault(repo, {".gitattributes": b""})
        self._answer({"url": f"{self.server.url}/{repo}", "id": "1"})

    def whoami(self, body: bytes) -> None:
        self._answer({"name": "someone", "type": "user", "orgs": []})

    def validate_yaml(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        errors = [] if content.startswith("---\n") else [{"message": "no metadata"}]
        self._answer({"errors": errors, "warnings": []}, status=400 if errors else 200)

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self._answer({"files": modes})

    def lfs_batch(self, body: bytes, repo: str) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            actions = {
                "upload": {"href": f"{self.server.url}/lfs/{asked['oid']}"},
                "verify": {"href": f"{self.server.url}/lfs-verify"},
            }
            known = asked["oid"] in self.server.objects
            objects.append({**asked} if known else {**asked, "actions": actions})
        self._answer({"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._answer({"error": "wrong digest"}, status=400)
        self.server.objects[oid] = body
        return self._answer({}, headers=[("ETag", oid)])

    def lfs_verify(self, body: bytes) -> None:
        asked = json.loads(body)
        good = len(self.server.objects.get(asked["oid"], b"")) == asked["size"]
        self._answer({}, status=200 if good else 404)

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        files = self.server.files[repo]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.server.commits.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
                self.server.uploaded.append((value["path"], files[value["path"]]))
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
                self.server.uploaded.append((value["path"], files[value["path"]]))
            else:
                return self._answer({"error": f"not expected: {entry['key']}"}, status=400)
        return self._answer(
            {"commitUrl": f"{self.server.url}/{repo}/commit/{self.server.sha()}", "commitOid": self.server.sha()}
        )

    # -- downloads ---------------------------------------------------------------------------------------------------

    def repo_info(self, body: bytes, repo: str, revision: str | None = None) -> None:
        if repo not in self.server.files:
            return self._answer({"error": "no such repository"}, status=404)
        siblings = [{"rfilename": name} for name in self.server.files[repo]]
        return self._answer({"id": repo, "modelId": repo, "sha": self.server.sha(), "siblings": siblings, "tags": []})

    def tree(self, body: bytes, repo: str, revision: str, folder: str | None = None) -> None:
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.server.files.get(repo, {}).items()
        ]
        self._answer(entries)

    def resolve(self, body: bytes, repo: str, revision: str, name: str) -> None:
        data = self.server.files.get(repo, {}).get(name)
        if data is None:
            return self._answer({"error": "no such file"}, status=404)
        headers = [("ETag", f'"{hashlib.sha1(data).hexdigest()}"'), ("X-Repo-Commit", self.server.sha())]
        return self._answer(data=data, headers=headers)


_REPO = r"([^/]+/[^/]+)"
_ROUTES = (
    ("POST", r"/api/repos/create", _Handler.create_repo),
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/validate-yaml", _Handler.validate_yaml),
    ("POST", rf"/api/models/{_REPO}/preupload/(.+)", _Handler.preupload),
    ("POST", rf"/api/models/{_REPO}/commit/(.+)", _Handler.commit),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/([0-9a-f]{64})", _Handler.lfs_put),
    ("POST", r"/lfs-verify", _Handler.lfs_verify),
    ("GET", rf"/api/models/{_REPO}/tree/([^/]+)(?:/(.*))?", _Handler.tree),
    ("GET", rf"/api/models/{_REPO}/revision/([^/]+)", _Handler.repo_info),
    ("GET", rf"/api/models/{_REPO}", _Handler.repo_info),
    ("GET", rf"/{_REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
    ("HEAD", rf"/{_REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
)
