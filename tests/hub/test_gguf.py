"""GGUF files on the Hub: planned from their headers, fetched in pieces, whatever the server or the file is like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from omniplat.api import load, make_planned, plan
from omniplat.checkpoint import gguf as reader
from omniplat.checkpoint.folder import open_checkpoint
from omniplat.checkpoint.hub import HubRepository, open_named
from omniplat.checkpoint.hub_http import Limits
from omniplat.errors import InvalidCheckpointError
from tests.hub.conftest import Serve
from tests.hub.server import Behaviour

gguf = pytest.importorskip("gguf")
N, K = 64, 512


def write(path: Path, words: int = 200, names: tuple[str, ...] = ("blk.0.attn_q", "blk.0.ffn_down")) -> Path:
    """A file whose header has a vocabulary of so many words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"word-{index}" for index in range(words)])
    kind = gguf.GGMLQuantizationType.Q8_0
    for seed, name in enumerate(names):
        values = np.random.default_rng(seed).normal(0, 1, (N, K)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def document(name: str | Path) -> dict[str, object]:
    found = plan(name, "cpu").to_dict()
    del found["checkpoint"]
    return found


@pytest.mark.parametrize(("first", "step"), [(16, 40), (100, 1000), (1 << 18, 1 << 22)])
def test_the_plan_is_that_of_the_file(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch, first: int, step: int
) -> None:
    """However the header is cut into pieces."""
    monkeypatch.setattr(reader, "_FIRST_BYTES", first)
    monkeypatch.setattr(reader, "_STEP_BYTES", step)
    path = write(tmp_path / "files" / "model.gguf", words=20)
    serve(path.parent)
    assert document("org/model") == document(path)


def test_tensors_are_not_transferred(tmp_path: Path, serve: Serve) -> None:
    """A file of 2 GB costs its header: what is asked for is a first piece, then one step."""
    path = write(tmp_path / "files" / "model.gguf", words=16_000)
    serve(path.parent, Behaviour(extra={path.name: 2 << 30}))
    opened = open_named("org/model")
    source = opened.components[0].source
    assert isinstance(source, HubRepository)
    assert len(opened.components[0].tensors) == 2
    assert source.client.transferred < (1 << 18) + (1 << 22) + 100_000
    assert source.client.requests <= 4
    # the pieces are kept by commit
    again = open_named("org/model").components[0].source
    assert isinstance(again, HubRepository)
    assert again.client.transferred < 10_000


def test_one_of_several_files_is_named(tmp_path: Path, serve: Serve) -> None:
    folder = tmp_path / "files"
    write(folder / "model-Q8_0.gguf")
    write(folder / "model-Q4_0.gguf", names=("blk.0.attn_v",))
    parts = [write(folder / "big" / f"m-0000{i}-of-00002.gguf", names=(f"blk.{i}.attn_k",)) for i in (1, 2)]
    serve(folder)
    with pytest.raises(InvalidCheckpointError, match="one of 2 GGUF files"):
        plan("org/model", "cpu")
    assert document("org/model/model-Q4_0.gguf") == document(folder / "model-Q4_0.gguf")
    for part in parts:
        opened = open_named(f"org/model/big/{part.name}")
        assert set(opened.components[0].tensors) == {"blk.1.attn_k.weight", "blk.2.attn_k.weight"}
    with pytest.raises(InvalidCheckpointError, match="no such file"):
        plan("org/model/other.gguf", "cpu")
    with pytest.raises(InvalidCheckpointError, match=r"hf download org/model model-Q4_0\.gguf"):
        load("org/model/model-Q4_0.gguf", "cpu")


@pytest.mark.parametrize("name", ["org/model/../x.gguf", "a/b.gguf", "/abs/x/y.gguf", "./org/model/x.gguf"])
def test_paths_that_are_not_there_are_no_ids(serve: Serve, tmp_path: Path, name: str) -> None:
    hub = serve(tmp_path)
    with pytest.raises(InvalidCheckpointError, match="no such file or folder"):
        open_named(name)
    assert not hub.asked


def test_broken_files(tmp_path: Path, serve: Serve) -> None:
    path = write(tmp_path / "files" / "model.gguf")
    whole = path.read_bytes()
    forged = bytearray(whole)
    forged[8:16] = (1 << 60).to_bytes(8, "little")  # the number of tensors
    for blob in (b"", b"GGUF", b"GGML" + whole[4:], whole[:300], whole[:-100], bytes(forged)):
        path.write_bytes(blob)
        serve(path.parent)
        with pytest.raises(InvalidCheckpointError) as local:
            open_checkpoint(path)
        reader_of_hub = HubRepository("org/model", None, Limits(attempts=1))
        with pytest.raises(InvalidCheckpointError) as remote:
            reader.read_gguf_header(reader_of_hub, "model.gguf")
        assert remote.value.problem == local.value.problem
        for kept in (tmp_path / "assets").rglob("*"):
            if kept.is_file():
                kept.unlink()


def test_a_header_without_end(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_FIRST_BYTES", 100)
    monkeypatch.setattr(reader, "_STEP_BYTES", 100)
    monkeypatch.setattr(reader, "_MAX_HEADER_BYTES", 1000)
    serve(write(tmp_path / "files" / "model.gguf", words=500).parent)
    with pytest.raises(InvalidCheckpointError, match="longer than 1000 bytes"):
        make_planned("org/model", "cpu")
