"""One right call of every emulated operator, small, with what it has to return; tests spoil one argument at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from omniplat.emulation.ascend.quantize import pack_int4
from omniplat.oracle.codecs import decode_codes

M, N, K, E = 5, 48, 128, 3


@dataclass(frozen=True)
class Call:
    """`arguments` by name; `expected` in float64, from the values that the codes stand for; the `output` dtype."""

    op: str
    arch: str
    arguments: dict[str, Any]
    expected: torch.Tensor
    output: torch.dtype

    def run(self, **changes: Any) -> Any:
        return getattr(torch.ops.npu, self.op)(**{**self.arguments, **changes})


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def int8(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator())


def int4(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 8, shape, dtype=torch.int8, generator=generator())


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator()).to(torch.float8_e4m3fn)


def fp4(*shape: int) -> torch.Tensor:
    """Packed bytes; the last size is that of the values."""
    *lead, last = shape
    return torch.randint(0, 256, (*lead, last // 2), dtype=torch.uint8, generator=generator())


def fp4_numbers(packed: torch.Tensor) -> torch.Tensor:
    flat = packed.reshape(-1, packed.shape[-1])
    numbers = decode_codes(flat.numpy(), "fp4_e2m1", 2 * packed.shape[-1])
    return torch.from_numpy(np.asarray(numbers)).reshape(*packed.shape[:-1], -1)


def e8m0(*shape: int) -> torch.Tensor:
    return torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator())


def scaled(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 values [..., K] under paired scales [..., K/64, 2]."""
    factors = torch.exp2(scale.double() - 127).flatten(-2).repeat_interleave(32, dim=-1)
    return values.double() * factors[..., : values.shape[-1]]


def f32(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator()) + 0.5


def int8_matmul() -> Call:
    x, weight, scale, token, bias = int8(M, K), int8(K, N), f32(N), f32(M), f32(N)
    y = (x.double() @ weight.double()) * scale.double() * token.double().unsqueeze(1) + bias.double()
    arguments = {"x1": x, "x2": weight, "scale": scale, "pertoken_scale": token, "bias": bias, "output_dtype": 15}
    return Call("npu_quant_matmul", "a2", arguments, y, torch.bfloat16)


def int4_matmul() -> Call:
    x, weight, scale, token = int4(M, K), int4(N, K), f32(N), f32(M)
    y = (x.double() @ weight.double().t()) * scale.double() * token.double().unsqueeze(1)
    words = {"x1": pack_int4(x), "x2": pack_int4(weight).t()}
    arguments = {**words, "scale": scale, "pertoken_scale": token, "output_dtype": 15}
    return Call("npu_quant_matmul", "a3", arguments, y, torch.bfloat16)


def static_matmul() -> Call:
    """An f16 output without a scale per token: the scale is cut to 19 bits."""
    x, weight, bias = int8(M, K), int8(K, N), torch.arange(N, dtype=torch.int32)
    scale = torch.full((N,), 2.0**-12)
    y = (x.double() @ weight.double() + bias) * scale.double()
    arguments = {"x1": x, "x2": weight, "scale": scale, "bias": bias, "output_dtype": 5}
    return Call("npu_quant_matmul", "a2", arguments, y, torch.float16)


def fp8_matmul() -> Call:
    x, weight, scale, token = fp8(M, K), fp8(N, K), f32(N), f32(M)
    y = (x.double() @ weight.double().t()) * scale.double() * token.double().unsqueeze(1)
    arguments = {"x1": x, "x2": weight.t(), "scale": scale, "pertoken_scale": token, "output_dtype": 15}
    return Call("npu_quant_matmul", "a5", arguments, y, torch.bfloat16)


def fp8_block_matmul() -> Call:
    """The last tile has 44 of its 128 columns of K, and 48 of its rows."""
    depth = 300
    x, weight, scale, token = fp8(M, depth), fp8(2 * N + 80, depth), f32(2, 3), f32(M, 3)
    wide = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], :depth]
    y = (x.double() * token.double().repeat_interleave(128, 1)[:, :depth]) @ (weight.double() * wide).t()
    arguments = {
        "x1": x,
        "x2": weight.t(),
        "scale": scale.t(),
        "pertoken_scale": token,
        "output_dtype": 6,
        "group_sizes": [1, 128, 128],
    }
    return Call("npu_quant_matmul", "a5", arguments, y, torch.float32)


def _mx(x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor) -> dict[str, Any]:
    return {
        "x1": x,
        "x2": weight.t(),
        "scale": ws.transpose(0, 1),
        "pertoken_scale": xs,
        "output_dtype": 15,
        "scale_dtype": 293,
        "pertoken_scale_dtype": 293,
        "group_sizes": [1, 1, 32],
    }


