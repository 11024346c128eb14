"""Matrix products of vllm-xpu-kernels (oneDNN): checks and choice of a mode as csrc/xpu/onednn has them.

`fp8_gemm` and its like choose how scales are read by their shapes alone, and check few of those: what they would read
past the end of a tensor is NaN here, and recorded. Sums are f32.
"""

from __future__ import annotations

import torch

from omniplat.emulation.core import Emulation
from omniplat.emulation.microscaling import e2m1_values, e8m0_values, scaled_groups, unpack_nibbles

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF = (torch.float16, torch.bfloat16)
_BIAS = (torch.float32, torch.float16, torch.bfloat16)


def fp8_gemm(
    emulation: Emulation,
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None,
    A_scale_: torch.Tensor | None,
    B_scale_: torch.Tensor | None,
    bias_: torch.Tensor | None,
) -> torch.Tensor:
    """A [M, K] or [b, M, K] by B [K, N], fp8; scales per tensor, token and channel, or block by block.

    Block by block only where `A_scale_` has two dimensions and more than one column.
    """
    op = "_xpu_C::fp8_gemm"
    _require_contiguous(emulation, op, "fp8", A_scale=A_scale_, B_scale=B_scale_, bias=bias_)
    dtype = _output_dtype(emulation, op, A, B, out_dtype)
    emulation.require(
        op, A.dtype in _FP8 and B.dtype == A.dtype, "input and weight must be f8_e5m2 or f8_e4m3fn for fp8 matmul"
    )
    emulation.require(op, dtype in _HALF, "output must be float16 or bfloat16 for fp8 matmul")
    rows, columns = A.numel() // A.shape[-1], A.shape[-1]
    _require_columns(emulation, op, columns, B)
    a, b = A.to(torch.float32).reshape(rows, columns), B.to(torch.float32)
    a_scale, b_scale = (torch.ones(1) if scale is None else scale for scale in (A_scale_, B_scale_))
    if a_scale.dim() == 2 and a_scale.shape[1] > 1:
        emulation.require(op, b_scale.dim() == 2, f"B_scale has no dimension 1: {list(b_scale.shape)}")
        emulation.require(
            op,
            a_scale.shape[1] == b_scale.shape[0],
            f"Mismatch group size in input and weight.{a_scale.shape[1]} vs {b_scale.shape[0]}",
        )
        y = _block_product(emulation, op, a, b, a_scale, b_scale)
    else:
        if a_scale.dim() > 2 and a_scale.shape[-1] > 1:
            emulation.record(op, "scales-with-three-dimensions", "scales per group are read as scales per token")
        y = a @ b
        y = y * _flat(emulation, op, "A_scale", a_scale, rows).unsqueeze(1)
        y = y * _flat(emulation, op, "B_scale", b_scale, B.shape[-1])
    return _finish(emulation, op, y, bias_, A, dtype)


