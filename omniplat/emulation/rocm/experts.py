"""AITER's fused experts: stage 1, the activation, requantizing, stage 2, as its own torch reference computes them.

From aiter/fused_moe.py of ROCm/aiter at e4048607 (`fused_moe`, `torch_moe_stage1`, `torch_moe_stage2`). Between the
stages values are rounded to the output's dtype before they are quantized again.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
import torch.nn.functional as F
from packaging.version import Version

from omniplat.emulation.core import Emulation
from omniplat.emulation.microscaling import e2m1_values, e8m0_values, scaled_groups, unpack_nibbles
from omniplat.emulation.rocm.layouts import (
    padded_scales,
    separate_gate_up,
    unshuffle_scale_bytes,
    unshuffle_weight_bytes,
)
from omniplat.emulation.rocm.quantizers import fp8_dtype, mxfp4, mxfp8, per_token, rule_of

_HALF = (torch.float16, torch.bfloat16)
_FP4 = torch.float4_e2m1fn_x2
_BLOCK = 128
#: From this release on fused_moe takes fp8 weights per_1x32.
MXFP8_FROM = Version("0.1.17")


class QuantType(Enum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


class ActivationType(Enum):
    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


def fused_moe(
    emulation: Emulation,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None = None,
    activation: ActivationType = ActivationType.Silu,
    quant_type: QuantType = QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_size_M: int | None = None,
    num_local_tokens: torch.Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    splitk: int = 0,
    swiglu_limit: float | None = None,
    gate_mode: str = "separated",
) -> torch.Tensor:
    """`hidden_states` [M, K] through w1 [E, 2I, K] (gate first) and w2 [E, K, I], both in tiles of (16, 16).

    Scales: f32 [E, N, 1] per token; f32 [E, N/128, K/128] for blocks; e8m0 [E * N, K/32], shuffled, for fp4 and, from
    0.1.17 on, for fp8. With these last, gate and up rows of w1 lie in turns (`shuffle_weight_a16w4`), which `gate_mode`
    must say: their kernels exist in that layout only.
    """
    op = "aiter.fused_moe"
    plain = a1_scale is None and a2_scale is None and num_local_tokens is None and not doweight_stage1
    emulation.require(op, plain, "only plain calls are emulated")
    emulation.require(op, activation == ActivationType.Silu, f"{activation} is not emulated")
    out_dtype = dtype or hidden_states.dtype
    emulation.require(op, out_dtype in _HALF, f"Fused_moe unsupported out dtype: {out_dtype}")
    emulation.require(op, topk_ids.dtype == torch.int32, f"topk_ids is read as int32, found {topk_ids.dtype}")
    emulation.require(op, topk_weight.dtype == torch.float32, f"topk_weight is f32, found {topk_weight.dtype}")
    packed = 2 if w1.dtype == _FP4 else 1
    inner, hidden = w2.shape[2] * packed, w1.shape[2] * packed
    emulation.require(op, w1.shape[1] == 2 * inner, f"Invalid MoE weight: {list(w1.shape)} {list(w2.shape)}")
    emulation.require(op, hidden_states.shape[1] == hidden, f"hidden_states is {list(hidden_states.shape)}")
    for bias in (bias1, bias2):
        if bias is not None:
            if bias.dtype != torch.float32:
                raise TypeError(f"MoE bias must be fp32, got {bias.dtype}")
            emulation.record(op, "bias-dropped", "the two-stage kernels of CK have no bias, and drop it")
    if not all(getattr(weight, "is_shuffled", False) for weight in (w1, w2)):
        emulation.record(op, "not-marked-shuffled", "weights without `is_shuffled` may be read in another layout")
    how = _Quantization(emulation, op, quant_type, w1.dtype, inner, hidden)
    if (gate_mode == "interleave") != how.is_mxfp8:
        emulation.require(op, how.is_mxfp8, f"gate_mode={gate_mode!r} is emulated for fp8 per_1x32 only")
        emulation.record(op, "gate-mode", "the kernels of fp8 per_1x32 read gate and up in turns, whatever is said")
    local = _local_ids(emulation, op, topk_ids, w1.shape[0], expert_mask)
    first = how.weights(w1, w1_scale, "w1_scale", in_turns=how.is_mxfp8)
    second = how.weights(w2, w2_scale, "w2_scale")
    x = how.dequantized_input(hidden_states)
    y = torch.zeros((x.shape[0], w2.shape[1]), dtype=torch.float32)
    for expert in range(w1.shape[0]):
        rows, slots = torch.nonzero(local == expert, as_tuple=True)
        if not rows.numel():
            continue
        gate, up = (x[rows] @ first(expert).t()).chunk(2, dim=1)
        if swiglu_limit:
            gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
        middle = how.dequantized_input((F.silu(gate) * up).to(out_dtype))
        y.index_add_(0, rows, (middle @ second(expert).t()) * topk_weight[rows, slots].unsqueeze(1))
    return y.to(out_dtype)


def _local_ids(
    emulation: Emulation, op: str, topk_ids: torch.Tensor, experts: int, mask: torch.Tensor | None
) -> torch.Tensor:
    """Index of each chosen expert among the weights, -1 where the mask leaves it out."""
    count = experts if mask is None else mask.numel()
    if bool(((topk_ids < 0) | (topk_ids >= count)).any()):
        emulation.record(op, "id-out-of-range", f"ids reach from {int(topk_ids.min())} to {int(topk_ids.max())}")
    ids = topk_ids.clamp(0, count - 1).to(torch.int64)
    if mask is None:
        return ids
    emulation.require(op, mask.dtype == torch.int32, f"expert_mask is int32, found {mask.dtype}")
    emulation.require(op, int(mask.sum()) == experts, f"expert_mask marks {int(mask.sum())} of {experts} experts")
    index = torch.where(mask > 0, mask.cumsum(0) - 1, -1)
    return index[ids]


class _Quantization:
    """How one call quantizes: chosen by `quant_type` and the weights' dtype."""

    def __init__(
        self, emulation: Emulation, op: str, kind: QuantType, dtype: torch.dtype, inner: int, hidden: int
    ) -> None:
        self._emulation, self._op = emulation, op
        self._kind = QuantType.per_1x128 if kind == QuantType.per_128x128 else kind
        self._dtype = dtype
        own = fp8_dtype(emulation.arch)
        known = {
            QuantType.per_Token: (own, torch.int8),
            QuantType.per_1x128: (own,),
            QuantType.per_1x32: (_FP4,) if emulation.arch == "gfx950" else (),
        }
        if emulation.arch == "gfx950" and emulation.version >= MXFP8_FROM:
            known[QuantType.per_1x32] = (_FP4, own)
        emulation.require(op, dtype in known.get(self._kind, ()), f"{kind} with weights of {dtype} on {emulation.arch}")
        if dtype == _FP4:
            emulation.require(op, inner % 256 == 0, f"I = {inner} is no multiple of 256")
        self.is_mxfp8 = self._kind == QuantType.per_1x32 and dtype == own
        if self.is_mxfp8:
            emulation.require(op, hidden % 256 == 0, f"K = {hidden} is no multiple of 256, the tile of stage 1")
            emulation.require(op, inner % 128 == 0, f"I = {inner} is no multiple of 128, the tile of stage 2")

    def weights(
        self, weight: torch.Tensor, scale: torch.Tensor | None, name: str, in_turns: bool = False
    ) -> Callable[[int], torch.Tensor]:
        """Expert -> f32 [N, K]. `in_turns`: gate and up rows lie in turns, and their scales are not padded."""
        experts, rows, columns = weight.shape
        need, op = self._emulation.require, self._op
        need(op, scale is not None, f"{name} is missing")
        assert scale is not None
        need(op, rows % 16 == 0 and columns % 32 == 0, "a shuffled weight has whole tiles")
        codes = unshuffle_weight_bytes(weight.contiguous().view(torch.uint8))
        if in_turns:
            codes = separate_gate_up(codes)
        if self._kind == QuantType.per_1x32:
            groups = columns * (2 if self._dtype == _FP4 else 1) // 32
            wanted = (experts * rows, groups) if in_turns else padded_scales(experts * rows, groups)
            need(op, scale.element_size() == 1, f"{name} is e8m0, found {scale.dtype}")
            need(op, tuple(scale.shape) == wanted, f"{name} is {list(scale.shape)}, needs {list(wanted)}")
            plain = unshuffle_scale_bytes(scale.view(torch.uint8), experts * rows, groups)
            factors = e8m0_values(plain.contiguous()).view(experts, rows, groups)
            if in_turns:
                factors = separate_gate_up(factors)
            return lambda expert: scaled_groups(self._elements(codes[expert]), factors[expert])
        need(op, scale.dtype == torch.float32, f"{name} is f32, found {scale.dtype}")
        values = codes.view(self._dtype)
        if self._kind == QuantType.per_Token:
            need(op, scale.numel() == experts * rows, f"{name} is {list(scale.shape)}, needs one per row")
            per_row = scale.reshape(experts, rows, 1)
            return lambda expert: values[expert].to(torch.float32) * per_row[expert]
        blocks = (experts, rows // _BLOCK, columns // _BLOCK)
        need(op, tuple(scale.shape) == blocks, f"{name} is {list(scale.shape)}, needs {list(blocks)}")
        return lambda expert: (
            values[expert].to(torch.float32) * scale[expert].repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
        )

    def _elements(self, codes: torch.Tensor) -> torch.Tensor:
        """Bytes of MX codes to f32."""
        if self._dtype == _FP4:
            return e2m1_values(unpack_nibbles(codes))
        return codes.view(self._dtype).to(torch.float32)

    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        """f32 [M, K], as the products see `x`."""
        if self._kind == QuantType.per_1x32:
            codes, scale = mxfp8(x) if self.is_mxfp8 else mxfp4(x, rule_of(self._emulation))
            return scaled_groups(self._elements(codes), e8m0_values(scale))
        rows, columns = x.shape
        groups = x.reshape(-1, _BLOCK) if self._kind == QuantType.per_1x128 else x
        quantized, scale = per_token(groups, self._dtype)
        return (quantized.to(torch.float32) * scale).reshape(rows, columns)