def mxfp8_matmul() -> Call:
    x, weight, xs, ws, bias = fp8(M, K), fp8(N, K), e8m0(M, 2, 2), e8m0(N, 2, 2), f32(N)
    y = scaled(x.float(), xs) @ scaled(weight.float(), ws).t() + bias.double()
    return Call("npu_quant_matmul", "a5", {**_mx(x, weight, xs, ws), "bias": bias}, y, torch.bfloat16)


def mxfp4_matmul() -> Call:
    x, weight, xs, ws, bias = fp4(M, K), fp4(N, K), e8m0(M, 2, 2), e8m0(N, 2, 2), f32(N)
    y = scaled(fp4_numbers(x), xs) @ scaled(fp4_numbers(weight), ws).t() + bias.double()
    named = {"x1_dtype": 296, "x2_dtype": 296, "bias": bias}
    return Call("npu_quant_matmul", "a5", {**_mx(x, weight, xs, ws), **named}, y, torch.bfloat16)


def mxfp4_a8_matmul() -> Call:
    x, weight, xs, ws = fp8(M, K), fp4(N, K), e8m0(M, 2, 2), e8m0(N, 2, 2)
    bias = f32(1, N).to(torch.bfloat16)
    y = scaled(x.float(), xs) @ scaled(fp4_numbers(weight), ws).t() + bias.double()
    named = {"x2_dtype": 296, "group_sizes": [0, 0, 32], "bias": bias}
    return Call("npu_quant_matmul", "a5", {**_mx(x, weight, xs, ws), **named}, y, torch.bfloat16)


def dual_matmul() -> Call:
    """Has to be made while an emulation is on: the weight is cast to NZ."""
    depth = 1024
    x, weight = fp4(M, depth), fp4(N, depth)
    xs, ws, xw, ww = e8m0(M, 16, 2), e8m0(N, 16, 2), f32(M, 2), f32(N, 2)
    wide = scaled(fp4_numbers(x), xs) * xw.double().repeat_interleave(512, dim=1)
    other = scaled(fp4_numbers(weight), ws) * ww.double().repeat_interleave(512, dim=1)
    bias = f32(N)
    arguments = {
        "x1": x,
        "x2": torch.ops.npu.npu_format_cast(weight.view(torch.int8), 29, customize_dtype=torch.int8),
        "x1_level0_scale": xw,
        "x2_level0_scale": ww.t().contiguous(),
        "x1_level1_scale": xs,
        "x2_level1_scale": ws,
        "bias": bias,
        "output_dtype": 15,
    }
    y = wide @ other.t() + bias.double()
    return Call("npu_dual_level_quant_matmul", "a5", arguments, y, torch.bfloat16)


def weight_only_matmul() -> Call:
    """int4 in groups of 32, with offsets; powers of two, so that dequantized weights are numbers of bf16."""
    x = int4(M, K).to(torch.bfloat16)
    weight = int4(N, K)
    scale = torch.exp2(torch.randint(-3, 3, (4, N), generator=generator()).float()).to(torch.bfloat16)
    offset = torch.full((4, N), 3.0, dtype=torch.bfloat16)
    bias = f32(N)
    dense = (weight.double().t() + 3.0) * scale.double().repeat_interleave(32, dim=0)
    arguments = {
        "x": x,
        "weight": pack_int4(weight).t(),
        "antiquant_scale": scale,
        "antiquant_offset": offset,
        "bias": bias,
        "antiquant_group_size": 32,
    }
    y = x.double() @ dense + bias.double()
    return Call("npu_weight_quant_batchmatmul", "a2", arguments, y, torch.bfloat16)


COUNTS = (2, 0, 3)