def fp8_gemm_w8a16(
    emulation: Emulation, A: torch.Tensor, B: torch.Tensor, B_scale_: torch.Tensor | None, bias_: torch.Tensor | None
) -> torch.Tensor:
    """A in f16 or bf16; B fp8 with a scale per tensor, per channel, or in squares of K / B_scale.size(0)."""
    op = "_xpu_C::fp8_gemm_w8a16"
    _require_contiguous(emulation, op, "fp8", B_scale=B_scale_, bias=bias_)
    dtype = _output_dtype(emulation, op, A, B, A.dtype)
    emulation.require(op, B.dtype in _FP8, "weight must be f8_e5m2 or f8_e4m3fn for fp8 matmul")
    emulation.require(op, A.dtype in _HALF, f"Unsupported data type for fp8 matmul: {A.dtype}")
    rows, columns = A.numel() // A.shape[-1], A.shape[-1]
    _require_columns(emulation, op, columns, B)
    a, b = A.to(torch.float32).reshape(rows, columns), B.to(torch.float32)
    scale = torch.ones(1) if B_scale_ is None else B_scale_
    if scale.dim() == 2 and scale.shape[0] > 1:
        size = columns // scale.shape[0]
        if scale.shape[1] != -(-b.shape[1] // size) or columns % scale.shape[0]:
            emulation.record(op, "scale-shape", f"B_scale {list(scale.shape)} for blocks of {size} of {list(b.shape)}")
            return torch.full((*A.shape[:-1], b.shape[1]), torch.nan, dtype=dtype)
        # Weights are brought to the input's dtype before they are multiplied.
        y = a @ _spread(scale.to(torch.float32), b, size, size).to(dtype).to(torch.float32)
    else:
        y = (a @ b) * _flat(emulation, op, "B_scale", scale, b.shape[1])
    return _finish(emulation, op, y, bias_, A, dtype)


def fp4_gemm(
    emulation: Emulation,
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    out_dtype: torch.dtype | None,
    bias_: torch.Tensor | None,
) -> torch.Tensor:
    """A [M, K/2] by B [K/2, N], both float4_e2m1fn_x2; scales e8m0 [M, K/32] and [K/32, N]."""
    op = "_xpu_C::fp4_gemm"
    _require_contiguous(emulation, op, "fp4", A_scale=A_scale, B_scale=B_scale)
    dtype = _output_dtype(emulation, op, A, B, out_dtype)
    fp4 = torch.float4_e2m1fn_x2
    emulation.require(
        op, A.dtype == fp4 and B.dtype == fp4, "input and weight must be f4_e2m1x2 or f4_e2m1x2 for fp4 matmul"
    )
    emulation.require(op, dtype in _HALF, "output must be float16 or bfloat16 for fp4 matmul")
    e8m0 = torch.float8_e8m0fnu
    emulation.require(op, A_scale.dtype == e8m0, f"Unsupported scale type for fp4 matmul: {A_scale.dtype}")
    emulation.require(op, B_scale.dtype == e8m0, f"Mismatched scale data types in mxfp4 matmul: {B_scale.dtype}")
    rows, half = A.numel() // A.shape[-1], A.shape[-1]
    _require_columns(emulation, op, half, B)
    emulation.require(op, B.stride(-2) == 1, "a weight whose K is not its fastest dimension splits bytes of two codes")
    groups, features = half * 2 // 32, B.shape[-1]
    for name, scale, wanted in (("A_scale", A_scale, (rows, groups)), ("B_scale", B_scale, (groups, features))):
        if tuple(scale.reshape(-1, scale.shape[-1]).shape) != wanted:
            emulation.record(op, "scale-shape", f"{name} is {list(scale.shape)}, read as {list(wanted)}")
            return torch.full((*A.shape[:-1], features), torch.nan, dtype=dtype)
    a = scaled_groups(e2m1_values(unpack_nibbles(A.reshape(rows, half))), e8m0_values(A_scale.reshape(rows, groups)))
    b = scaled_groups(e2m1_values(unpack_nibbles(B.t())), e8m0_values(B_scale).t())
    return _finish(emulation, op, a @ b.t(), bias_, A, dtype)


def int4_gemm_w4a16(
    emulation: Emulation,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    B_scale: torch.Tensor,
    B_zp: torch.Tensor,
    group_size: int,
    g_idx: torch.Tensor | None,
) -> torch.Tensor:
    """A in f16 or bf16; B int32 [K/8, N] of unsigned nibbles, K its fastest dimension: w = (q - zero point) * scale."""
    op = "_xpu_C::int4_gemm_w4a16"
    _require_contiguous(emulation, op, "int4", B_scale=B_scale)
    a = A if g_idx is None else A.index_select(-1, g_idx)
    dtype = _output_dtype(emulation, op, a, B, a.dtype)
    emulation.require(op, a.dtype in _HALF, f"Unsupported data type for int4-f16/bf16 matmul: {a.dtype}")
    if B_scale.dtype != a.dtype:
        emulation.record(op, "scale-dtype", f"scales are {B_scale.dtype}, the input {a.dtype}")
    weight = _int4_weight(emulation, op, a.shape[-1], B, B_scale, B_zp, group_size)
    y = a.to(torch.float32).reshape(-1, a.shape[-1]) @ weight.to(dtype).to(torch.float32)
    return _finish(emulation, op, y, bias, a, dtype)


def int4_gemm_w4a8(
    emulation: Emulation,
    A_: torch.Tensor,
    A_scale: torch.Tensor,
    A_zp: torch.Tensor,
    B: torch.Tensor,
    B_scale: torch.Tensor,
    B_zp: torch.Tensor,
    group_size: int,
    g_idx: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """A int8 or uint8 with a scale and a zero point per token; B as in `int4_gemm_w4a16`. The output is f16."""
    op = "_xpu_C::int4_gemm_w4a8"
    _require_contiguous(emulation, op, "int4", A_scale=A_scale, B_scale=B_scale)
    a = A_ if g_idx is None else A_.index_select(-1, g_idx)
    per_token = A_scale.dim() == 2 and A_scale.shape[1] == 1 and A_zp.dim() == 2 and A_zp.shape[1] == 1
    emulation.require(
        op,
        per_token or (A_scale.dim() == 1 and A_zp.dim() == 1),
        "Int4-Int8 matmul expects quantized input A to be per-token ([b*m,1]) or per-tensor ([b]) quantized!",
    )
    dtype = _output_dtype(emulation, op, a, B, torch.float16)
    emulation.require(
        op, a.dtype in (torch.int8, torch.uint8), f"Unsupported data type for int4-int8 matmul: {a.dtype}"
    )
    emulation.require(op, A_zp.dtype == torch.int32, f"A_zp is read as int32, found {A_zp.dtype}")
    for name, scale in (("A_scale", A_scale), ("B_scale", B_scale)):
        if scale.dtype != torch.float16:
            emulation.record(op, "scale-dtype", f"{name} is {scale.dtype} and may be read as float16")
    rows, columns = a.numel() // a.shape[-1], a.shape[-1]
    weight = _int4_weight(emulation, op, columns, B, B_scale, B_zp, group_size)
    values = a.to(torch.float32).reshape(rows, columns) - _flat(emulation, op, "A_zp", A_zp, rows).unsqueeze(1)
    y = (values @ weight) * _flat(emulation, op, "A_scale", A_scale, rows).unsqueeze(1)
    return _finish(emulation, op, y, bias, a, dtype)


# -- what they share --------------------------------------------------------------------------------------------


def _require_contiguous(emulation: Emulation, op: str, kind: str, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        emulation.require(op, tensor is None or tensor.is_contiguous(), f"{name} must be contiguous for {kind} matmul")


def _output_dtype(
    emulation: Emulation, op: str, A: torch.Tensor, B: torch.Tensor, dtype: torch.dtype | None
) -> torch.dtype:
    emulation.require(op, A.dim() in (2, 3), "OneDNN Matmul only support 2D and 3D inputs!")
    emulation.require(op, B.dim() == 2, "a batch of weights is not emulated")
    if B.dtype == torch.int32:
        emulation.require(op, B.stride(-2) == 1, "Int4 weight must be in NT format!")
    return dtype or torch.float16


def _require_columns(emulation: Emulation, op: str, columns: int, B: torch.Tensor) -> None:
    """The library does not look and would read past the weight's end."""
    emulation.require(op, B.shape[0] == columns, f"input has {columns} columns, the weight {list(B.shape)}")


def _flat(emulation: Emulation, op: str, name: str, tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` numbers in memory as f32 [count], NaN for those past the end; one number stands for all."""
    held = e8m0_values(tensor) if tensor.dtype == torch.float8_e8m0fnu else tensor.to(torch.float32)
    held = held.reshape(-1)
    if held.numel() == 1:
        return held.expand(count)
    if held.numel() != count:
        emulation.record(op, "scale-shape", f"{count} numbers are read of {name} {list(tensor.shape)}")
        held = torch.cat((held, torch.full((max(0, count - held.numel()),), torch.nan)))
    return held[:count]


def _block_product(
    emulation: Emulation,
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
) -> torch.Tensor:
    rows, columns = a.shape
    groups, blocks = b_scale.shape
    if a_scale.shape[0] != rows or columns % groups or b.shape[1] % blocks:
        problem = f"A_scale {list(a_scale.shape)}, B_scale {list(b_scale.shape)} for {rows} x {list(b.shape)}"
        emulation.record(op, "scale-shape", problem)
        return torch.full((rows, b.shape[1]), torch.nan)
    left, right = (
        e8m0_values(scale) if scale.dtype == torch.float8_e8m0fnu else scale.to(torch.float32)
        for scale in (a_scale, b_scale)
    )
    return scaled_groups(a, left) @ _spread(right, b, columns // groups, b.shape[1] // blocks)


def _spread(scale: torch.Tensor, b: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    """`b` [K, N] times scales of blocks of `high` x `wide`."""
    per_value = scale.repeat_interleave(high, 0)[: b.shape[0]].repeat_interleave(wide, 1)[:, : b.shape[1]]
    return b * per_value


def _int4_weight(
    emulation: Emulation,
    op: str,
    columns: int,
    B: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    """f32 [K, N]."""
    emulation.require(op, B.dtype == torch.int32, f"the weight is int32 words of 8 nibbles, found {B.dtype}")
    emulation.require(op, B.shape[0] * 8 == columns, f"input has {columns} columns, the weight {list(B.shape)}")
    features = B.shape[1]
    emulation.require(op, group_size > 0 and columns % group_size == 0, f"group_size {group_size} does not divide K")
    groups = columns // group_size
    if tuple(scale.shape) != (groups, features):
        emulation.record(op, "scale-shape", f"B_scale is {list(scale.shape)}, read as {[groups, features]}")
        return torch.full((columns, features), torch.nan)
    codes = unpack_nibbles(B.t().contiguous().view(torch.uint8)).t().to(torch.float32)
    if zero.dim() == 1:
        emulation.require(op, zero.dtype == torch.int8 and zero.numel() == 1, "one zero point is an int8 tensor [1]")
        points = zero.to(torch.float32).expand(groups, features)
    else:
        emulation.require(op, zero.dtype == torch.int32 and zero.is_contiguous(), "zero points are words of 8 nibbles")
        emulation.require(op, tuple(zero.shape) == (groups, features // 8), f"B_zp is {list(zero.shape)}")
        points = unpack_nibbles(zero.view(torch.uint8)).to(torch.float32)
    spread = [part.repeat_interleave(group_size, 0) for part in (points, scale.to(torch.float32))]
    return (codes - spread[0]) * spread[1]


def _finish(
    emulation: Emulation,
    op: str,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    A: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Bias (one number, a row, a column or all), then the one rounding; in the input's leading shape."""
    rows, features = y.shape
    if bias is not None and bias.numel():
        emulation.require(op, bias.dtype in _BIAS, f"Unsupported data type for bias: {bias.dtype}")
        added = bias.to(torch.float32)
        if bias.numel() == rows * features:
            added = added.reshape(rows, features)
        elif bias.shape[-1] == features == bias.numel():
            added = added.reshape(1, features)
        elif bias.shape[-1] == 1 and bias.numel() == rows:
            added = added.reshape(rows, 1)
        else:
            emulation.require(op, bias.numel() == 1, f"unsupported bias dim in matmul ...{list(bias.shape)}")
            added = added.reshape(1, 1)
        y = y + added
    if A.stride(-1) != 1:
        emulation.record(op, "strides-ignored", f"the input has strides {A.stride()}; its last one is taken for 1")
    # The output's rows lie as far apart as the input's.
    strides = [*(step // A.shape[-1] * features for step in A.stride()[:-1]), A.stride(-1)]
    out = torch.empty_strided((*A.shape[:-1], features), strides, dtype=dtype)
    return out.copy_(y.reshape(out.shape))
