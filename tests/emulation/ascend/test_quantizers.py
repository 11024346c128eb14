"""What the emulated quantizers write, byte for byte: against recorded bytes, the oracle, and the rules written out."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat import oracle
from omniplat.emulation import Emulation, VendorError, emulate
from omniplat.emulation.ascend.quantize import unpack_int4
from omniplat.scheme import TensorQuant, parse_activation_id

GOLDEN = json.loads((Path(__file__).resolve().parents[2] / "data" / "emulation" / "ascend_mx.json").read_text())
DST_TYPES: dict[str, Any] = {"e2m1": 296, "e4m3": 292, "e5m2": 291}
#: The same types as torch numbers them.
TORCH_TYPES: dict[str, Any] = {"e2m1": 45, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0}
TOP_EXPONENT = {"e2m1": 2, "e4m3": 8, "e5m2": 15}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def golden_input() -> torch.Tensor:
    raw = bytearray.fromhex(GOLDEN["input"])
    return torch.frombuffer(raw, dtype=torch.uint8).view(torch.bfloat16).reshape(GOLDEN["shape"])


@pytest.mark.parametrize("numbering", [DST_TYPES, TORCH_TYPES], ids=["npu", "torch"])
@pytest.mark.parametrize(
    "case",
    GOLDEN["cases"],
    ids=lambda c: f"{c['format']}-alg{c['scale_alg']}-{c['round_mode']}-{c['dst_type_max']}",
)
def test_mx_is_what_was_recorded(case: dict[str, Any], numbering: dict[str, Any]) -> None:
    with emulate("npu:a5"):
        codes, scales = torch.ops.npu.npu_dynamic_mx_quant(
            golden_input(),
            dst_type=numbering[case["format"]],
            round_mode=case["round_mode"],
            scale_alg=case["scale_alg"],
            dst_type_max=case["dst_type_max"],
        )
    assert list(scales.shape) == case["scale_shape"]
    assert as_bytes(scales).hex() == case["scales"]
    assert as_bytes(codes).hex() == case["codes"]


def edgy(rows: int, columns: int) -> torch.Tensor:
    """Blocks of every size, ties, maxima at and beside each threshold, zeros: numbers of bf16 and of f16 alike."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-6, 7, (rows, 1)))
    values[0, :32] = 0.0
    values[1] = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -1.75, -5.0], columns)
    for index, top in enumerate((1.5, 1.5078125, 1.75, 1.7578125, 1.9921875, 1.0)):
        values[2 + index] *= 0.01
        values[2 + index, ::32] = top * 2.0**index
    return torch.from_numpy(values).to(torch.bfloat16).clamp(-1000, 1000)


def scale_exponent(amax: float, fmt: str, algorithm: int, dst_type_max: float) -> int:
    """The exponent of a block's scale, from exact arithmetic on its maximum; -127 for zeros."""
    if amax == 0.0:
        return -127
    mantissa, power = math.frexp(amax)
    mantissa, power = 2 * mantissa, power - 1
    if algorithm == 0:
        return max(power - TOP_EXPONENT[fmt], -127)
    if algorithm == 1:
        bound = Fraction(float(np.float32(amax) * np.float32(1.0 / LARGEST[fmt])))
        return next(e for e in range(-127, 128) if bound <= Fraction(2) ** e)
    if dst_type_max in (0.0, 6.0, 7.0):
        threshold = 1.75 if dst_type_max == 7.0 else 1.5
        return max(power - 2 + (mantissa > threshold), -127)
    bound = Fraction(float(np.float32(amax) / np.float32(dst_type_max)))
    return next(e for e in range(-127, 128) if bound <= Fraction(2) ** e)