def _grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float64 [M, N] of rows [M, K] by [E, N, K] in groups of `COUNTS`."""
    parts = torch.split(x, COUNTS)
    return torch.cat([part @ weight[e].t() for e, part in enumerate(parts)])


def _groups(**more: Any) -> dict[str, Any]:
    fixed = {"group_list": torch.tensor(COUNTS), "group_type": 0, "split_item": 2, "group_list_type": 1}
    return {**fixed, **more}


def grouped_int8() -> Call:
    x, weight = int8(M, K), int8(E, N, K)
    y = _grouped(x.double(), weight.double())
    arguments = _groups(x=[x], weight=[weight.transpose(1, 2)], output_dtype=torch.int32)
    return Call("npu_grouped_matmul", "a2", arguments, y, torch.int32)


def grouped_int8_scaled() -> Call:
    x, weight = int8(M, K), int8(E, N, K)
    scale, token = f32(E, N), f32(M)
    rows = torch.repeat_interleave(torch.arange(E), torch.tensor(COUNTS))
    y = _grouped(x.double(), weight.double()) * scale.double()[rows] * token.double().unsqueeze(1) * 2.0**-14
    token = token * 2.0**-14
    arguments = _groups(x=[x], weight=[weight.transpose(1, 2)], scale=[scale], per_token_scale=[token], output_dtype=5)
    return Call("npu_grouped_matmul", "a2", arguments, y, torch.float16)


def grouped_mxfp4() -> Call:
    x, weight, xs, ws = fp4(M, K), fp4(E, N, K), e8m0(M, 2, 2), e8m0(E, N, 2, 2)
    y = _grouped(scaled(fp4_numbers(x), xs), scaled(fp4_numbers(weight), ws))
    arguments = _groups(
        x=[x], weight=[weight.transpose(1, 2)], scale=[ws.transpose(1, 2)], per_token_scale=[xs], output_dtype=6,
        x_dtype=296, weight_dtype=296, scale_dtype=293, per_token_scale_dtype=293,
    )  # fmt: skip
    return Call("npu_grouped_matmul", "a5", arguments, y, torch.float32)


def grouped_mxfp4_a8() -> Call:
    x, weight, xs, ws = fp8(M, K), fp4(E, N, K), e8m0(M, 2, 2), e8m0(E, N, 2, 2)
    y = _grouped(scaled(x.float(), xs), scaled(fp4_numbers(weight), ws))
    arguments = _groups(
        x=[x], weight=[weight.transpose(1, 2)], antiquant_scale=[ws], per_token_scale=[xs], output_dtype=15,
        weight_dtype=296, per_token_scale_dtype=293,
    )  # fmt: skip
    return Call("npu_grouped_matmul", "a5", arguments, y, torch.bfloat16)


def grouped_weight_only() -> Call:
    x, weight = int4(M, K).to(torch.bfloat16), int4(E, N, K)
    scale = torch.exp2(torch.randint(-3, 3, (E, 4, N), generator=generator()).float()).to(torch.bfloat16)
    dense = weight.double() * scale.double().repeat_interleave(32, dim=1).transpose(1, 2)
    words = pack_int4(weight.transpose(1, 2).contiguous())
    arguments = _groups(x=[x], weight=[words], antiquant_scale=[scale], antiquant_offset=[torch.zeros_like(scale)])
    return Call("npu_grouped_matmul", "a2", arguments, _grouped(x.double(), dense), torch.bfloat16)


def grouped_mxfp4_a16() -> Call:
    """Has to be made while an emulation is on: the weight is cast to NZ and packed."""
    x, weight, ws = int4(M, K).to(torch.bfloat16), fp4(E, N, K), e8m0(E, N, 4)
    numbers = fp4_numbers(weight).float()
    wide = torch.exp2(ws.double() - 127).repeat_interleave(32, dim=-1)
    laid_out = torch.ops.npu.npu_format_cast(numbers.transpose(1, 2).contiguous(), 29, customize_dtype=torch.bfloat16)
    words = torch.ops.npu.npu_convert_weight_to_int4pack(laid_out)
    arguments = _groups(x=[x], weight=[words], antiquant_scale=[ws.transpose(1, 2).contiguous()])
    return Call("npu_grouped_matmul", "a5", arguments, _grouped(x.double(), numbers * wide), torch.bfloat16)


def grouped_int4_a8() -> Call:
    """Two groups of 256; few codes and scales of powers of two, so that sums in f16 are exact."""
    depth = 512
    x, weight = int8(M, depth), int4(E, N, depth) * (torch.arange(depth) % 64 == 0)
    scale = torch.exp2(torch.randint(-6, -4, (E, 2, N), generator=generator()).float())
    token = f32(M)
    dense = weight.double() * scale.double().repeat_interleave(256, dim=1).transpose(1, 2)
    arguments = _groups(
        x=[x], weight=[pack_int4(weight.transpose(1, 2).contiguous())], bias=[8 * dense.sum(2).float()],
        scale=[scale.view(torch.int32).to(torch.int64)], per_token_scale=[token], output_dtype=15,
    )  # fmt: skip
    y = _grouped(x.double(), dense) * token.double().unsqueeze(1)
    return Call("npu_grouped_matmul", "a2", arguments, y, torch.bfloat16)


CALLS: Mapping[str, Callable[[], Call]] = {
    "int8": int8_matmul,
    "int4": int4_matmul,
    "static": static_matmul,
    "fp8": fp8_matmul,
    "fp8-block": fp8_block_matmul,
    "mxfp8": mxfp8_matmul,
    "mxfp4": mxfp4_matmul,
    "mxfp4-a8": mxfp4_a8_matmul,
    "dual": dual_matmul,
    "weight-only": weight_only_matmul,
    "grouped-int8": grouped_int8,
    "grouped-int8-scaled": grouped_int8_scaled,
    "grouped-mxfp4": grouped_mxfp4,
    "grouped-mxfp4-a8": grouped_mxfp4_a8,
    "grouped-mxfp4-a16": grouped_mxfp4_a16,
    "grouped-int4-a8": grouped_int4_a8,
    "grouped-weight-only": grouped_weight_only,
}
