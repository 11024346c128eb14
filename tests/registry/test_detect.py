"""The host, and what `--device` means."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omniplat.api import make_target
from omniplat.detect import detect_devices, resolve_device
from omniplat.device import Device, parse_device
from omniplat.errors import InvalidDeviceError, UsageError
from omniplat.host import detect_cpu, installed_versions, kinds_with_nodes, run_tool, visible
from omniplat.info import collect_info
from omniplat.match import unmet
from tests.registry.machines import Machine, backend

CUDA = backend("cuda", "cuda", "sees_cuda")


@pytest.mark.parametrize(
    ("flags", "machine", "arch"),
    [
        ("fpu sse2", "x86_64", "generic"),
        ("fpu avx avx2", "x86_64", "avx2"),
        ("avx2 avx512f avx512bw", "x86_64", "avx512"),
        ("avx2 avx512f amx_tile amx_int8", "x86_64", "amx"),
        ("", "aarch64", "neon"),
        ("", "riscv64", "generic"),
    ],
)
def test_cpu(tmp_path: Path, flags: str, machine: str, arch: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1024 kB\nMemFree: 1 kB\n")
    device = detect_cpu(tmp_path, machine)
    assert (device.kind, device.arch, device.name, device.memory) == ("cpu", arch, "Some CPU", 1 << 20)
    assert not device.described


def test_cpu_without_proc(tmp_path: Path) -> None:
    device = detect_cpu(tmp_path, "x86_64")
    assert device.arch == "generic"
    assert device.memory > 0


def test_nodes(tmp_path: Path) -> None:
    assert kinds_with_nodes(tmp_path) == ()
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "davinci_manager", "kfd"):
        (tmp_path / "dev" / name).touch()
    assert kinds_with_nodes(tmp_path) == ("rocm",)
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/davinci7").touch()
    assert kinds_with_nodes(tmp_path) == ("cuda", "rocm", "npu")


@pytest.mark.parametrize(
    ("mask", "kept"),
    [(None, "abc"), ("", ""), ("-1", ""), ("1", "b"), ("2,0", "ca"), ("0,9,1", "a"), ("0.0,1.1", "ab"), ("x", "")],
)
def test_visible(mask: str | None, kept: str) -> None:
    assert visible(("a", "b", "c"), mask) == tuple(kept)


def test_tool_that_is_missing_fails_or_hangs() -> None:
    assert run_tool(("omniplat-has-no-such-tool",)) == ""
    assert run_tool(("false",)) == ""
    assert run_tool(("sleep", "5"), timeout=0.05) == ""
    assert run_tool(("echo", "fine")) == "fine\n"


def test_versions() -> None:
    assert installed_versions(("numpy>=1", "omniplat-has-no-such-thing>=2"))["omniplat-has-no-such-thing"] == ""


@pytest.mark.parametrize("name", ["triton", "triton-rocm", "pytorch-triton-rocm", "triton-xpu", "pytorch-triton-xpu"])
def test_triton_counts_under_each_of_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What it is called where torch is built for AMD or Intel devices; a kernel that needs it asks for triton."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    device = Device("rocm", "gfx942", described=False)
    assert unmet("triton>=3.2", device) == "not installed"
    folder = tmp_path / f"{name.replace('-', '_')}-3.7.1+gitabc.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.7.1+gitabc\n")
    assert installed_versions(("triton>=3.2",)) == {"triton": "3.7.1+gitabc"}
    assert unmet("triton>=3.2", device) == ""
    assert unmet("triton>=4", device) == "3.7.1+gitabc"


def test_device_list_starts_with_the_cpu() -> None:
    assert [device.kind for device in detect_devices(Machine(CUDA))] == ["cpu", "cuda"]
    assert [device.kind for device in detect_devices(Machine(backend("cuda", "cuda", "breaks"), broken=("x",)))] == [
        "cpu"
    ]


def test_kind_alone_is_the_detected_device() -> None:
    assert resolve_device("cuda", Machine(CUDA)).name == "H200"
    assert not resolve_device("cpu", Machine()).described


def test_kind_alone_is_else_described() -> None:
    assert resolve_device("cuda", Machine()) == Device("cuda", "sm90")
    assert resolve_device("npu", Machine()) == Device("npu", "a5")


def test_kind_and_arch_look_at_no_hardware() -> None:
    assert resolve_device("cuda:sm100", Machine(CUDA)) == Device("cuda", "sm100")


@pytest.mark.parametrize(
    ("device", "says"),
    [
        (0, "is int, needs a string"),
        (b"cpu", "is bytes, needs a string"),
        (SimpleNamespace(type="cuda", index=0), "is SimpleNamespace, needs a string such as 'cpu' or 'cuda:sm90'"),
        ("cuda:0", "devices have no index here: 'cuda' is the one of this machine"),
        ("npu:1", "devices have no index here"),
    ],
)
def test_another_library_s_word_for_a_device_is_no_device(device: Any, says: str) -> None:
    with pytest.raises(InvalidDeviceError, match=says):
        make_target(device, registry=Machine(CUDA), environ={})


def test_what_is_allowed_is_a_list() -> None:
    with pytest.raises(UsageError, match=r"\['requantize'\]"):
        make_target("cpu", allow="requantize", registry=Machine(), environ={})


@pytest.mark.parametrize(("text", "name"), [("cuda:sm90", "H200"), ("cuda:sm100", ""), ("npu:a5", "")])
def test_a_described_device_that_is_here_runs_as_what_was_found(text: str, name: str) -> None:
    machine = Machine(CUDA, backend("ascend", "npu", "sees_nothing"))
    assert make_target(text, registry=machine, environ={}).device == parse_device(text)
    found = make_target(text, registry=machine, environ={}, runs=True).device
    assert (found.name, found.described, f"{found.kind}:{found.arch}") == (name, not name, text)


def test_nothing_asked_is_this_machine() -> None:
    assert resolve_device(None, Machine(CUDA), {}).name == "H200"
    assert resolve_device(None, Machine(CUDA), {"OMNIPLAT_BACKEND": "cpu"}).kind == "cpu"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu", "kind 'gpu' is none of cpu, cuda, rocm, xpu, npu"),
        ("cuda:sm91", "cuda has no architecture 'sm91'; known: sm75"),
        ("", "is none of"),
        ("missing.json", "cannot be read: No such file or directory"),
    ],
)
def test_unknown(text: str, words: str) -> None:
    with pytest.raises(InvalidDeviceError, match=words):
        resolve_device(text, Machine())


def test_file_of_another_machine(tmp_path: Path) -> None:
    file = tmp_path / "there.json"
    file.write_text(json.dumps(collect_info(Machine(CUDA), {}).to_dict()))
    device = resolve_device(str(file), Machine())
    assert (device.kind, device.arch, device.name, device.memory) == ("cuda", "sm90", "H200", 1 << 37)
    assert not device.described


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not the output of `omniplat info --json`"),
        ("[]", "is not the output of"),
        ('{"schema": "omniplat.plan/1", "devices": []}', "has schema 'omniplat.plan/1'"),
        ('{"schema": "omniplat.info/1", "devices": []}', "lists no device"),
        ('{"schema": "omniplat.info/1", "devices": [{"kind": "cuda", "arch": "sm1"}]}', "no architecture 'sm1'"),
    ],
)
def test_file_that_is_something_else(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "there.json"
    file.write_text(text)
    with pytest.raises(InvalidDeviceError, match=words):
        resolve_device(str(file), Machine())