def fp4_code(value: float, mode: str) -> int:
    """The code of fp4 nearest to `value`, ties by the mode, or the largest one below."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    sign = 8 if math.copysign(1.0, value) < 0 else 0
    size = min(abs(value), 6.0)
    if mode == "floor":
        candidates = [i for i, n in enumerate(numbers) if (n >= size if sign else n <= size)]
        return sign | (min(candidates) if sign else max(candidates))
    best = min(abs(n - size) for n in numbers)
    near = [i for i, n in enumerate(numbers) if abs(n - size) == best]
    return sign | (max(near) if mode == "round" else next((i for i in near if i % 2 == 0), near[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("fmt", "algorithm", "mode", "top"),
    [
        ("e2m1", 0, "rint", 0.0),
        ("e2m1", 0, "round", 0.0),
        ("e2m1", 0, "floor", 0.0),
        ("e2m1", 2, "rint", 0.0),
        ("e2m1", 2, "round", 7.0),
        ("e2m1", 2, "rint", 7.25),
        ("e2m1", 2, "rint", 12.0),
        ("e4m3", 0, "rint", 0.0),
        ("e4m3", 1, "rint", 0.0),
        ("e5m2", 1, "rint", 0.0),
    ],
)
def test_mx_follows_its_rules(fmt: str, algorithm: int, mode: str, top: float, dtype: torch.dtype) -> None:
    x = edgy(9, 96).to(dtype)
    with emulate("npu:a5"):
        codes, scales = torch.ops.npu.npu_dynamic_mx_quant(
            x, dst_type=DST_TYPES[fmt], round_mode=mode, scale_alg=algorithm, dst_type_max=top
        )
    assert scales.shape == (9, 2, 2)
    assert not scales[:, 1, 1].any(), "three blocks are padded to four, with a byte 0"
    exponents = scales.flatten(1)[:, :3].numpy().astype(int) - 127
    values = x.to(torch.float64).numpy()
    for row in range(9):
        for block in range(3):
            part = values[row, 32 * block : 32 * block + 32]
            wanted = scale_exponent(float(np.abs(part).max()), fmt, algorithm, top)
            assert exponents[row, block] == wanted, (row, block)
            if fmt != "e2m1":
                continue
            found = codes[row, 16 * block : 16 * block + 16].numpy()
            expected = [fp4_code(v, mode) for v in part / 2.0**wanted]
            assert [int(b) for byte in found for b in (byte & 15, byte >> 4)] == expected, (row, block)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_the_default_algorithm_is_the_oracles(name: str) -> None:
    """What kernels call quantizes as the scheme's default rule says: values equal, not close."""
    quant = parse_activation_id(name)
    assert quant is not None
    x = edgy(9, 128)
    with emulate("npu:a5"):
        codes, scales = torch.ops.npu.npu_dynamic_mx_quant(x, dst_type=292 if name == "mxfp8" else 296)
    factors = np.exp2(scales.flatten(1).numpy().astype(np.float64) - 127).repeat(32, axis=1)
    if name == "mxfp8":
        found = codes.to(torch.float64).numpy() * factors
    else:
        found = oracle.codecs.decode_codes(codes.numpy(), "fp4_e2m1", 128) * factors
    np.testing.assert_array_equal(found, oracle.quantize_activation(x.float().numpy(), quant))


def test_dual_level_is_the_oracles() -> None:
    """x / level0 is rounded to the input's dtype on the device; where that changes nothing, values are equal."""
    quant = parse_activation_id("mxfp4-dual")
    assert quant is not None
    x = edgy(9, 1024)
    x[:, ::512] = 6.0 * 2.0**8
    with emulate("npu:a5"):
        codes, level0, level1 = torch.ops.npu.npu_dynamic_dual_level_mx_quant(x)
    assert level0.shape == (9, 2)
    assert level1.shape == (9, 16, 2)
    wide = level0.double().numpy().repeat(512, axis=1)
    factors = np.exp2(level1.flatten(1).numpy().astype(np.float64) - 127).repeat(32, axis=1) * wide
    found = oracle.codecs.decode_codes(codes.numpy(), "fp4_e2m1", 1024) * factors
    np.testing.assert_array_equal(found, oracle.quantize_activation(x.float().numpy(), quant))


def test_dual_level_of_zeros_and_of_what_is_not_finite() -> None:
    x = torch.zeros((2, 512), dtype=torch.bfloat16)
    x[1, 0], x[1, 1] = torch.inf, 3.0
    with emulate("npu:a5"):
        codes, level0, _ = torch.ops.npu.npu_dynamic_dual_level_mx_quant(x)
    assert float(level0[0, 0]) == 0.0
    assert not codes[0].any()
    assert float(level0[1, 0]) == float(np.float32(3.0) * np.float32(1.0 / 6.0))


