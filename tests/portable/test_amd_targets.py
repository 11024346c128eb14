"""The weight-only kernels compile for AMD's devices. That they compute the right thing there is not told by this."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omniplat.portable.quantize import has_triton

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
@pytest.mark.parametrize(
    ("arch", "weight_id"),
    [
        ("gfx90a", "mxfp4"),
        ("gfx942", "mxfp4"),
        ("gfx950", "mxfp4"),
        ("gfx942", "int8-channel"),
        ("gfx942", "uint4-g64"),
    ],
)
def test_kernels_compile(arch: str, weight_id: str) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compile_for", arch, weight_id]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sizes = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(sizes) == 4
    assert all(size > 0 for size in sizes)
