"""Experts of vllm-xpu-kernels: gathering rows by expert, the grouped product, weighing what comes back.

From csrc/moe/remap_hidden_states.cpp, moe_gather.cpp, csrc/activation.cpp and csrc/xpu/grouped_gemm. The grouped
product takes weights in 4 and 8 bits and inputs in 16: scales of inputs are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from omniplat.emulation.core import Emulation
from omniplat.emulation.microscaling import e2m1_values, e8m0_values, in_groups, scaled_groups, unpack_nibbles

#: Numbers of chosen experts that the kernels are compiled for.
TOP_K = (1, 2, 4, 6, 7, 8, 10, 16)
_HALF = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_GROUPS = (32, 64, 128, 256)
_MOST_EXPERTS = 1024


def remap_hidden_states(
    emulation: Emulation,
    hidden_states: torch.Tensor,
    hidden_states_scales: torch.Tensor | None,
    remapped_hidden_states: torch.Tensor,
    remapped_hidden_states_scales: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    rows_per_expert: torch.Tensor,
    unpermuted_row_to_permuted_row: torch.Tensor,
    topk_ids: torch.Tensor,
    total_experts_num: int,
    local_experts_num: int,
) -> None:
    """Copies every row once for each local expert that it chose, sorted by expert; counts rows of each expert.

    The order of rows within an expert is not defined by the vendor: it is reversed here.
    """
    op = "_moe_C::remap_hidden_states"
    need = partial(emulation.require, op)
    rows, columns = hidden_states.shape
    top = topk_ids.shape[1]
    need(hidden_states_scales is None and remapped_hidden_states_scales is None, "scales of rows are not emulated")
    need(hidden_states.dtype in (*_HALF, torch.float32), f"Unsupported data type in hidden_states: {hidden_states}")
    need(
        hidden_states.dtype == remapped_hidden_states.dtype,
        "hidden_states and remapped_hidden_states must have save dtype",
    )
    need(expert_map is None or expert_map.dtype == torch.int32, "expert_map must be int32")
    need(rows_per_expert.dtype == torch.int32, "rows_per_expert must be int32")
    need(unpermuted_row_to_permuted_row.dtype == torch.int32, "row numbers are written as int32")
    need(topk_ids.dtype in (torch.int32, torch.int64), "topk_ids must be int64 or int32")
    need(
        tuple(remapped_hidden_states.shape) == (rows * top, columns),
        "remapped_hidden_states must be [num_rows * TopK, hidden_size]",
    )
    need(expert_map is None or expert_map.shape[0] == total_experts_num, "expert_map must be [total_experts_num]")
    need(rows_per_expert.shape[0] == local_experts_num, "rows_per_expert must be [local_experts_num]")
    need(topk_ids.shape[0] == rows, "topk_ids must be [num_rows, TopK]")
    need(top in TOP_K, f"Unsupported TopK value {top}")
    need(local_experts_num <= _MOST_EXPERTS, "local_experts_num exceeds the maximum supported number")
    need(columns % (16 // hidden_states.element_size()) == 0, "hidden_size must be divisible by ElemsPerItem")
    held = (hidden_states, remapped_hidden_states, rows_per_expert, unpermuted_row_to_permuted_row, topk_ids)
    if not all(tensor.is_contiguous() for tensor in held):
        emulation.record(op, "strides-ignored", "tensors are read and written as if they were contiguous")
    if bool(rows_per_expert.any()):
        emulation.record(op, "counts-not-zeroed", "rows_per_expert is added to and was not zeroed")
    ids = topk_ids.reshape(-1).to(torch.int64)
    if expert_map is not None:
        if bool((ids < 0).any()):
            emulation.record(op, "map-read-before-its-start", "an id of -1 is looked up in expert_map")
        ids = torch.where(ids < 0, -1, expert_map.to(torch.int64)[ids.clamp(min=0)])
    if bool((ids >= local_experts_num).any()) or bool((ids < -1).any()):
        emulation.record(op, "id-out-of-range", f"ids reach {int(ids.max())} of {local_experts_num} experts")
        ids = ids.clamp(-1, local_experts_num - 1)
    row_of = torch.full_like(ids, -1)
    position = 0
    for expert in range(local_experts_num):
        slots = torch.nonzero(ids == expert).reshape(-1).flip(0)
        row_of[slots] = torch.arange(position, position + slots.numel())
        rows_per_expert[expert] += slots.numel()
        position += slots.numel()
    chosen = torch.nonzero(row_of >= 0).reshape(-1)
    remapped_hidden_states[row_of[chosen]] = hidden_states[chosen // top]
    unpermuted_row_to_permuted_row.copy_(row_of.reshape(unpermuted_row_to_permuted_row.shape))


def moe_gather(
    emulation: Emulation,
    output: torch.Tensor,
    moe_output: torch.Tensor,
    topk_weights: torch.Tensor,
    unpermuted_row_to_permuted_row: torch.Tensor,
    num_experts: int,
) -> None:
    """`output` [M, K]: the weighed sum of the rows of `moe_output`, in f32; a row number of -1 is left out."""
    op = "_moe_C::moe_gather"
    emulation.require(op, topk_weights.dtype == torch.float32, "topk_weights must be float32")
    rows, top = topk_weights.shape
    emulation.require(op, top in TOP_K, f"error: not support TOPK={top}")
    emulation.require(op, output.dtype in (*_HALF, torch.float32), "Unsupported data type in moe_gather")
    emulation.require(op, moe_output.dtype == output.dtype, f"moe_output is read as {output.dtype}")
    emulation.require(op, unpermuted_row_to_permuted_row.dtype == torch.int32, "row numbers are read as int32")
    if not (topk_weights.is_contiguous() and moe_output.is_contiguous() and output.is_contiguous()):
        emulation.record(op, "strides-ignored", "tensors are read and written as if they were contiguous")
    total = torch.zeros((rows, output.shape[1]), dtype=torch.float32)
    where = unpermuted_row_to_permuted_row.reshape(rows, top).to(torch.int64)
    for slot in range(top):
        chosen = torch.nonzero(where[:, slot] >= 0).reshape(-1)
        part = moe_output[where[chosen, slot]].to(torch.float32)
        total[chosen] += part * topk_weights[chosen, slot].unsqueeze(1)
    output.copy_(total)


def cutlass_grouped_gemm_interface(
    emulation: Emulation,
    ptr_A: torch.Tensor,
    ptr_A_scale: torch.Tensor | None,
    ptr_B: torch.Tensor,
    ptr_B_scale: torch.Tensor | None,
    ptr_bias: torch.Tensor | None,
    ptr_D: torch.Tensor,
    rows_per_expert: torch.Tensor,
    N: int,
    K: int,
    num_experts: int,
) -> torch.Tensor:
    """Rows of `ptr_A` [M, K], sorted by expert, by each expert's weight, into `ptr_D` [M, N], which is returned."""
    op = "_xpu_C::cutlass_grouped_gemm_interface"
    need = partial(emulation.require, op)
    need(N % 8 == 0, "N must be divisible by 8")
    need(ptr_A.dim() == 2, "ptr_A must be 2D [Total_M, K]")
    need(ptr_B.dim() == 3, "ptr_B must be 3D [num_experts, K, N]")
    need(ptr_D.dim() == 2, "ptr_D must be 2D [Total_M, N]")
    need(ptr_bias is None or ptr_bias.dim() == 2, "ptr_bias must be 2D [num_experts, N]")
    for name, tensor in (("ptr_A", ptr_A), ("ptr_B", ptr_B), ("ptr_D", ptr_D), ("ptr_bias", ptr_bias)):
        need(tensor is None or tensor.is_contiguous(), f"{name} must be contiguous")
    need(ptr_B.shape[0] == num_experts, "ptr_B.size(0) must match num_experts")
    need(ptr_A.shape[0] == ptr_D.shape[0], "ptr_A.size(0) must match ptr_D.size(0)")
    if ptr_A_scale is not None:
        emulation.record(op, "input-scales-ignored", "ptr_A_scale is accepted and has no effect")
    if ptr_bias is not None:
        need(ptr_bias.shape[0] == num_experts, "ptr_bias.size(0) must match num_experts")
        need(ptr_bias.shape[1] == N, "ptr_bias.size(1) must match N")
        if ptr_bias.dtype != ptr_A.dtype:
            emulation.record(op, "bias-dtype", f"a bias of {ptr_bias.dtype} is read as {ptr_A.dtype}")
    need(ptr_A.dtype in _HALF, f"the grouped product requires A in {{fp16,bf16}}, found {ptr_A.dtype}")
    need(ptr_D.dtype == ptr_A.dtype, f"D is written as {ptr_A.dtype}")
    need(rows_per_expert.dtype == torch.int32, "rows_per_expert is read as int32")
    weights = _weights(emulation, op, ptr_A.dtype, ptr_B, ptr_B_scale, N, K)
    need(ptr_A.shape[1] == K, "ptr_A.size(1) must match ptr_B.size(1)")
    need(ptr_D.shape[1] == N, "ptr_B.size(2) must match ptr_D.size(1)")
    start = 0
    for expert, count in enumerate(rows_per_expert.tolist()):
        stop = start + count
        if count:
            y = weights(expert, ptr_A[start:stop].to(torch.float32))
            if ptr_bias is not None:
                y = y + ptr_bias[expert].to(torch.float32)
            ptr_D[start:stop] = y.to(ptr_D.dtype)
        start = stop
    return ptr_D