@pytest.mark.parametrize("arch", ["a2", "a3", "a5"])
@pytest.mark.parametrize("dst_type", ["int8", "int4"])
def test_row_scales_follow_the_generation(arch: str, dst_type: str) -> None:
    """a5 divides by amax * fp32(1 / top); a2 and a3 multiply by top / amax and return the inverse of that."""
    x = edgy(9, 96)
    top = np.float32(127 if dst_type == "int8" else 7)
    with emulate(f"npu:{arch}"):
        codes, scale = torch.ops.npu.npu_dynamic_quant(x, dst_type=torch.int8 if dst_type == "int8" else torch.quint4x2)
    values = x.float().numpy()
    amax = np.abs(values).max(axis=1, keepdims=True)
    if arch == "a5":
        wanted = amax * (np.float32(1) / top)
        expected = np.rint(values / wanted)
    else:
        factor = top / amax
        wanted, expected = np.float32(1) / factor, np.rint(values * factor)
    found = codes if dst_type == "int8" else unpack_int4(codes)
    np.testing.assert_array_equal(scale.numpy(), wanted[:, 0])
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_follow_the_golden_script(dtype: torch.dtype) -> None:
    """amax / 448 in f32 of 128 columns, the last block of 72; what is not finite is no maximum; zeros give zeros."""
    x = edgy(9, 200).to(dtype)
    x[0] = 0.0
    x[1, 0], x[1, 1] = torch.inf, torch.nan
    with emulate("npu:a5"):
        codes, scale = torch.ops.npu.npu_dynamic_block_quant(x, dst_type=292, row_block_size=1, col_block_size=128)
    values = x.float().numpy()
    finite = np.where(np.isfinite(values), np.abs(values), np.float32(0))
    wanted = np.stack([finite[:, :128].max(1), finite[:, 128:].max(1)], axis=1) / np.float32(448)
    np.testing.assert_array_equal(scale.numpy(), wanted)
    with np.errstate(invalid="ignore"):
        scaled = np.nan_to_num(np.clip(values / wanted.repeat(128, axis=1)[:, :200], -448, 448), nan=0.0)
    assert as_bytes(codes) == scaled.astype(ml_dtypes.float8_e4m3fn).tobytes()


def test_blocks_are_the_oracles() -> None:
    quant = parse_activation_id("fp8-g128")
    assert quant is not None
    x = edgy(9, 256)
    with emulate("npu:a5"):
        codes, scale = torch.ops.npu.npu_dynamic_block_quant(x, dst_type=torch.float8_e4m3fn)
    found = codes.double().numpy() * scale.double().numpy().repeat(128, axis=1)
    np.testing.assert_array_equal(found, oracle.quantize_activation(x.float().numpy(), quant))


