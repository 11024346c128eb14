"""AITER's matrix products: checks, layouts and numerics of aiter/ops/gemm_op_a4w4.py, gemm_op_a8w8.py and the Triton
kernels of ROCm/aiter at e4048607. Sums are f32, of integers exact."""

from __future__ import annotations

import torch

from omniplat.emulation.core import Emulation, VendorError
from omniplat.emulation.microscaling import e2m1_values, e8m0_values, scaled_groups, unpack_nibbles
from omniplat.emulation.rocm.layouts import (
    note_unshuffled,
    padded_scales,
    unshuffle_scale_bytes,
    unshuffle_weight_bytes,
)
from omniplat.emulation.rocm.quantizers import fp8_dtype

_HALF = (torch.float16, torch.bfloat16)
_BF16 = torch.bfloat16
_FP4 = (torch.uint8, torch.float4_e2m1fn_x2)
_BLOCK = 128


def gemm_a4w4(
    emulation: Emulation,
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = _BF16,
    alpha: float | None = 1.0,
    beta: float | None = 0.0,
    bpreshuffle: bool | None = True,
    apreshuffle: bool | None = False,
    global_A_scale: torch.Tensor | None = None,
    global_B_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """A [M, K/2] by B [N, K/2], shuffled, both fp4; scales shuffled and padded. `bias` and `beta` do nothing."""
    op = "aiter.gemm_a4w4"
    if emulation.arch == "gfx942":
        raise VendorError(op, "A4W4 GEMM kernel is not supported on gfx942, but got gfx942!")
    for name, tensor in (("A", A), ("B", B)):
        emulation.require(op, tensor.dtype in _FP4, f"{name} is fp4x2, found {tensor.dtype}")
    emulation.require(op, A.shape[-1] == B.shape[-1], f"A is {list(A.shape)}, B {list(B.shape)}")
    emulation.require(op, dtype == _BF16, f"the assembly kernels write bf16, not {dtype}")
    emulation.require(op, not apreshuffle and global_A_scale is None and global_B_scale is None, "gfx1250 only")
    if bias is not None or beta:
        emulation.record(op, "bias-dropped", "gfx950's kernels read neither bias nor beta")
    if alpha != 1.0:
        emulation.record(op, "alpha-unknown", "what alpha does is not known")
    rows, half = A.numel() // A.shape[-1], A.shape[-1]
    features, groups = B.shape[0], half * 2 // 32
    if half * 2 % 256:
        emulation.record(
            op, "columns-not-256", f"K = {half * 2}: scales are read in eights, and padding is not written"
        )
    if features % 32:
        emulation.record(op, "rows-not-32", f"N = {features} is no multiple of 32, which scales are tiled in")
    held = []
    for name, scale, count in (("A_scale", A_scale, rows), ("B_scale", B_scale, features)):
        emulation.require(op, scale.element_size() == 1, f"{name} is e8m0, found {scale.dtype}")
        if tuple(scale.shape) != padded_scales(count, groups):
            problem = f"{name} is {list(scale.shape)}, read as {list(padded_scales(count, groups))}"
            emulation.record(op, "scales-not-shuffled", problem)
            return torch.full((*A.shape[:-1], features), torch.nan, dtype=dtype)
        held.append(e8m0_values(unshuffle_scale_bytes(scale.view(torch.uint8), count, groups)))
    b = B.contiguous().view(torch.uint8)
    if bpreshuffle:
        emulation.require(op, features % 16 == 0 and half % 32 == 0, "a shuffled weight has whole tiles")
        note_unshuffled(emulation, op, b)
        b = unshuffle_weight_bytes(b)
    left = scaled_groups(e2m1_values(unpack_nibbles(A.reshape(rows, half))), held[0])
    right = scaled_groups(e2m1_values(unpack_nibbles(b)), held[1])
    return (left @ right.t()).to(dtype).reshape(*A.shape[:-1], features)


def gemm_afp4wfp4(
    emulation: Emulation,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = _BF16,
    y: torch.Tensor | None = None,
    config: dict[str, int] | None = None,
    skip_reduce: bool | None = False,
) -> torch.Tensor:
    """Triton's product: x [M, K/2] by w [N, K/2], neither shuffled, with plain scales [M, K/32] and [N, K/32]."""
    op = "aiter.ops.triton.gemm_afp4wfp4"
    _require_fp4(emulation, op)
    emulation.require(op, x.dtype == torch.uint8 and w.dtype == torch.uint8, "Triton reads fp4 as uint8")
    emulation.require(op, x.shape[1] == w.shape[1], f"x is {list(x.shape)}, w {list(w.shape)}")
    emulation.require(op, dtype in _HALF, f"writes fp16 or bf16, not {dtype}")
    groups = x.shape[1] * 2 // 32
    held = []
    for name, scale, count in (("x_scales", x_scales, x.shape[0]), ("w_scales", w_scales, w.shape[0])):
        emulation.require(op, scale.dtype == torch.uint8, f"{name} is read as uint8, found {scale.dtype}")
        if tuple(scale.shape) != (count, groups):
            emulation.record(op, "scale-shape", f"{name} is {list(scale.shape)}, read as {[count, groups]}")
            return torch.full((x.shape[0], w.shape[0]), torch.nan, dtype=dtype)
        held.append(e8m0_values(scale.contiguous()))
    left, right = (
        scaled_groups(e2m1_values(unpack_nibbles(codes)), scale) for codes, scale in zip((x, w), held, strict=True)
    )
    out = (left @ right.t()).to(dtype)
    return out if y is None else y.copy_(out)


def gemm_a8wfp4(
    emulation: Emulation,
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = _BF16,
    config: dict[str, int] | None = None,
) -> torch.Tensor:
    """Triton's product of fp8 x [M, K], with f32 scales [M, 1], by fp4 w [N, K/2]; written to `y`, and returned."""
    op = "aiter.ops.triton.gemm_a8wfp4"
    _require_fp4(emulation, op)
    rows, columns = x.shape
    features = w.shape[0]
    emulation.require(op, x.dtype == fp8_dtype(emulation.arch), f"x is fp8, found {x.dtype}")
    emulation.require(op, w.shape[1] == columns // 2, f"Inconsistent shapes: x has K={columns} but w {list(w.shape)}")
    emulation.require(
        op,
        x_scales.shape[0] == rows and tuple(w_scales.shape) == (features, columns // 32),
        f"Scale shapes incorrect: {list(x_scales.shape)}, {list(w_scales.shape)}",
    )
    emulation.require(op, tuple(y.shape) == (rows, features) and y.dtype == dtype, "y is written as dtype [M, N]")
    weight = scaled_groups(e2m1_values(unpack_nibbles(w)), e8m0_values(w_scales.contiguous()))
    product = (x.to(torch.float32) @ weight.t()) * x_scales.reshape(rows, 1).to(torch.float32)
    return y.copy_(product)


def gemm_a8w8(
    emulation: Emulation,
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = _BF16,
    splitK: int | None = None,
) -> torch.Tensor:
    """int8 or fp8 XQ [M, K] by WQ [N, K], not shuffled; scales [M, 1] and [1, N]; `bias` before the rounding."""
    op = "aiter.gemm_a8w8"
    codes = (torch.int8, fp8_dtype(emulation.arch))
    emulation.require(
        op, XQ.dtype in codes and WQ.dtype == XQ.dtype, "Weights and activations should both be int8/fp8!"
    )
    _require_8_bit_scales(emulation, op, x_scale, w_scale, dtype)
    emulation.require(op, bias is None or bias.dtype == dtype, "Out amd bias should have the same dtype!")
    rows, columns = XQ.shape
    emulation.require(op, WQ.shape[1] == columns, f"XQ is {list(XQ.shape)}, WQ {list(WQ.shape)}")
    emulation.require(op, columns % 16 == 0 and WQ.shape[0] % 8 == 0, "This GEMM is not supported!")
    y = _exact_product(XQ, WQ) * _row_scales(emulation, op, w_scale, WQ.shape[0])
    y = y * _row_scales(emulation, op, x_scale, rows).unsqueeze(1)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(dtype)


def gemm_a8w8_bpreshuffle(
    emulation: Emulation,
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = _BF16,
    check: bool = False,
) -> torch.Tensor:
    """fp8 by fp8 with a weight in tiles of (16, 16); no bias."""
    op = "aiter.gemm_a8w8_bpreshuffle"
    emulation.require(op, dtype in _HALF, f"Output dtype={dtype} is currently not supported in gemm_a8w8")
    emulation.require(op, WQ.dtype == fp8_dtype(emulation.arch), "gemm_a8w8_bpreshuffle only support fp8 now")
    emulation.require(op, bias is None, "gemm_a8w8_bpreshuffle does not support bias now")
    emulation.require(op, XQ.dtype == WQ.dtype, "Weights and activations should have the same dtype!")
    _require_8_bit_scales(emulation, op, x_scale, w_scale, dtype)
    rows, columns = XQ.shape
    features = WQ.shape[0]
    emulation.require(op, WQ.shape[1] == columns, f"XQ is {list(XQ.shape)}, WQ {list(WQ.shape)}")
    emulation.require(
        op,
        columns >= 512 or (columns >= 192 and columns % 64 == 0),
        f"Unsupported K for heuristic dispatch: {columns}. Supported K greater than 192 and K % 64 == 0.",
    )
    emulation.require(op, features % 16 == 0 and columns % 32 == 0, "a shuffled weight has whole tiles")
    note_unshuffled(emulation, op, WQ)
    weight = unshuffle_weight_bytes(WQ.contiguous().view(torch.uint8)).view(WQ.dtype)
    y = _exact_product(XQ, weight) * _row_scales(emulation, op, w_scale, features)
    return (y * _row_scales(emulation, op, x_scale, rows).unsqueeze(1)).to(dtype)


def gemm_a8w8_blockscale(
    emulation: Emulation,
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype = _BF16,
    isBpreshuffled: bool = False,
) -> torch.Tensor:
    """fp8 by fp8: scales f32 [M, K/128], row by row, and [N/128, K/128]; no bias."""
    op = "aiter.gemm_a8w8_blockscale"
    emulation.require(op, dtype in _HALF, f"Output dtype={dtype} is currently not supported in gemm_a8w8")
    emulation.require(op, not isBpreshuffled, "asm kernel only support B preshuffle and m >= 16")
    emulation.require(
        op, XQ.dtype == WQ.dtype == fp8_dtype(emulation.arch), "Weights and activations should have the same dtype!"
    )
    _require_8_bit_scales(emulation, op, x_scale, w_scale, dtype)
    rows, columns = XQ.shape
    features = WQ.shape[0]
    emulation.require(op, WQ.shape[1] == columns and columns % 16 == 0, "This GEMM is not supported!")
    emulation.require(op, features % 8 == 0, "This GEMM is not supported!")
    groups, blocks = -(-columns // _BLOCK), -(-features // _BLOCK)
    wanted = {"x_scale": (x_scale, (rows, groups)), "w_scale": (w_scale, (blocks, groups))}
    for name, (scale, shape) in wanted.items():
        if tuple(scale.shape) != shape or not scale.is_contiguous():
            emulation.record(op, "scale-shape", f"{name} is {list(scale.shape)}, read row by row as {list(shape)}")
            return torch.full((rows, features), torch.nan, dtype=dtype)
    x = XQ.to(torch.float32) * x_scale.repeat_interleave(_BLOCK, 1)[:, :columns]
    spread = w_scale.repeat_interleave(_BLOCK, 0)[:features].repeat_interleave(_BLOCK, 1)[:, :columns]
    return (x @ (WQ.to(torch.float32) * spread).t()).to(dtype)


# -- what they share --------------------------------------------------------------------------------------------


def _require_fp4(emulation: Emulation, op: str) -> None:
    emulation.require(op, emulation.arch == "gfx950", "MXFP4 is not available on your device")


def _require_8_bit_scales(
    emulation: Emulation, op: str, x_scale: torch.Tensor, w_scale: torch.Tensor, dtype: torch.dtype
) -> None:
    emulation.require(op, x_scale.dtype == w_scale.dtype, "Scales should have the same dtype!")
    emulation.require(op, x_scale.dtype == torch.float32 and dtype in _HALF, "Unsupported scales/output dtype!")


def _row_scales(emulation: Emulation, op: str, scale: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` numbers in memory, NaN for those past the end."""
    flat = scale.reshape(-1)
    if flat.numel() != count or not scale.is_contiguous():
        emulation.record(op, "scale-shape", f"{count} scales are read of {list(scale.shape)}")
        flat = torch.cat((flat, torch.full((max(0, count - flat.numel()),), torch.nan)))[:count]
    return flat


def _exact_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """f32 [M, N]: of int8 codes exact in int32 first."""
    if x.dtype == torch.int8:
        return (x.to(torch.float64) @ w.to(torch.float64).t()).to(torch.float32)
    return x.to(torch.float32) @ w.to(torch.float32).t()
