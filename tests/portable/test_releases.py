"""Every kernel that is written in Triton compiles with the release that is installed: CI has one after the other, from
the oldest that is declared."""

from __future__ import annotations

import re
from pathlib import Path

import omniplat_cuda.spec
import omniplat_rocm.spec
import omniplat_xpu.spec
import pytest
from omniplat_cuda.capabilities.common import GLUON
from packaging.requirements import Requirement

from omniplat.portable.declared import TRITON
from omniplat.portable.quantize import has_triton
from tests.support.compile_every import compiled
from tests.support.compile_for import ROOT

PORTABLE, CUDA = "omniplat.portable", "omniplat_cuda.kernels"
#: Hopper's, in Gluon, which have tests of their own.
ELSEWHERE = {f"{CUDA}.int8_gemm_hopper._ping_pong", f"{CUDA}.decoded_gluon._product"}
#: What `Launch` is given, where that is no kernel of the same module.
CHOSEN = {
    f"{PORTABLE}.weight_only_triton.kernel": {f"{PORTABLE}.word_kernels_triton.many_tokens"},
    f"{PORTABLE}.int8_gemm_triton._by_descriptors": {
        f"{PORTABLE}.int8_gemm_triton._by_descriptors",
        f"{PORTABLE}.int8_gemm_triton._by_pointers",
    },
}
#: Taken with releases that were tested, and what is with others.
FEW = {f"{PORTABLE}.word_fragments_gluon.fragments", f"{PORTABLE}.word_kernels_triton.few_tokens"}


@pytest.mark.skipif(not has_triton(), reason="triton is not installed, or too old")
def test_every_kernel_compiles() -> None:
    found = set(compiled())
    launched = {
        f"{package}.{path.stem}.{name}"
        for package, folder in ((PORTABLE, "omniplat/portable"), (CUDA, "backends/cuda/omniplat_cuda/kernels"))
        for path in (ROOT / folder).glob("*.py")
        for name in re.findall(r"\bLaunch\(\s*(\w+)", path.read_text())
    } - {f"{PORTABLE}.weight_only_triton._fragments"}
    wanted = set().union(*(CHOSEN.get(name, {name}) for name in launched)) - ELSEWHERE
    assert len(wanted) > 10
    assert found - FEW == wanted
    assert found & FEW


def test_backends_declare_the_oldest_release_that_compiles_every_kernel() -> None:
    """Or a range of its own, for Gluon: a plan refuses what would not compile after loading."""
    specs = (omniplat_cuda.spec.SPEC, omniplat_rocm.spec.SPEC, omniplat_xpu.spec.SPEC)
    for spec in specs:
        declared = {text for capability in spec.capabilities for text in capability.requires}
        assert {text for text in declared if Requirement(text).name == "triton"} - {GLUON} == {TRITON}
    assert f'"{TRITON}"' in Path(ROOT / "pyproject.toml").read_text()
