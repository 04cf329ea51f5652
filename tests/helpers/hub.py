"""A small Hugging Face Hub on localhost: the routes and headers by which huggingface_hub lists and downloads files."""

import hashlib
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import sleep
from urllib.parse import unquote, urlsplit

_LARGE = 64  # bytes from which a file is in the store of large files, to which the Hub redirects
_API = re.compile(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """The files of a repository by path, at one commit, which is `main` and `v1`."""

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False

    @property
    def commit(self):
        hashes = sorted((path, _git_hash(data)) for path, data in self.files.items())
        return hashlib.sha1(repr(hashes).encode()).hexdigest()

    def knows(self, revision):
        return revision in ("main", "v1", "refs/pr/1", self.commit)


@dataclass
class FakeHub:
    """The server: its repositories, what it was asked for, and when it breaks off."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # method, path and the header Range
    token: str = "hf_good"
    cut_after: list[int] = field(default_factory=list)  # bytes that the next answers with a large file send
    status: int | None = None  # of every answer
    pause: float = 0.0  # seconds between pieces of 64 KiB of large files
    url: str = ""
    store: str = ""  # address of the large files, on another host

    def downloads(self):
        """Return the files whose contents were sent, without their folders."""
        stored = {
            hashlib.sha256(data).hexdigest(): path
            for repo in self.repositories.values()
            for path, data in repo.files.items()
        }
        sent = [line.split()[1] for line in self.requests if line.startswith("GET /") and "/api/" not in line]
        return sorted(
            stored.get(path.rpartition("/")[2], path.partition("/resolve/")[2].partition("/")[2]) for path in sent
        )


@contextmanager
def serve_hub():
    """Run a hub until the block ends."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        hub.store = hub.url.replace("127.0.0.1", "localhost")
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield hub
        server.shutdown()


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if self.hub.status:
            return self._answer(self.hub.status)
        if path.startswith("/store/"):
            return self._stored(path.removeprefix("/store/"))
        split = urlsplit(self.path).path  # a revision may contain quoted slashes
        match = _API.match(split) or _FILE.match(split)
        if match is None:
            return self._answer(404, code="RepoNotFound")
        authorized = self.headers.get("authorization") == f"Bearer {self.hub.token}"
        repository = self.hub.repositories.get(match[1])
        if repository is None or (repository.private and not authorized):
            return self._answer(401, code="RepoNotFound")
        if match.re is _FILE:
            return self._file(repository, unquote(match[2]), unquote(match[3]), authorized)
        if not repository.knows(unquote(match[3])):
            return self._answer(404, code="RevisionNotFound")
        if match[2] == "tree":
            return self._json([_entry(name, data) for name, data in repository.files.items()])
        return self._json({"id": match[1], "modelId": match[1], "sha": repository.commit, "siblings": []})

    def _file(self, repository, revision, path, authorized):
        if repository.gated and not authorized:
            return self._answer(401, code="GatedRepo")
        if not repository.knows(revision):
            return self._answer(404, code="RevisionNotFound")
        if path not in repository.files:
            return self._answer(404, code="EntryNotFound", headers={"X-Repo-Commit": repository.commit})
        data = repository.files[path]
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{_git_hash(data)}"'}
        if len(data) < _LARGE:
            return self._answer(200, data, headers=headers)
        stored = hashlib.sha256(data).hexdigest()
        linked = {
            "X-Linked-Etag": f'"{stored}"',
            "X-Linked-Size": str(len(data)),
            "Location": f"{self.hub.store}/store/{stored}",
        }
        return self._answer(302, headers=headers | linked)

    def _stored(self, stored):
        """Send a large file, from the byte that the header Range names."""
        every = (data for repository in self.hub.repositories.values() for data in repository.files.values())
        data = next(data for data in every if hashlib.sha256(data).hexdigest() == stored)
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{stored}"', "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._answer(206 if begin else 200, data[begin:], headers=headers, large=self.command == "GET")

    def _json(self, value):
        self._answer(200, json.dumps(value).encode(), headers={"Content-Type": "application/json"})

    def _answer(self, status, body=b"", *, code=None, headers=None, large=False):
        self.send_response(status)
        for name, value in {**(headers or {}), **({"X-Error-Code": code} if code else {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.cut_after.pop(0) if large and self.hub.cut_after else len(body)
        self._send(body[:cut])
        if cut < len(body):
            self.close_connection = True

    def _send(self, body):
        piece = 1 << 16
        for begin in range(0, len(body), piece):
            try:
                self.wfile.write(body[begin : begin + piece])
            except OSError:  # the client is gone
                self.close_connection = True
                return
            sleep(self.hub.pause)


def _entry(path, data):
    entry = {"type": "file", "path": path, "size": len(data), "oid": _git_hash(data)}
    if len(data) >= _LARGE:
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


def _git_hash(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
