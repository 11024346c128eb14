"""The weight-only kernels compile for AMD's devices. That they compute the right thing there is not told by this."""

from __future__ import annotations

import pytest

from omniplat.portable.quantize import has_triton
from tests.support.compile_for import compiled


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
    """Few tokens and many have kernels of their own."""
    sizes = [int(line.split()[-1]) for line in compiled(arch, weight_id, tokens=(5, 200))]
    assert len(sizes) == 4
    assert all(size > 0 for size in sizes)
