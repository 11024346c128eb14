"""A small Hub on loopback: the model API and files with ranges, and every kind of bad manners on request."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_PIECE = 1 << 16


@dataclass
class Behaviour:
    """What the server does otherwise than a good one would. `fails` of a path are used up one by one."""

    gated: bool = False
    private: bool = False
    redirect: bool = False
    ignore_range: bool = False
    cut_after: int | None = None
    content_range: str | None = None
    content_length: int | None = None
    delay: float = 0.0
    drip: float = 0.0
    listing: bytes | None = None
    #: Files that are said to have, and sent with, so many zero bytes behind their own.
    extra: dict[str, int] = field(default_factory=dict)
    #: path ending -> statuses to answer with first, with headers.
    fails: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)


class FakeHub(ThreadingHTTPServer):
    """Serves `folder` as the repository `org/model`; counts what it sends and remembers what it was asked."""

    daemon_threads = True

    def __init__(self, folder: Path, behaviour: Behaviour, repo: str = "org/model") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.behaviour = behaviour
        self.repo = repo
        self.sent = 0
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def elsewhere(self) -> str:
        """The same server as another host, as files lie on one."""
        return f"http://localhost:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave in the middle of an answer: that is what is tested."""


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        hub, how = self.server, self.server.behaviour
        path = unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":
            # huggingface_hub asks this of its own, once a day, whatever it is used for
            return self._answer(404, b"{}", {})
        headers: Message = self.headers
        hub.asked.append((path, dict(headers.items())))
        if how.delay:
            hub.closing.wait(how.delay)
        for ending, answers in how.fails.items():
            if path.endswith(ending) and answers:
                status, extra = answers.pop(0)
                return self._answer(status, b"no", extra)
        if path.startswith("/api/models/"):
            return self._api(path.removeprefix("/api/models/"))
        found = re.fullmatch(rf"/(cdn/)?{re.escape(hub.repo)}/resolve/{COMMIT}/(.+)", path)
        if found is None:
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if how.gated and not found[1]:
            return self._answer(401, b"{}", {"X-Error-Code": "GatedRepo"})
        if how.redirect and not found[1]:
            return self._answer(302, b"", {"Location": f"{hub.elsewhere}/cdn{path}"})
        file = hub.folder / found[2]
        if not file.is_file():
            return self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        return self._file(file)

    def _api(self, path: str) -> None:
        hub, how = self.server, self.server.behaviour
        repo, _, revision = path.partition("/revision/")
        if how.private or repo != hub.repo:
            return self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("", "main", "refs/pr/1", COMMIT):
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if how.listing is not None:
            return self._answer(200, how.listing, {})
        files = [p for p in sorted(hub.folder.rglob("*")) if p.is_file()]
        siblings = [{"rfilename": str(p.relative_to(hub.folder)), "size": self._size(p)} for p in files]
        return self._answer(200, json.dumps({"id": hub.repo, "sha": COMMIT, "siblings": siblings}).encode(), {})

    def _size(self, file: Path) -> int:
        return file.stat().st_size + self.server.behaviour.extra.get(file.name, 0)

    def _file(self, file: Path) -> None:
        how, size = self.server.behaviour, self._size(file)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or how.ignore_range:
            start, end, status, extra = 0, size, 200, {}
        else:
            start, end, status = int(asked[1]), min(int(asked[2]) + 1, size), 206
            extra = {"Content-Range": how.content_range or f"bytes {start}-{end - 1}/{size}"}
        self.send_response(status)
        length = end - start if how.content_length is None else how.content_length
        for name, value in {**extra, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()
        if how.cut_after is not None:
            end = min(end, start + how.cut_after)
            self.close_connection = True
        with file.open("rb") as opened:
            opened.seek(start)
            self._send(opened, end - start)

    def _send(self, opened: Any, count: int) -> None:
        how = self.server.behaviour
        piece = 1 if how.drip else _PIECE
        while count > 0 and not self.server.closing.is_set():
            blob = (opened.read(min(piece, count)) or b"").ljust(min(piece, count), b"\0")
            self.wfile.write(blob)
            self.server.sent += len(blob)
            count -= len(blob)
            if how.drip:
                time.sleep(how.drip)

    def _answer(self, status: int, body: bytes, extra: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**extra, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.server.sent += len(body)


@contextmanager
def serving(folder: Path, behaviour: Behaviour | None = None) -> Iterator[FakeHub]:
    hub = FakeHub(folder, behaviour or Behaviour())
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        hub.shutdown()
        hub.server_close()
        thread.join()
