"""A model hub on 127.0.0.1 for tests: the part of the protocol that downloading uses.

`HubStub` holds repositories (files of one commit) and ways to misbehave; every request is recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


@dataclass
class Repo:
    """Files by name. `sizes` overrides what the listing claims; `gated` closes the files, not the listing."""

    files: dict[str, bytes]
    gated: bool = False
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass
class HubStub:
    """`status` answers everything with an error, `cut_after` breaks off one transfer after so many bytes."""

    repos: dict[str, Repo] = field(default_factory=dict)
    status: int | None = None
    silent: bool = False
    cut_after: int | None = None
    url: str = ""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def fetched(self) -> set[str]:
        """Names of the files whose content was asked for."""
        return {
            path.rpartition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        }


@contextlib.contextmanager
def running(**repos: Repo) -> Iterator[HubStub]:
    """A stub on a free port. Keyword `owner__name` becomes the repository `owner/name`."""
    stub = HubStub({name.replace("__", "/"): repo for name, repo in repos.items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": stub}))
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    stub: HubStub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Keep the test output clean."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.stub.requests.append((self.command, path, self.headers.get("Range")))
        if self.stub.silent:
            self.stub.ended.wait()
            self.close_connection = True
        elif self.stub.status is not None:
            self._send(self.stub.status, b"{}", with_body)
        elif path.startswith("/api/models/"):
            self._listing(path.removeprefix("/api/models/"), with_body)
        else:
            self._file(path.lstrip("/"), with_body)

    def _listing(self, rest: str, with_body: bool) -> None:
        name, _, revision = rest.partition("/revision/")
        repo = self.stub.repos.get(name)
        if repo is None:
            return self._send(401, b"{}", with_body, {"X-Error-Code": "RepoNotFound"})
        if revision not in ("", "main", COMMIT):
            return self._send(404, b"{}", with_body, {"X-Error-Code": "RevisionNotFound"})
        siblings = [
            {"rfilename": file, "size": repo.sizes.get(file, len(content))}
            for file, content in repo.files.items()
        ]
        answer = {"id": name, "sha": COMMIT, "siblings": siblings, "gated": "auto" if repo.gated else False}
        self._send(200, json.dumps(answer).encode(), with_body)

    def _file(self, rest: str, with_body: bool) -> None:
        name, _, place = rest.partition("/resolve/")
        _, _, file = place.partition("/")
        repo = self.stub.repos[name]
        if repo.gated:
            return self._send(403, b"{}", with_body, {"X-Error-Code": "GatedRepo"})
        if file not in repo.files:
            return self._send(404, b"{}", with_body, {"X-Error-Code": "EntryNotFound"})
        content = repo.files[file]
        facts = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            facts["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206 if start else 200, content[start:], with_body, facts)

    def _send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not with_body:
            return
        cut = self.stub.cut_after
        if cut is not None and len(body) > cut:
            self.stub.cut_after = None
            body = body[:cut]
            self.close_connection = True
        self.wfile.write(body)
