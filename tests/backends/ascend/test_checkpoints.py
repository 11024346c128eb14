"""msModelSlim's checkpoints and vllm-omni's own, from files to outputs under emulation, against the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat import load
from omniplat.api import make_planned
from omniplat.canonical import Array
from omniplat.conformance.inputs import as_dtype, random_input
from omniplat.conformance.tolerances import inside_window, noise_ratio
from omniplat.emulation import Emulation
from omniplat.errors import UnsupportedCombinationError
from omniplat.oracle import linear
from tests.support.arrays import canonical, relative, write_arrays

N, K = 48, 512
DESCRIPTION = "quant_model_description.json"
Arrays = Mapping[str, Array]
Emulate = Callable[[str], Emulation]

random = np.random.default_rng(17)


def int8(n: int = N, k: int = K) -> dict[str, Array]:
    return {
        "m.weight": random.integers(-127, 128, (n, k)).astype(np.int8),
        "m.weight_scale": random.uniform(0.001, 0.01, (n, 1)).astype(np.float32),
        "m.weight_offset": np.zeros((n, 1), np.float32),
    }


def static() -> dict[str, Array]:
    weight = int8()["m.weight"]
    deq = (np.float32(0.03) * random.uniform(0.001, 0.01, N)).astype(np.float32)
    return {
        "m.weight": weight,
        "m.quant_bias": np.rint(-weight.astype(np.float32).sum(1) * np.float32(-11)).astype(np.int32),
        "m.deq_scale": deq,
        "m.input_scale": np.array([0.03], np.float32),
        "m.input_offset": np.array([-11], np.float32),
    }


def mixed() -> dict[str, Array]:
    """Static scales beside the dynamic layout's, of one weight."""
    arrays = {**static(), **int8()}
    weight = arrays["m.weight"].astype(np.float32)
    arrays["m.deq_scale"] = (np.float32(0.03) * arrays["m.weight_scale"][:, 0]).astype(np.float32)
    arrays["m.quant_bias"] = np.rint(-weight.sum(1) * np.float32(-11)).astype(np.int32)
    return arrays


def int4(packed: bool) -> dict[str, Array]:
    arrays = int8()
    codes = random.integers(-8, 8, (N, K)).astype(np.int8)
    arrays["m.weight"] = ((codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)).astype(np.int8) if packed else codes
    return arrays


def flatquant(clip: float = 0.9) -> dict[str, Array]:
    """Matrices near rotations; rows of an input are matrices of 16 x 32."""
    sizes = {"left": 16, "right": 32}
    arrays: dict[str, Array] = {
        f"m.{side}_trans": (np.linalg.qr(random.standard_normal((n, n)))[0] * 1.1).astype(np.float32)
        for side, n in sizes.items()
    }
    return {**int4(packed=False), **arrays, "m.clip_ratio": np.array([clip], np.float32)}