@pytest.mark.parametrize(
    ("arch", "changes", "problem"),
    [
        ("a3", {}, "for a5"),
        ("a5", {"dst_type": 296}, "not possible"),
        ("a5", {"round_mode": "floor"}, "not rint"),
        ("a5", {"min_scale": -1.0}, "min_scale"),
        ("a5", {"x": torch.zeros(128, dtype=torch.bfloat16)}, "1-dimensional"),
        ("a5", {"x": torch.zeros((2, 128))}, "x cannot be"),
    ],
)
def test_wrong_block_calls_fail(arch: str, changes: dict[str, Any], problem: str) -> None:
    arguments = {"x": torch.zeros((2, 128), dtype=torch.bfloat16), "dst_type": 292, **changes}
    with emulate(f"npu:{arch}"), pytest.raises(VendorError, match=problem):
        torch.ops.npu.npu_dynamic_block_quant(**arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clip", [None, 1.0, 0.7848])
def test_kronecker_quantization_follows_the_kernel(dtype: torch.dtype, clip: float | None) -> None:
    """P1 @ (x @ P2) with the roundings of the kernel; what is clipped saturates; a matrix of zeros has no scale."""
    x = edgy(9, 96).to(dtype).view(9, 6, 16)
    rng = np.random.default_rng(8)
    p1, p2 = (torch.from_numpy(rng.standard_normal((n, n)) / 4).to(dtype) for n in (6, 16))
    x[4] = 0.0
    with emulate("npu:a2"):
        packed, scale = torch.ops.npu.npu_kronecker_quant(x, p1, p2, clip_ratio=clip, dst_dtype=torch.int32)
    assert packed.shape == (9, 6, 2)
    inner = (x.float() @ p2.float()).to(dtype).float()
    values = (p1.float() @ inner).to(torch.float16).float().flatten(1).numpy()
    amax = np.abs(values).max(1)
    ratio = np.float32(1.0 if clip is None else clip)
    np.testing.assert_array_equal(scale.numpy(), amax * ratio / np.float32(7))
    factor = np.float32(7) / ratio / np.where(amax == 0, np.float32(1), amax)
    wanted = np.clip(np.rint(values * factor[:, None]), -8, 7)
    np.testing.assert_array_equal(unpack_int4(packed).flatten(1).numpy(), wanted)
    assert (np.abs(wanted).max(1)[amax > 0] >= 7).all()
    assert not wanted[4].any()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"x": torch.zeros((2, 128), dtype=torch.bfloat16)}, "x is"),
        ({"x": torch.zeros((2, 8, 16))}, "x is"),
        ({"x": torch.zeros((2, 8, 12), dtype=torch.bfloat16)}, "multiple of 8"),
        ({"x": torch.zeros((2, 257, 16), dtype=torch.bfloat16)}, "at most 256"),
        ({"kronecker_p1": torch.zeros((16, 16), dtype=torch.bfloat16)}, "kronecker_p1 is"),
        ({"kronecker_p2": torch.zeros((16, 16))}, "kronecker_p2 is"),
        ({"clip_ratio": 0.0}, "clip_ratio"),
        ({"clip_ratio": 1.5}, "clip_ratio"),
        ({"dst_dtype": 292}, "dst_dtype"),
    ],
)
def test_wrong_kronecker_calls_fail(changes: dict[str, Any], problem: str) -> None:
    half = torch.bfloat16
    arguments: dict[str, Any] = {
        "x": torch.zeros((2, 8, 16), dtype=half),
        "kronecker_p1": torch.zeros((8, 8), dtype=half),
        "kronecker_p2": torch.zeros((16, 16), dtype=half),
        **changes,
    }
    with emulate("npu:a2"), pytest.raises(VendorError, match=problem):
        torch.ops.npu.npu_kronecker_quant(**arguments)


def test_rows_of_zeros_have_no_scale() -> None:
    for arch in ("a2", "a5"):
        with emulate(f"npu:{arch}"):
            codes, scale = torch.ops.npu.npu_dynamic_quant(torch.zeros((2, 16), dtype=torch.bfloat16))
        assert not codes.any()
        assert not scale.any()


def test_static_quantization_is_the_oracles() -> None:
    quant = TensorQuant("int8", "tensor", symmetric=False)
    x = edgy(9, 64)
    scale, zero = np.float32([0.043]), np.int32([-5])
    wanted = oracle.quantize_activation(x.float().numpy(), quant, input_scale=scale, input_zero_point=zero)
    with emulate("npu:a2"):
        codes = torch.ops.npu.npu_quantize(
            x.float(), torch.from_numpy(scale), torch.from_numpy(zero), torch.qint8, -1, True
        )
    np.testing.assert_array_equal((codes.double().numpy() + 5.0) * float(scale[0]), wanted)


def test_scales_for_the_dequantization_unit_keep_19_bits() -> None:
    scale = torch.tensor([1.0 + 2.0**-10, 1.0 + 2.0**-11, 0.1])
    with emulate("npu:a2"):
        found = torch.ops.npu.npu_trans_quant_param(scale)
    kept = (found & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
    assert kept.tolist() == [1.0 + 2.0**-10, 1.0, 0.0999755859375]
    assert bool(((found >> 46) == 1).all())


@pytest.mark.parametrize("version", ["2.10.0.post4", "2.13.0"])
def test_arguments_that_a_version_lacks_are_refused(version: str) -> None:
    x = torch.zeros((1, 64), dtype=torch.bfloat16)

    def call() -> Emulation:
        with emulate("npu:a5", version=version) as emulation:
            torch.ops.npu.npu_dynamic_mx_quant(x, dst_type=292, max_low_bound=0.0)
            return emulation

    if version == "2.13.0":
        assert not call().violations
    else:
        with pytest.raises(RuntimeError, match="max_low_bound"):
            call()
