"""GGUF: files written by GGUF's own library, planned, dequantized against its own function, run; broken files."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omniplat import plan
from omniplat.checkpoint.folder import open_checkpoint
from omniplat.checkpoint.gguf import INSTALL
from omniplat.errors import BackendNotInstalledError, InvalidCheckpointError
from omniplat.oracle import dequantize
from tests.support.arrays import canonical, relative, run

gguf = pytest.importorskip("gguf")

Array = np.ndarray[Any, Any]
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
N, K = 24, 512


def values(seed: int, n: int = N, k: int = K) -> Array:
    return np.random.default_rng(seed).normal(0, 1, (n, k)).astype(np.float32)


def write(path: Path, kinds: dict[str, str], *, bias: bool = False) -> dict[str, Array]:
    """A file with one tensor per name, of that type; the values that the library reads back."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("general.file_type", 2)
    decoded = {}
    for seed, (name, kind) in enumerate(kinds.items()):
        kind_type = gguf.GGMLQuantizationType[kind]
        data = blocks(seed, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind_type)
        decoded[name] = gguf.quants.dequantize(data, kind_type)
        if bias:
            writer.add_tensor(f"{name}.bias", np.linspace(-1, 1, N).astype(np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(K, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def blocks(seed: int, kind: str) -> Array:
    """Quantized rows: by the library where it can, else random codes under finite scales."""
    kind_type = gguf.GGMLQuantizationType[kind]
    if kind in KINDS:
        return np.asarray(gguf.quants.quantize(values(seed), kind_type))
    size, nbytes = gguf.GGML_QUANT_SIZES[kind_type]
    data = np.random.default_rng(seed).integers(0, 256, (N, K // size, nbytes)).astype(np.uint8)
    # the half-precision scales of the k-quants; a random one may be NaN
    places = {"Q4_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "Q5_K": (0, 2)}[kind]
    for place in places:
        data[..., place : place + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return data.reshape(N, -1)


@pytest.mark.parametrize("kind", [*KINDS, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_values_are_the_librarys(tmp_path: Path, kind: str) -> None:
    decoded = write(tmp_path / "m.gguf", {"blk.0.attn_q": kind})
    weight = canonical(tmp_path / "m.gguf", "blk.0.attn_q")
    assert weight.scheme.id == f"gguf-{kind.lower()}/a16"
    np.testing.assert_array_equal(dequantize(weight), decoded["blk.0.attn_q"].astype(np.float64))


def test_a_mixed_file_plans_every_tensor_by_its_own_type(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"blk.0.attn_q": "Q4_K", "blk.0.ffn_down": "Q6_K", "blk.0.attn_v": "Q8_0"})
    found = plan(tmp_path, "cpu")
    assert {layer.name: (layer.declared, layer.status) for layer in found.layers} == {
        "blk.0.attn_q": ("gguf-q4_k/a16", "ok"),
        "blk.0.ffn_down": ("gguf-q6_k/a16", "ok"),
        "blk.0.attn_v": ("gguf-q8_0/a16", "ok"),
    }
    assert [item.code for item in found.findings if item.severity != "note"] == []
    assert found.checkpoint.formats == ("gguf",)
    assert found.layers[0].shape == {"out": N, "in": K}
    q4_k = next(layer for layer in found.layers if layer.name == "blk.0.attn_q")
    assert q4_k.stored_bytes == N * K // 256 * 144


def test_unquantized_tensors_stay_so(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_q.weight", values(0))
    writer.add_tensor("blk.0.attn_k.weight", values(1).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert {layer.status for layer in plan(path, "cpu").layers} == {"unquantized"}
    np.testing.assert_array_equal(dequantize(canonical(path, "blk.0.attn_q")), values(0).astype(np.float64))


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_it_runs(tmp_path: Path, kind: str) -> None:
    decoded = write(tmp_path / "m.gguf", {"blk.0.attn_q": kind}, bias=True)
    x = values(9, 5)
    wanted = x.astype(np.float64) @ decoded["blk.0.attn_q"].astype(np.float64).T + np.linspace(-1, 1, N)
    assert relative(run(tmp_path / "m.gguf", "blk.0.attn_q", x), wanted) < 1e-5


def test_a_config_of_another_format_beside_it_does_not_win(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"blk.0.attn_q": "Q8_0"})
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    found = plan(tmp_path, "cpu")
    assert found.layers[0].declared == "gguf-q8_0/a16"
    assert [item.code for item in found.findings if item.severity != "note"] == ["metadata-conflict"]


# --- files of a folder -------------------------------------------------------------------------------------------


def test_several_files_are_several_checkpoints(tmp_path: Path) -> None:
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf"):
        write(tmp_path / name, {"a": "Q8_0"})
    with pytest.raises(InvalidCheckpointError, match="name the one"):
        open_checkpoint(tmp_path)
    assert plan(tmp_path / "m-Q8_0.gguf", "cpu").ok


def test_parts_of_a_split_file_are_one(tmp_path: Path) -> None:
    for index, name in enumerate(("a", "b")):
        write(tmp_path / f"m-{index + 1:05}-of-00002.gguf", {name: "Q8_0"})
        path = tmp_path / f"m-{index + 1:05}-of-00002.gguf"
        if index:
            # only one of the parts may hold the norm
            path.write_bytes(path.read_bytes().replace(b"blk.0.attn_norm", b"blk.1.attn_norm"))
    assert [layer.name for layer in plan(tmp_path, "cpu").layers] == ["a", "b"]
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    (tmp_path / "m-00001-of-00002.gguf").rename(tmp_path / "m-00001-of-00003.gguf")
    write(tmp_path / "m-00002-of-00003.gguf", {"b": "Q8_0"})
    with pytest.raises(InvalidCheckpointError, match="2 parts of 3"):
        open_checkpoint(tmp_path)


# --- broken files ------------------------------------------------------------------------------------------------


def test_every_cut_is_one_clear_error(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf", {"blk.0.attn_q": "Q4_0"})
    whole = (tmp_path / "whole.gguf").read_bytes()
    header = whole.index(b"attn_norm") + 40
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, header, 7), header, len(whole) // 2, len(whole) - 32]:
        cut.write_bytes(whole[:size])
        with pytest.raises(InvalidCheckpointError) as caught:
            open_checkpoint(cut)
        assert caught.value.file == "cut.gguf"
        assert "GGUF" in str(caught.value)


def test_no_changed_byte_of_the_header_is_a_traceback(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf", {"blk.0.attn_q": "Q4_0"})
    whole = bytearray((tmp_path / "whole.gguf").read_bytes())
    path = tmp_path / "changed.gguf"
    random = np.random.default_rng(0)
    for place in range(0, whole.index(b"attn_norm") + 40, 3):
        changed = bytearray(whole)
        changed[place] ^= int(random.integers(1, 256))
        path.write_bytes(changed)
        with contextlib.suppress(InvalidCheckpointError):
            plan(path, "cpu")


@pytest.mark.parametrize("length", [2**40, 2**63])
def test_a_forged_array_length_takes_no_time(tmp_path: Path, length: int) -> None:
    """One key, an array of so many bytes in a file of a few."""
    key = b"tokenizer.ggml.scores"
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    header += struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 0, length)
    (tmp_path / "m.gguf").write_bytes(header + bytes(64))
    with pytest.raises(InvalidCheckpointError, match="GGUF header"):
        open_checkpoint(tmp_path / "m.gguf")
    # a length that is within bounds, but beyond the end
    (tmp_path / "m.gguf").write_bytes(header[:-8] + struct.pack("<Q", 2**20) + bytes(64))
    with pytest.raises(InvalidCheckpointError, match="behind the end"):
        open_checkpoint(tmp_path / "m.gguf")


def test_another_file_with_that_suffix(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4 not this one")
    with pytest.raises(InvalidCheckpointError, match="magic"):
        open_checkpoint(tmp_path / "m.gguf")


def test_the_command_line_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\3\0\0\0")
    done = subprocess.run(
        [sys.executable, "-m", "omniplat", "plan", str(tmp_path), "--device", "cpu"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "m.gguf" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", {"a": "Q8_0"})
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BackendNotInstalledError) as caught:
        open_checkpoint(tmp_path / "m.gguf")
    assert caught.value.install == INSTALL
    assert INSTALL in str(caught.value)