def mxfp8() -> dict[str, Array]:
    return {
        "m.weight": random.standard_normal((N, K)).astype(ml_dtypes.float8_e4m3fn),
        "m.weight_scale": random.integers(118, 124, (N, K // 32)).astype(np.uint8),
    }


def mxfp4() -> dict[str, Array]:
    return {
        "m.weight": random.integers(0, 256, (N, K // 2)).astype(np.uint8),
        "m.weight_scale": random.integers(118, 124, (N, K // 32)).astype(np.uint8),
    }


def dual() -> dict[str, Array]:
    return {**mxfp4(), "m.weight_dual_scale": random.uniform(0.5, 2, (N, K // 512, 1)).astype(np.float32)}


def smoothed(arrays: dict[str, Array]) -> dict[str, Array]:
    """With a smoothing vector of powers of two: the device rounds what it gives to 16 bits."""
    return {**arrays, "m.mul_scale": np.exp2(random.integers(-2, 3, K)).astype(np.float32)}


def fp8() -> dict[str, Array]:
    arrays = int8()
    arrays["m.weight"] = random.standard_normal((N, K)).astype(ml_dtypes.float8_e4m3fn)
    return arrays


def described(kind: str) -> dict[str, Any]:
    return {DESCRIPTION: {"model_quant_type": kind, "version": "1.0.0", "m.weight": kind}}


def check(folder: Path, emulation: Emulation, kernel: str, prefer: str = "memory") -> None:
    """The one layer runs on `kernel`; its error is that of the quantization that it executes, or of rounding alone."""
    (item,) = make_planned(folder, emulation.device, prefer=prefer).layers
    assert item.layer.kernel == kernel
    assert item.layer.backend == "ascend"
    layer = load(folder, emulation.device, prefer=prefer)["m"]
    x = random_input(7, K, np.random.default_rng(3), "bf16")
    with torch.no_grad():
        found = layer(torch.from_numpy(x).to(torch.bfloat16)).double().numpy()
    weight = canonical(folder, "m")
    unquantized = linear(x, weight, activation=False)
    if str(item.layer.executes).endswith("/a16"):
        assert relative(found, unquantized) < 0.01
    else:
        wanted = linear(x, weight)
        assert inside_window(noise_ratio(found, as_dtype(wanted, "bf16"), unquantized))
        assert relative(found, wanted) < 0.2
    assert not emulation.violations


@pytest.mark.parametrize(
    ("kind", "arrays", "device", "kernel"),
    [
        *(("W8A8_DYNAMIC", int8(), f"npu:{arch}", "quant_matmul_int8") for arch in ("a2", "a3", "a5")),
        ("W8A8_DYNAMIC", smoothed(int8()), "npu:a2", "quant_matmul_int8"),
        ("W8A8", static(), "npu:a2", "quant_matmul_int8_static"),
        ("W8A8", static(), "npu:a5", "quant_matmul_int8_static"),
        ("W8A8_MIX", mixed(), "npu:a2", "quant_matmul_int8"),
        ("W8A16", int8(), "npu:a2", "weight_quant_batchmatmul_int8"),
        ("W4A16", int4(packed=True), "npu:a2", "weight_quant_batchmatmul_int4"),
        ("W4A4_DYNAMIC", int4(packed=False), "npu:a3", "quant_matmul_int4"),
        *(("W4A4_FLATQUANT_DYNAMIC", flatquant(), f"npu:{arch}", "quant_matmul_int4") for arch in ("a2", "a3", "a5")),
        ("W4A4_FLATQUANT_DYNAMIC", smoothed(flatquant(1.0)), "npu:a2", "quant_matmul_int4"),
        ("W4A8_DYNAMIC", int4(packed=False), "npu:a2", "weight_quant_batchmatmul_int4"),
        ("WFP8AFP8_DYNAMIC", fp8(), "npu:a5", "quant_matmul_fp8"),
        ("W8A8_MXFP8", mxfp8(), "npu:a5", "quant_matmul_mxfp8"),
        ("W4A4_MXFP4", mxfp4(), "npu:a5", "quant_matmul_mxfp4"),
        ("W4A4_MXFP4", smoothed(mxfp4()), "npu:a5", "quant_matmul_mxfp4"),
        ("W4A8_MXFP", mxfp4(), "npu:a5", "quant_matmul_mxfp4_a8"),
        ("W4A4_MXFP4_DUALSCALE", dual(), "npu:a5", "dual_level_quant_matmul"),
        ("W4A4_MXFP4_DUALSCALE", smoothed(dual()), "npu:a5", "dual_level_quant_matmul"),
        ("W4A4_MXFP4", mxfp4(), "npu:a2", "weight_quant_batchmatmul_mxfp4"),
        ("W4A8_MXFP", mxfp4(), "npu:a3", "weight_quant_batchmatmul_mxfp4"),
    ],
)
def test_msmodelslim(
    tmp_path: Path, omniplat_emulate: Emulate, kind: str, arrays: Arrays, device: str, kernel: str
) -> None:
    write_arrays(tmp_path, arrays, files=described(kind))
    check(tmp_path, omniplat_emulate(device), kernel)


def test_int4_by_int8_takes_twice_the_memory(tmp_path: Path, omniplat_emulate: Emulate) -> None:
    write_arrays(tmp_path, int4(packed=False), files=described("W4A8_DYNAMIC"))
    check(tmp_path, omniplat_emulate("npu:a2"), "quant_matmul_int4_a8", prefer="speed")


@pytest.mark.parametrize("container", ["F8_E4M3", "BF16", "U8"])
@pytest.mark.parametrize(
    ("method", "flag", "kernel"),
    [
        ("mxfp4_dualscale", "is_checkpoint_serialized", "dual_level_quant_matmul"),
        ("mxfp4", "is_checkpoint_mxfp4_serialized", "quant_matmul_mxfp4"),
    ],
)
def test_omni_fp4_in_every_container(
    tmp_path: Path, omniplat_emulate: Emulate, method: str, flag: str, kernel: str, container: str
) -> None:
    arrays = smoothed(dual()) if method == "mxfp4_dualscale" else mxfp4()
    if container != "U8":
        magnitudes = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        numbers = random.choice(np.concatenate([magnitudes, -magnitudes]), (N, K))
        arrays["m.weight"] = numbers.astype(ml_dtypes.bfloat16 if container == "BF16" else ml_dtypes.float8_e4m3fn)
    write_arrays(tmp_path, arrays, config={"quantization_config": {"quant_method": method, flag: True}})
    check(tmp_path, omniplat_emulate("npu:a5"), kernel)


@pytest.mark.parametrize(
    ("method", "flag", "arrays", "device", "kernel"),
    [
        ("mxfp8", "is_checkpoint_mxfp8_serialized", mxfp8(), "npu:a5", "quant_matmul_mxfp8"),
        (
            "int8",
            "is_checkpoint_int8_serialized",
            {key: value for key, value in int8().items() if not key.endswith("offset")},
            "npu:a2",
            "quant_matmul_int8",
        ),
    ],
)
def test_omni_native(
    tmp_path: Path, omniplat_emulate: Emulate, method: str, flag: str, arrays: Arrays, device: str, kernel: str
) -> None:
    write_arrays(tmp_path, arrays, config={"quantization_config": {"quant_method": method, flag: True}})
    check(tmp_path, omniplat_emulate(device), kernel)


@pytest.mark.parametrize(
    ("kind", "arrays", "device"),
    [
        ("W8A8_MXFP8", mxfp8(), "npu:a2"),
        ("W4A4_MXFP4_DUALSCALE", dual(), "npu:a3"),
        ("WFP8AFP8_DYNAMIC", fp8(), "npu:a2"),
    ],
)
def test_what_a_generation_lacks_is_refused_with_every_reason(
    tmp_path: Path, omniplat_emulate: Emulate, kind: str, arrays: Arrays, device: str
) -> None:
    write_arrays(tmp_path, arrays, files=described(kind))
    emulation = omniplat_emulate(device)
    with pytest.raises(UnsupportedCombinationError) as caught:
        load(tmp_path, emulation.device)
    assert len(caught.value.reasons) > 10
    assert str(emulation.device) in str(caught.value)


@pytest.mark.parametrize("device", ["npu:a2", "npu:a5"])
@pytest.mark.parametrize("name", ["lc-qwen3-w8a8-int8", "ar016-qwen3-w4a16-asym", "qk-qwen3-int4-wo-128"])
def test_the_command_runs_what_other_tools_wrote(name: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every layer on the emulated device, in the dtype that its kernel takes."""
    from typer.testing import CliRunner

    from omniplat.cli.app import app

    folder = Path(__file__).resolve().parents[2] / "data" / "checkpoints" / name / "checkpoint"
    done = CliRunner().invoke(app, ["--emulate", device, "run", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["device"]["name"] == "emulated, torch-npu 2.13.0"
    assert report["layers"]
    assert all(layer["finite"] for layer in report["layers"])
