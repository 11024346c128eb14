"""What quantizing needs in memory while weights arrive: the final size and the largest layer, or less offloaded."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

#: What is rounded at a time (float64 of 2^16 elements, several of them), and what the heap cannot give back.
ALLOWANCE = 14 << 20


def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "quantize_memory.py"
    spec = importlib.util.spec_from_file_location("quantize_memory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
@pytest.mark.parametrize(("method", "how"), [("mxfp8", "arriving"), ("fp8", "offload")])
def test_peak_is_the_final_size_and_the_largest_layer(method: str, how: str) -> None:
    layers, width = 64, 768
    found = benchmark().measure_apart(method, layers, width, how)
    unquantized, final, layer = layers * found["layer"], found["final"], found["layer"]
    assert found["layer"] == 2 * width**2
    assert final < 0.52 * unquantized
    if how == "offload":
        assert found["held"] < ALLOWANCE  # the system maps and drops pages of files as it sees fit
    else:
        assert final <= found["held"] + ALLOWANCE
        assert final <= found["peak"] <= final + layer + ALLOWANCE
    assert final + layer + ALLOWANCE < 0.8 * unquantized  # so that holding the weights would be seen
