"""What quantizing needs in memory while weights arrive: the final size and the largest layer, or less offloaded."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

#: What is rounded at a time (1 MiB), what the heap cannot give back, and the plan: whatever the size of a layer is.
ALLOWANCE = 8 << 20


def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "quantize_memory.py"
    spec = importlib.util.spec_from_file_location("quantize_memory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("method", "how", "layers", "width"),
    [
        *(("mxfp8", "arriving", 64, 768), ("int8", "arriving", 64, 768), ("fp8", "offload", 64, 768)),
        ("int8", "arriving", 6, 2048),  # a layer of 8 MiB needs no larger allowance
    ],
)
def test_peak_is_the_final_size_and_the_largest_layer(method: str, how: str, layers: int, width: int) -> None:
    found = benchmark().measure_apart(method, layers, width, how)
    unquantized, final, layer = layers * found["layer"], found["final"], found["layer"]
    assert found["layer"] == 2 * width**2
    assert final < 0.52 * unquantized
    if how == "offload":
        assert found["held"] < ALLOWANCE  # the system maps and drops pages of files as it sees fit
    else:
        assert final <= found["held"] + ALLOWANCE
        assert final <= found["peak"] <= final + layer + ALLOWANCE
    assert final + layer + ALLOWANCE < unquantized  # so that holding the weights would be seen
