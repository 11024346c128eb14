"""Switching an emulation on and off: explicit, for as long as its context lasts, and never beside the real library."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from omniplat.api import make_planned
from omniplat.device import Device
from omniplat.emulation import Emulation, OpSchema, VendorError, emulate
from omniplat.emulation.core import VENDORS, vendor_of
from omniplat.errors import UsageError
from omniplat.match import unmet
from omniplat.runtime.tensors import device_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "hunyuan-image3-mxfp4-mxfp8" / "checkpoint"


def registered(kind: str) -> set[str]:
    names = {schema.qualified for schema in vendor_of(kind).schemas}
    return names & set(torch._C._dispatch_get_all_op_names())


@pytest.mark.parametrize("kind", sorted(VENDORS))
def test_operators_live_as_long_as_the_context(kind: str) -> None:
    assert not registered(kind)
    for _ in range(2):
        with emulate(kind) as emulation:
            schemas = {
                schema.qualified for schema in vendor_of(kind).schemas if schema.exists_in(str(emulation.version))
            }
            assert registered(kind) == schemas
            assert set(vendor_of(kind).modules) <= set(sys.modules)
        assert not registered(kind)
        assert not set(vendor_of(kind).modules) & set(sys.modules)


@pytest.mark.parametrize("kind", sorted(VENDORS))
def test_an_error_inside_ends_it_too(kind: str) -> None:
    with pytest.raises(ZeroDivisionError), emulate(kind):
        raise ZeroDivisionError
    assert not registered(kind)


@pytest.mark.parametrize("kind", sorted(VENDORS))
@pytest.mark.parametrize("where", ["modules", "operators"])
def test_not_beside_the_real_library(kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = vendor_of(kind)
    if where == "modules":
        name = (*vendor.loaded_as, *vendor.modules)[0]
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        with pytest.raises(UsageError, match=f"{name} is loaded"), emulate(kind):
            pass
        return
    with emulate(kind), pytest.raises(UsageError, match=r"registered already|is loaded"), emulate(kind):
        pass
    assert not registered(kind)


@pytest.mark.parametrize("kind", sorted(VENDORS))
def test_every_known_version_registers_its_own_schemas(kind: str) -> None:
    """What torch parsed is what the data says, up to spelling: no default lost, no argument dropped."""
    vendor = vendor_of(kind)
    for version in vendor.known:
        with emulate(kind, version=version) as emulation:
            assert str(emulation.version) == version
            for schema in vendor.schemas:
                if schema.exists_in(version):
                    found = torch._C._get_schema(schema.qualified.partition(".")[0], schema.name.partition(".")[2])
                    assert str(found) == str(torch._C.parse_schema(f"{schema.namespace}::{schema.text}"))


def test_what_is_not_emulated_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="nothing emulates cpu devices"), emulate("cpu:avx2"):
        pass
    with pytest.raises(UsageError, match=r"nothing emulates torch-npu 1\.0"), emulate("npu", version="1.0"):
        pass


def test_calls_are_checked_against_the_schema() -> None:
    weight = torch.zeros(4, 4)
    with emulate("npu:a2"):
        torch.ops.npu.npu_format_cast(weight, 29)
        for arguments, keywords in (((weight,), {}), ((weight, 29), {"layout": 1}), ((weight, "NZ"), {})):
            with pytest.raises(RuntimeError):
                torch.ops.npu.npu_format_cast(*arguments, **keywords)
    assert not hasattr(torch.ops.npu, "npu_format_cast")


def test_an_operator_of_another_architecture_is_refused() -> None:
    from omniplat.emulation.core import _not_here

    with emulate("npu:a2") as emulation, pytest.raises(VendorError, match="is for a5, the device is a2"):
        _not_here(emulation, OpSchema("npu", "npu_other(Tensor x) -> Tensor", archs=("a5",)))


def test_the_device_says_that_it_is_emulated() -> None:
    with emulate("npu:a5") as emulation:
        device = emulation.device
        assert str(device) == "npu:a5 (emulated, torch-npu 2.13.0)"
        assert device.emulated
        assert device_of(device) == torch.device("cpu")
        assert make_planned(EXAMPLE, device).plan.device.name == device.name
    assert not Device("npu", "a5").emulated


def test_an_emulated_device_has_the_versions_that_it_emulates() -> None:
    with emulate("npu:a5") as emulation:
        assert unmet("torch-npu>=2.6", emulation.device) == ""
        assert unmet("torch-npu>=99", emulation.device) == "2.13.0"
        assert unmet("another-library>=1", emulation.device) == ""


def test_the_fixture_fails_for_violations(omniplat_emulate: Callable[[str], Emulation]) -> None:
    emulation = omniplat_emulate("npu:a5")
    emulation.record("npu_swiglu", "rule", "detail")
    assert [str(violation) for violation in emulation.violations] == ["npu_swiglu: rule: detail"]
    emulation.violations.clear()


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "omniplat", *args], capture_output=True, text=True, check=False)


def test_the_command_line_says_it() -> None:
    done = run("--emulate", "npu:a5", "plan", str(EXAMPLE))
    assert "npu:a5 (emulated, torch-npu 2.13.0)" in done.stdout
    assert "emulated: npu:a5" in done.stderr
    for arguments, problem in (
        (("info",), "not for info"),
        (("plan", str(EXAMPLE), "--device", "npu:a2"), "--device asks for npu:a2"),
        (("plan", str(EXAMPLE), "--device", "cpu"), "--device asks for cpu"),
    ):
        done = run("--emulate", "npu:a5", *arguments)
        assert done.returncode == 2
        assert problem in done.stderr
        assert "Traceback" not in done.stderr
