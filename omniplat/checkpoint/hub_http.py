"""HTTP for hub.py: requests that are bounded in bytes, time and attempts, whatever the server does.

Requests go through huggingface_hub's own session, so that proxies, certificates and tokens are what its user has set.
The session is requests' before huggingface_hub 1 and httpx' since.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any, Generic, TypeVar

from omniplat.errors import InvalidCheckpointError

T = TypeVar("T")

_CHUNK = 1 << 16
#: Statuses after which the same request may be answered.
_PASSING = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one plan's traffic.

    `silence` seconds between two pieces of an answer, `request` seconds for one answer (and one more for each
    100 kB asked), `attempts` at one answer, `wait` seconds between attempts in all, `transfer` bytes for everything.
    """

    silence: float = 10.0
    request: float = 30.0
    attempts: int = 3
    wait: float = 20.0
    workers: int = 8
    transfer: int = 256 << 20

    def seconds(self, length: int) -> float:
        return self.request + length / 100_000

    def stall(self, length: int) -> float:
        """Seconds after which answers of `length` bytes are given up, whatever they are waiting for."""
        return self.attempts * (self.seconds(length) + self.silence) + self.wait


class _Passing(Exception):
    """What may be over at the next attempt, after `after` seconds where the server says so."""

    def __init__(self, problem: str, after: float | None = None) -> None:
        super().__init__(problem)
        self.after = after