#: Rows f32 [m, K] of one expert to f32 [m, N].
_Product = Callable[[int, torch.Tensor], torch.Tensor]


def _weights(
    emulation: Emulation,
    op: str,
    dtype: torch.dtype,
    B: torch.Tensor,
    scale: torch.Tensor | None,
    N: int,
    K: int,
) -> _Product:
    """How the product decodes `B`: chosen by its dtype, and by dtype and shape of its scales."""
    need = partial(emulation.require, op)
    experts = B.shape[0]
    packed = B.dtype == torch.float4_e2m1fn_x2 or (B.dtype == torch.int8 and scale is not None)
    if packed:
        need(tuple(B.shape[1:]) == (N, K // 2), f"ptr_B is {list(B.shape)}, needs {[experts, N, K // 2]}")
        return _four_bits(emulation, op, dtype, B, scale, K)
    need(tuple(B.shape[1:]) == (K, N), f"ptr_B is {list(B.shape)}, needs {[experts, K, N]}")
    if B.dtype not in _FP8:
        need(scale is None, "w16a16 grouped gemm must not have scales")
        need(B.dtype == dtype, f"the weight is read as {dtype}, found {B.dtype}")
        return lambda expert, rows: rows @ B[expert].to(torch.float32)
    need(scale is not None, "w8a16 grouped gemm must have scales")
    assert scale is not None
    need(scale.is_contiguous(), "ptr_scales must be contiguous")
    need(scale.shape[0] == experts, "ptr_scales.size(0) must match num_experts")
    if scale.dim() == 3 and scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return _mxfp8(emulation, op, dtype, B, scale.view(torch.uint8), N, K)
    if scale.dim() == 3:
        need(scale.dtype == torch.float32, "block-fp8 scales must be float32")
        need(K % 128 == 0, "block-fp8 requires K divisible by 128")
        need(N % 128 == 0, "block-fp8 requires N divisible by 128")
        need(
            tuple(scale.shape[1:]) == (K // 128, N // 128),
            f"block-fp8 scales must be [E, K/128, N/128]; got {list(scale.shape)}",
        )

        def block(expert: int, rows: torch.Tensor) -> torch.Tensor:
            spread = scale[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
            return rows @ (B[expert].to(torch.float32) * spread).to(dtype).to(torch.float32)

        return block
    need(scale.dim() == 1, "ptr_scales of fp8 must be 1D [num_experts]")
    need(scale.dtype == torch.float32, "ptr_scales must be float")
    return lambda expert, rows: (rows @ B[expert].to(torch.float32)) * scale[expert]


def _four_bits(
    emulation: Emulation, op: str, dtype: torch.dtype, B: torch.Tensor, scale: torch.Tensor | None, K: int
) -> _Product:
    """int4 as two's complement with scales in the input's dtype, or mxfp4 with e8m0 bytes: scales [E, N, K / group]."""
    need = partial(emulation.require, op)
    need(scale is not None, "w8a16 grouped gemm must have scales")
    assert scale is not None
    need(scale.is_contiguous(), "ptr_scales must be contiguous")
    need(scale.dim() == 3, "ptr_scales of int4 must be 3D [num_experts, group_num, N]")
    need(scale.shape[0] == B.shape[0], "ptr_scales.size(0) of int4 must match num_experts")
    need(K % scale.shape[2] == 0, "ptr_scales.size(2) of int4 must be divisible by K")
    need(scale.shape[1] == B.shape[1], "ptr_scales.size(1) of int4 must match N")
    need(K // scale.shape[2] in _GROUPS, "group_size must be 32, 64, 128 or 256")
    is_mx = B.dtype == torch.float4_e2m1fn_x2
    if is_mx:
        need(scale.element_size() == 1, f"scales of mxfp4 are bytes, found {scale.dtype}")
        factors = _grouped_e8m0(emulation, op, scale.view(torch.uint8), unpack_nibbles(B) & 7, dtype)
    else:
        if scale.dtype != dtype:
            emulation.record(op, "scale-dtype", f"scales of {scale.dtype} are read as {dtype}")
        factors = scale.to(torch.float32)

    def product(expert: int, rows: torch.Tensor) -> torch.Tensor:
        codes = unpack_nibbles(B[expert])
        values = e2m1_values(codes) if is_mx else ((codes ^ 8).to(torch.float32) - 8.0)
        return rows @ scaled_groups(values, factors[expert]).to(dtype).to(torch.float32).t()

    return product


def _mxfp8(
    emulation: Emulation, op: str, dtype: torch.dtype, B: torch.Tensor, scale: torch.Tensor, N: int, K: int
) -> _Product:
    """Scales [E, K/32, N] or [E, N, K/32]; where both fit, they are read as the former."""
    need = partial(emulation.require, op)
    need(K % 32 == 0, "mxfp8 requires K divisible by 32")
    if tuple(scale.shape[1:]) == (K // 32, N):
        scale = scale.transpose(1, 2).contiguous()
    need(
        tuple(scale.shape[1:]) == (N, K // 32),
        f"mxfp8 scales must be [E, N, K/32] after layout normalize; got {list(scale.shape)} with N={N} K={K}",
    )
    magnitudes = B.view(torch.uint8).transpose(1, 2) & 0x7F
    factors = _grouped_e8m0(emulation, op, scale, magnitudes, dtype)

    def product(expert: int, rows: torch.Tensor) -> torch.Tensor:
        values = scaled_groups(B[expert].to(torch.float32).t(), factors[expert])
        return rows @ values.to(dtype).to(torch.float32).t()

    return product


def _grouped_e8m0(
    emulation: Emulation, op: str, scale: torch.Tensor, codes: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """e8m0 bytes [E, N, G] shifted into an f32's exponent and rounded to `dtype`: 0 is 0 here, and 255 infinity.

    `codes` [E, N, K] are magnitudes: a group of zeros does not care.
    """
    factors = (scale.to(torch.int32) << 23).view(torch.float32).to(dtype).to(torch.float32)
    used = in_groups(codes, scale.shape[-1]).amax(-1) > 0
    if bool((used & (factors != e8m0_values(scale))).any()):
        emulation.record(op, "scale-out-of-range", f"a scale's byte is no number of {dtype} to the product")
    return factors


# -- between the two products -----------------------------------------------------------------------------------


def _and_mul(
    name: str, function: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Emulation, torch.Tensor, torch.Tensor], None]:
    def run(emulation: Emulation, result: torch.Tensor, input: torch.Tensor) -> None:
        op = f"_C::{name}"
        half = input.shape[-1] // 2
        emulation.require(op, input.dtype in (*_HALF, torch.float32), f"not implemented for {input.dtype}")
        emulation.require(op, result.dtype == input.dtype, f"result is written as {input.dtype}")
        emulation.require(op, tuple(result.shape) == (*input.shape[:-1], half), f"result is {list(result.shape)}")
        if not (input.is_contiguous() and result.is_contiguous()):
            emulation.record(op, "strides-ignored", "tensors are read and written as if they were contiguous")
        gate, up = input[..., :half], input[..., half:]
        # The activation is rounded to the dtype before it is multiplied.
        result.copy_(function(gate.to(torch.float32)).to(input.dtype) * up)

    return run


silu_and_mul = _and_mul("silu_and_mul", F.silu)
gelu_and_mul = _and_mul("gelu_and_mul", F.gelu)
gelu_tanh_and_mul = _and_mul("gelu_tanh_and_mul", partial(F.gelu, approximate="tanh"))
