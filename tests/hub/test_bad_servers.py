"""Servers that are slow, cut answers, lie or refuse: one error that says so, in bounded time and bytes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from omniplat.checkpoint.hub import open_named
from omniplat.checkpoint.hub_http import Limits
from omniplat.errors import InvalidCheckpointError
from tests.hub.conftest import Serve
from tests.hub.server import COMMIT, Behaviour
from tests.support.checkpoints import bf16, write_checkpoint

QUICK = Limits(silence=0.5, request=1.0, attempts=2, wait=3.0)
TENSORS = {"a.weight": bf16(64, 64), "b.weight": bf16(64, 64)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "files", {}, TENSORS)


def refused(limits: Limits = QUICK, revision: str | None = None, seconds: float = 10.0) -> InvalidCheckpointError:
    start = time.monotonic()
    with pytest.raises(InvalidCheckpointError) as caught:
        open_named("org/model", revision, limits)
    assert time.monotonic() - start < seconds
    return caught.value


def test_no_such_repository(folder: Path, serve: Serve) -> None:
    serve(folder)
    with pytest.raises(InvalidCheckpointError, match="no such folder here and no such repository") as caught:
        open_named("org/other")
    assert "HF_TOKEN" in str(caught.value)
    assert caught.value.file == "org/other"


def test_a_private_repository(folder: Path, serve: Serve) -> None:
    serve(folder, Behaviour(private=True))
    assert "if it is private, log in" in refused().problem


def test_no_such_revision(folder: Path, serve: Serve) -> None:
    serve(folder)
    assert "has no revision 'v9'" in refused(revision="v9").problem


def test_a_gated_repository(folder: Path, serve: Serve) -> None:
    hub = serve(folder, Behaviour(gated=True))
    problem = refused().problem
    assert "gated" in problem
    assert f"{hub.url}/org/model" in problem


@pytest.mark.parametrize(("status", "words"), [(401, "no such repository"), (403, "may not be read"), (418, "418")])
def test_other_refusals_of_the_repository(folder: Path, serve: Serve, status: int, words: str) -> None:
    serve(folder, Behaviour(fails={"org/model": [(status, {})]}))
    assert words in refused().problem


@pytest.mark.parametrize(("status", "words"), [(403, "gated"), (404, "404"), (416, "416")])
def test_refusals_of_a_file(folder: Path, serve: Serve, status: int, words: str) -> None:
    serve(folder, Behaviour(fails={"config.json": [(status, {})]}))
    error = refused()
    assert words in error.problem
    assert error.file == "config.json"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_failure_is_tried_again(folder: Path, serve: Serve, status: int) -> None:
    fails = {"model.safetensors": [(status, {"Retry-After": "1"})]}
    hub = serve(folder, Behaviour(fails=fails))
    assert set(open_named("org/model", None, QUICK).components[0].tensors) == set(TENSORS)
    assert sum(path.endswith("model.safetensors") for path, _ in hub.asked) == 2


def test_a_server_that_always_fails(folder: Path, serve: Serve) -> None:
    hub = serve(folder, Behaviour(fails={"model.safetensors": [(503, {})] * 50}))
    assert "status 503, 2 times" in refused().problem
    assert sum(path.endswith("model.safetensors") for path, _ in hub.asked) == 2


@pytest.mark.parametrize("after", ["3600", "99999999999999", "Wed, 21 Oct 2035 07:28:00 GMT", "-1", "1e9"])
def test_a_long_retry_after_is_not_waited_for(folder: Path, serve: Serve, after: str) -> None:
    serve(folder, Behaviour(fails={"org/model": [(429, {"Retry-After": after})] * 9}))
    assert "status 429" in refused().problem


def test_a_server_that_says_nothing(folder: Path, serve: Serve) -> None:
    serve(folder, Behaviour(delay=60))
    assert "cannot be fetched" in refused().problem


def test_a_server_that_sends_a_byte_now_and_then(folder: Path, serve: Serve) -> None:
    serve(folder, Behaviour(drip=0.2))
    assert refused(seconds=15).problem


def test_no_server(folder: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(folder)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be fetched" in refused().problem


def test_answers_that_are_cut(folder: Path, serve: Serve) -> None:
    serve(folder, Behaviour(cut_after=1))
    assert "2 times" in refused().problem


@pytest.mark.parametrize("text", ["bytes 0-7/99", "bytes 5-10/*", "bytes */8", "nonsense", "bytes 0-1/0", "x" * 999])
def test_a_lying_content_range(folder: Path, serve: Serve, text: str) -> None:
    serve(folder, Behaviour(content_range=text))
    assert "the server answers with" in refused().problem


@pytest.mark.parametrize("length", [0, 1, 10**12])
def test_a_lying_content_length(folder: Path, serve: Serve, length: int) -> None:
    serve(folder, Behaviour(content_length=length))
    if length > 1:  # all that is asked for comes, and nothing behind it is waited for
        assert set(open_named("org/model", None, QUICK).components[0].tensors) == set(TENSORS)
    else:
        assert refused().problem


def test_a_server_that_ignores_ranges_is_not_listened_to(folder: Path, serve: Serve) -> None:
    """Five gigabytes follow the header; a few buffers of the operating system are what is sent of them."""
    path = folder / "model.safetensors"
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    header = blob[8 : 8 + length].replace(b'"shape": [64, 64], "data_offsets": [0, 8192]',
                                          b'"shape": [39000, 64000], "data_offsets": [0, 4992000000]')  # fmt: skip
    header = header.replace(b"[8192, 16384]", b"[4992000000, 4992008192]")
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    hub = serve(folder, Behaviour(ignore_range=True, extra={"model.safetensors": 4992008192}))
    opened = open_named("org/model", None, QUICK)
    assert opened.components[0].tensors["a.weight"].shape == (39000, 64000)
    assert hub.sent < 50e6
    with pytest.raises(InvalidCheckpointError, match="range that is asked for"):
        opened.components[0].read_small(opened.components[0].tensors["b.weight"], 1 << 20)


@pytest.mark.parametrize(
    "listing",
    [b"", b"[]", b"null", b"<html>", b'{"sha": 3}', b'{"sha": "main"}', b'{"siblings": []}', b"[" * 100_000,
     b'{"sha": "' + COMMIT.encode() + b'", "siblings": [{"rfilename": 3}]}',
     b'{"sha": "' + COMMIT.encode() + b'", "siblings": [{"rfilename": "config.json", "size": "x"}]}', b"\xff\xfe"],
)  # fmt: skip
def test_an_api_that_is_none(folder: Path, serve: Serve, listing: bytes) -> None:
    serve(folder, Behaviour(listing=listing))
    assert refused().file == "org/model"


def test_a_listing_without_sizes(folder: Path, serve: Serve) -> None:
    siblings = [{"rfilename": "model.safetensors"}, {"rfilename": "config.json"}]
    listing = json.dumps({"sha": COMMIT, "siblings": siblings})
    serve(folder, Behaviour(listing=listing.encode()))
    assert "does not say how large" in refused().problem


def test_an_endless_config(folder: Path, serve: Serve) -> None:
    hub = serve(folder, Behaviour(extra={"config.json": 10**10}))
    assert "more than any config" in refused().problem
    assert hub.sent < 1e6


def test_a_budget_of_bytes(folder: Path, serve: Serve) -> None:
    write_checkpoint(folder, {}, {f"{i}.weight": bf16(2, 2) for i in range(20_000)})
    serve(folder)
    assert "transferred more than" in refused(Limits(transfer=100_000)).problem
