"""Checkpoints whose layers only the portable kernels run beside the device that they were made for: from files to plans
on CUDA, and to outputs on devices that are emulated, where those kernels are the real ones in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from omniplat import load, plan
from omniplat.capability import Capability
from omniplat.conformance import expected
from omniplat.conformance.tolerances import excess
from omniplat.emulation.core import emulate
from omniplat.errors import InvalidCheckpointError
from tests.formats import test_svdquant as svdquant
from tests.support.arrays import canonical, write_arrays

N, K = 512, 1024


def write_dual(folder: Path, level0: float = 1.0) -> None:
    random = np.random.default_rng(5)
    arrays = {
        "m.weight": random.integers(0, 256, (N, K // 2)).astype(np.uint8),
        "m.weight_scale": random.integers(118, 124, (N, K // 32)).astype(np.uint8),
        "m.weight_dual_scale": (level0 * random.uniform(0.5, 2, (N, K // 512, 1))).astype(np.float32),
        "m.mul_scale": np.exp2(random.integers(-2, 3, K)).astype(np.float32),
    }
    config = {"quant_method": "mxfp4_dualscale", "is_checkpoint_serialized": True}
    write_arrays(folder, arrays, config={"quantization_config": config})


def write_low_rank(folder: Path, precision: str, *, nunchaku: bool) -> None:
    svdquant.write(folder, svdquant.Layer(N, K, precision), precision, nunchaku=nunchaku)


#: What writes a checkpoint of one layer, and its scheme and kernel on devices that do not have the scheme.
CHECKPOINTS = [
    pytest.param(write_dual, "mxfp4-dual/mxfp4-dual", "portable_linear", id="mxfp4-dual"),
    *(
        pytest.param(
            partial(write_low_rank, precision=precision, nunchaku=nunchaku),
            declared,
            "portable_low_rank",
            id=f"{precision}-{'nunchaku' if nunchaku else 'rows'}",
        )
        for precision, declared in (("nvfp4", "svdq-nvfp4/svdq-nvfp4"), ("int4", "svdq-int4-g64/svdq-int4"))
        for nunchaku in (False, True)
    ),
]
each_checkpoint = pytest.mark.parametrize(("write", "declared", "kernel"), CHECKPOINTS)
Write = Callable[[Path], None]


@each_checkpoint
@pytest.mark.parametrize("device", ["cuda:sm80", "cuda:sm90", "rocm:gfx942", "rocm:gfx950", "xpu:bmg"])
def test_the_plan(tmp_path: Path, write: Write, declared: str, kernel: str, device: str) -> None:
    write(tmp_path)
    (layer,) = plan(tmp_path, device).layers
    stored = declared.partition("/")[0]
    assert (layer.stored, layer.executes, layer.kernel) == (stored, f"{stored}/a16", kernel)
    assert not plan(tmp_path, "cuda:sm100").ok


@each_checkpoint
@pytest.mark.parametrize("device", ["rocm:gfx942", "xpu:bmg"])
def test_the_layer(tmp_path: Path, write: Write, declared: str, kernel: str, device: str) -> None:
    write(tmp_path)
    with emulate(device) as emulation:
        (planned,) = plan(tmp_path, emulation.device).layers
        layer = load(tmp_path, emulation.device)["m"]
        x = torch.randn(5, K).bfloat16()
        with torch.no_grad():
            y = layer(x)
    # a row's own numbers and the smoothing vector are held in f32
    assert layer.nbytes <= planned.resident_bytes + 4 * (N + K)
    assert layer.nbytes >= 0.95 * planned.resident_bytes
    weight = canonical(tmp_path, "m")
    capability = Capability(kernel, "linear", ("*",), ("a16",), executes="a16")
    wanted = expected.linear(x.float().numpy(), weight, capability, "bf16")
    assert not (problem := excess(y.double().numpy(), wanted.y, wanted.allowed)), str(problem)


def test_two_levels_of_scales_that_float32_does_not_hold_are_refused(tmp_path: Path) -> None:
    write_dual(tmp_path, level0=2.0**-125)
    with emulate("rocm:gfx942") as emulation, pytest.raises(InvalidCheckpointError, match="leaves float32's normal"):
        load(tmp_path, emulation.device)