class Refused(Exception):
    """An answer other than the file: its status, and the Hub's own code for the reason."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.code = code


class HubClient:
    """GET requests within `limits`; counts what comes over the wire."""

    def __init__(self, limits: Limits) -> None:
        from huggingface_hub.utils import build_hf_headers

        self.limits = limits
        self.requests = 0
        self.transferred = 0
        self._headers: dict[str, str] = {**build_hf_headers(library_name="omniplat"), "Accept-Encoding": "identity"}

    def get(self, url: str, name: str, most: int) -> bytes:
        """The whole answer, of at most `most` bytes; `name` is what errors call it."""
        return self._attempts(name, lambda: self._whole(url, name, most))

    def get_range(self, url: str, name: str, start: int, length: int, size: int) -> bytes:
        """`length` bytes from `start` of a file that has `size`; not one more is read, whatever is sent."""
        return self._attempts(name, lambda: self._range(url, name, start, length, size))

    def _attempts(self, name: str, attempt: Callable[[], bytes]) -> bytes:
        waited = 0.0
        for count in range(1, self.limits.attempts + 1):
            self.requests += 1
            try:
                return attempt()
            except _Passing as exc:
                pause = exc.after if exc.after is not None else 0.5 * 2 ** (count - 1)
                if count == self.limits.attempts:
                    raise InvalidCheckpointError(f"{exc}, {count} times", file=name) from exc
                if waited + pause > self.limits.wait:
                    raise InvalidCheckpointError(
                        f"{exc}; the server asks to wait {pause:.0f} s: try again later", file=name
                    ) from exc
                time.sleep(pause)
                waited += pause
        raise AssertionError("the last attempt returns or raises")

    def _whole(self, url: str, name: str, most: int) -> bytes:
        with self._answer(url, {}, name) as (_, headers, pieces):
            body = self._collect(pieces, most + 1, self.limits.seconds(most))
            if len(body) > most:
                raise InvalidCheckpointError(f"has more than {most} bytes", file=name)
            declared = headers.get("content-length", "")
            if declared.isdecimal() and len(body) < int(declared):
                raise _Passing(f"cut off after {len(body)} of {declared} bytes")
            return body

    def _range(self, url: str, name: str, start: int, length: int, size: int) -> bytes:
        asked = {"Range": f"bytes={start}-{start + length - 1}"}
        with self._answer(url, asked, name) as (status, headers, pieces):
            skip = 0
            if status == 206:
                _check_range(headers.get("content-range", ""), name, start, length, size)
            elif start <= _CHUNK:
                skip = start  # the server ignores ranges: what precedes is little, what follows is not read
            else:
                raise InvalidCheckpointError("the server does not answer with the range that is asked for", file=name)
            body = self._collect(pieces, skip + length, self.limits.seconds(length))
            if len(body) < skip + length:
                raise _Passing(f"cut off after {len(body)} of {skip + length} bytes")
            return body[skip:]

    def _collect(self, pieces: Iterator[bytes], most: int, seconds: float) -> bytes:
        """The first `most` bytes of an answer."""
        end = time.monotonic() + seconds
        body = bytearray()
        for piece in pieces:
            self.transferred += len(piece)
            body += piece
            if len(body) >= most:
                break
            if self.transferred > self.limits.transfer:
                raise InvalidCheckpointError(f"planning has transferred more than {self.limits.transfer >> 20} MiB")
            if time.monotonic() > end:
                raise _Passing(f"no answer within {seconds:.0f} s")
        return bytes(body[:most])

    @contextmanager
    def _answer(
        self, url: str, asked: Mapping[str, str], name: str
    ) -> Iterator[tuple[int, Mapping[str, str], Iterator[bytes]]]:
        """Status, headers and pieces of an answer that holds the file; the connection is closed behind it."""
        try:
            with _opened(url, {**self._headers, **asked}, self.limits.silence) as (status, headers, pieces):
                if status in _PASSING:
                    raise _Passing(f"the server answers with status {status}", _seconds(headers.get("retry-after")))
                if status not in (200, 206):
                    raise Refused(status, headers.get("x-error-code", ""))
                if headers.get("content-encoding", "identity") != "identity":
                    raise InvalidCheckpointError("the server sends it compressed, which was not asked for", file=name)
                yield status, headers, pieces
        except (_Passing, Refused, InvalidCheckpointError):
            raise
        except Exception as exc:
            # whatever the HTTP library in use raises for connections that fail: two libraries, many classes
            text = " ".join(str(exc).split())[:160]
            raise _Passing(f"cannot be fetched: {type(exc).__name__}: {text}") from exc


@contextmanager
def _opened(
    url: str, headers: Mapping[str, str], seconds: float
) -> Iterator[tuple[int, Mapping[str, str], Iterator[bytes]]]:
    from huggingface_hub.utils import get_session

    session: Any = get_session()
    if callable(getattr(session, "stream", None)):  # requests' sessions have a flag of that name
        with session.stream("GET", url, headers=headers, timeout=seconds, follow_redirects=True) as answer:
            yield answer.status_code, answer.headers, answer.iter_raw()
    else:
        with session.get(url, headers=headers, timeout=seconds, stream=True, allow_redirects=True) as answer:
            yield answer.status_code, answer.headers, _pieces(answer.raw)


def _pieces(raw: Any) -> Iterator[bytes]:
    """What urllib3 receives, as it comes where this version can do that."""
    if hasattr(raw, "read1"):
        return iter(lambda: bytes(raw.read1(_CHUNK, decode_content=False)), b"")
    pieces: Iterator[bytes] = raw.stream(_CHUNK, decode_content=False)
    return pieces


def _check_range(text: str, name: str, start: int, length: int, size: int) -> None:
    wanted = f"bytes {start}-{start + length - 1}/"
    span, _, total = text.partition("/")
    if f"{span}/" != wanted or total not in ("*", str(size)):
        raise InvalidCheckpointError(f"the server answers with {text[:60]!r}, asked for {wanted}{size}", file=name)


def _seconds(text: str | None) -> float | None:
    """Seconds of a Retry-After header; None where it is missing or a date."""
    return float(text) if text is not None and text.isdecimal() and len(text) < 10 else None


class _Queue(Generic[T]):
    """Jobs that threads take one by one, and what came of them."""

    def __init__(self, jobs: Sequence[Callable[[], T]]) -> None:
        self.changed = Condition()
        self.waiting = deque(enumerate(jobs))
        self.results: dict[int, T] = {}
        self.failure: BaseException | None = None

    def work(self) -> None:
        while True:
            with self.changed:
                if not self.waiting or self.failure is not None:
                    return
                position, job = self.waiting.popleft()
            try:
                result = job()
            except BaseException as exc:
                with self.changed:
                    self.failure = self.failure or exc
                    self.changed.notify_all()
                return
            with self.changed:
                self.results[position] = result
                self.changed.notify_all()


def in_parallel(jobs: Sequence[Callable[[], T]], limits: Limits, most: int) -> list[T]:
    """The results of `jobs`, which fetch at most `most` bytes each, in order; the first exception is raised.

    The threads are daemons: one that a server holds by sending a byte now and then keeps nobody from leaving.
    """
    queue = _Queue(jobs)
    threads = [Thread(target=queue.work, daemon=True) for _ in range(min(limits.workers, len(jobs)))]
    for thread in threads:
        thread.start()
    with queue.changed:
        while len(queue.results) < len(jobs) and queue.failure is None:
            done = len(queue.results)
            moved = queue.changed.wait(limits.stall(most))
            if not moved and len(queue.results) == done and queue.failure is None:
                queue.failure = InvalidCheckpointError("the server keeps sending and comes to no end: given up")
    if queue.failure is not None:
        raise queue.failure
    return [queue.results[position] for position in range(len(jobs))]
