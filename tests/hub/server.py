"""An HTTP server with the routes of the Hugging Face hub from which files are fetched.

It serves folders as repositories, counts requests, and can be told to fail: to cut an answer, to
answer with a status, to stop half-way through a file. Commits and digests are made from the files.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_BYTES = 1 << 20  # files from here on are stored by the digest of their content (LFS)
CHUNK_BYTES = 64 << 10
HELD_S = 100.0


@dataclass
class Repository:
    """One model: its files by commit, and branches or tags that name commits."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    token: str | None = None  # that a client must show; None: anybody may read
    is_gated: bool = False
    sizes: dict[str, int] = field(default_factory=dict)  # that the listing claims, if not the true

    @classmethod
    def of(cls, *folders: Path, **refs: int) -> Repository:
        """A commit for each folder; main is the last. `refs`: further names, by number."""
        commits = [_files(folder) for folder in folders]
        digests = [sorted((path, _digest(each)) for path, each in all.items()) for all in commits]
        names = [hashlib.sha1(repr(each).encode()).hexdigest() for each in digests]
        named = {ref: names[number] for ref, number in refs.items()}
        return cls(dict(zip(names, commits)), {"main": names[-1], **named})

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


@dataclass
class Hub:
    """The server. `requests`: (method, path) in order. Tests change the rest as they like."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)  # that requests showed
    ranges: list[str] = field(default_factory=list)  # that GET requests for files asked for
    status: int | None = None  # answered to everything
    cut_after: int | None = None  # bytes of the next answer with a large file, once
    is_free: threading.Event = field(default_factory=threading.Event)  # else it stops half-way
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fetched(self, method: str = "GET") -> list[str]:
        """Paths of files in the repositories that were asked for, in order."""
        parts = [path.split("/resolve/") for each, path in self.requests if each == method]
        return [part[1].partition("/")[2] for part in parts if len(part) == 2]


@contextmanager
def running_hub(**repositories: Repository) -> Iterator[Hub]:
    """A hub on a free port. Repositories by id, with __ for the slash."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    hub.repositories |= {name.replace("__", "/"): each for name, each in repositories.items()}
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.is_free.set()
    try:
        yield hub
    finally:
        hub.is_free.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _files(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _digest(content: bytes) -> str:
    if len(content) >= LARGE_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path, hub = unquote(url.path), self.hub
        with hub.lock:
            hub.requests.append((self.command, path))
            hub.tokens.append(self.headers.get("authorization", ""))
        if hub.status is not None:
            self._error(hub.status, "")
            return
        if path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/"), parse_qs(url.query))
        elif "/resolve/" in path:
            name, _, rest = path[1:].partition("/resolve/")
            revision, _, file = rest.partition("/")
            self._file(name, revision, file)
        else:
            self._error(404, "RepoNotFound")

    def _repository(self, name: str, revision: str) -> tuple[str, Repository] | None:
        repository = self.hub.repositories.get(name)
        given = self.headers.get("authorization", "")
        if repository is None or (
            repository.token is not None
            and not repository.is_gated
            and given != f"Bearer {repository.token}"
        ):
            self._error(401, "RepoNotFound")
            return None
        commit = repository.commit(revision)
        if commit is None:
            self._error(404, "RevisionNotFound")
            return None
        return commit, repository

    def _api(self, path: str, query: dict[str, list[str]]) -> None:
        name, _, rest = path.partition("/revision/")
        if not rest:
            name, _, rest = path.partition("/tree/")
            if rest:
                self._tree(name, rest.partition("/")[0])
                return
        found = self._repository(name, rest or "main")
        if found is not None:
            commit, repository = found
            siblings = [{"rfilename": file} for file in repository.commits[commit]]
            self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings})

    def _tree(self, name: str, revision: str) -> None:
        found = self._repository(name, revision)
        if found is None:
            return
        commit, repository = found
        entries = []
        for path, content in repository.commits[commit].items():
            size, digest = repository.sizes.get(path, len(content)), _digest(content)
            entry = {"type": "file", "path": path, "size": size, "oid": digest[:40]}
            if len(content) >= LARGE_BYTES:
                entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 134}
            entries.append(entry)
        self._json(entries)

    def _file(self, name: str, revision: str, file: str) -> None:
        found = self._repository(name, revision)
        if found is None:
            return
        commit, repository = found
        given = self.headers.get("authorization", "")
        if repository.is_gated and given != f"Bearer {repository.token}":
            self._error(403 if given else 401, "GatedRepo")
            return
        content = repository.commits[commit].get(file)
        if content is None:
            self._error(404, "EntryNotFound", commit)
            return
        start, end = 0, len(content)
        asked = self.headers.get("range")
        if asked is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(end, int(last) + 1 if last else end)
        if self.command == "GET":
            with self.hub.lock:
                self.hub.ranges.append(asked or "")
        self.send_response(200 if asked is None else 206)
        self.send_header("ETag", f'"{_digest(content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if asked is not None:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command == "GET":
            self._body(content[start:end])

    def _body(self, content: bytes) -> None:
        hub, is_large = self.hub, len(content) >= LARGE_BYTES
        for start in range(0, len(content), CHUNK_BYTES):
            with hub.lock:
                is_cut = is_large and hub.cut_after is not None and start >= hub.cut_after
                if is_cut:
                    hub.cut_after = None
            if is_cut:
                self.close_connection = True
                return
            if is_large and start >= len(content) // 2:
                hub.is_free.wait(timeout=HELD_S)
            try:
                self.wfile.write(content[start : start + CHUNK_BYTES])
            except OSError:  # the client has gone
                self.close_connection = True
                return

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _error(self, status: int, code: str, commit: str | None = None) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()
