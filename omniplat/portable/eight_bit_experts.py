"""Layers of experts whose weights and inputs are both in codes of 8 bits: fp8 in blocks, fp8 and int8 by whole rows.

The kernels differ in the weights that they take; `omniplat::eight_bit_experts` is the operator of all: Triton's form on
CUDA, plain torch elsewhere, which writes experts out one after the other and is there for tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.portable.decoded import FP8_BLOCKS, FP8_ROWS, INT8_ROWS
from omniplat.portable.eight_bits import (
    as_numbers,
    block_rows_of,
    coded_tensors,
    quantized,
    represented_codes,
    why_not,
)
from omniplat.portable.gated import quantize_gated
from omniplat.portable.quantize import has_triton
from omniplat.portable.routing import sort_by_expert, weighted_sum
from omniplat.runtime.activate import activate
from omniplat.runtime.kernel import MoeKernel, Prepared
from omniplat.runtime.operators import experts_fake, new_library, register
from omniplat.runtime.quant_text import decode_quant, encode_quant
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import TensorQuant

if TYPE_CHECKING:
    from omniplat.portable.scaled_product_triton import Tile
    from omniplat.portable.weight_only_triton import ExpertTiles

_ROLES = frozenset({"codes", "scale", "bias"})
#: Buffers of one weight, in the order in which the operator takes them.
_BUFFERS = ("codes", "scale", "bias")
_LIBRARY = new_library()


@dataclass(frozen=True, slots=True)
class EightBitExpertsConfig:
    """`first` and `second` are the TensorQuants of w13's and w2's input, as JSON; blocks of the weights are `w13_rows`
    and `w2_rows` high, 0 where whole rows have a scale."""

    first: str
    second: str
    w13_rows: int
    w2_rows: int
    limit: float
    alpha: float


class EightBitExperts(MoeKernel[EightBitExpertsConfig]):
    """Buffers: `w13_codes` [E, 2I, K] and `w2_codes` [E, K, I], uint8 (bytes of e4m3fn) or int8; `w13_scale` and
    `w2_scale` f32, of rows [E, N] or of blocks [E, ceil(N/bn), ceil(K/128)]; `w13_bias` and `w2_bias` where there are.

    While a call lasts it takes, for R pairs of a token and an expert, the codes of R * I and M * K numbers with their
    scales, and R * (2I + K) numbers of the input's dtype.
    """

    config_type = EightBitExpertsConfig
    weights: ClassVar[tuple[str, ...]]

    def prepare(self, w13: WeightTensors, w2: WeightTensors, spec: LayerSpec) -> Prepared[EightBitExpertsConfig]:
        """Raises UnsupportedCombinationError for other schemes, InvalidCheckpointError for NaN codes."""
        tensors: dict[str, torch.Tensor] = {}
        quants = []
        for role, weight in (("w13", w13), ("w2", w2)):
            if reason := why_not(weight, self.weights, _ROLES):
                raise UnsupportedCombinationError(
                    "portable", spec.op, weight.scheme.id, [spec.name], [f"{self.name}  needs {reason}"]
                )
            held = coded_tensors(weight, f"{spec.name}.{role}")
            if "bias" in weight.tensors:
                held["bias"] = weight.tensors["bias"].contiguous()
            tensors |= {f"{role}_{name}": tensor for name, tensor in held.items()}
            assert weight.scheme.activation is not None
            quants.append(encode_quant(weight.scheme.activation))
        assert spec.moe is not None
        first, second = quants
        rows = (block_rows_of(w13), block_rows_of(w2))
        return Prepared(tensors, EightBitExpertsConfig(first, second, *rows, spec.moe.limit, spec.moe.alpha))

    def apply(
        self,
        config: EightBitExpertsConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        activation: str,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        w13, w2 = ([tensors.get(f"{role}_{name}") for name in _BUFFERS] for role in ("w13", "w2"))
        y: torch.Tensor = torch.ops.omniplat.eight_bit_experts(
            x,
            topk_ids,
            topk_weights,
            expert_map,
            *w13,
            *w2,
            config.w13_rows,
            config.w2_rows,
            config.first,
            config.second,
            activation,
            config.limit,
            config.alpha,
            out_dtype,
        )
        return y


class PortableFp8BlockExperts(EightBitExperts):
    """Products of 128 columns are summed up in what FP8 units keep, then scaled and added up in f32."""

    name: ClassVar[str] = "portable_moe_fp8_block"
    weights: ClassVar[tuple[str, ...]] = FP8_BLOCKS


class PortableFp8Experts(EightBitExperts):
    """Sums are kept in the 22 bits of the FP8 units."""

    name: ClassVar[str] = "portable_moe_fp8"
    weights: ClassVar[tuple[str, ...]] = FP8_ROWS


class PortableInt8Experts(EightBitExperts):
    """Sums are exact, in int32."""

    name: ClassVar[str] = "portable_moe_int8"
    weights: ClassVar[tuple[str, ...]] = INT8_ROWS


@dataclass(frozen=True, slots=True)
class _Weight:
    """Codes, scale and bias of all experts."""

    codes: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    block_rows: int


@dataclass(frozen=True, slots=True)
class _Middle:
    """What lies between the two products: the activation, and how its values are quantized."""

    quant: TensorQuant
    activation: str
    limit: float
    alpha: float


def _experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_bias: torch.Tensor | None,
    w13_rows: int,
    w2_rows: int,
    first: str,
    second: str,
    activation: str,
    limit: float,
    alpha: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if not len(x):
        return x.new_empty(x.shape, dtype=out_dtype)
    up, down = _Weight(w13, w13_scale, w13_bias, w13_rows), _Weight(w2, w2_scale, w2_bias, w2_rows)
    middle = _Middle(decode_quant(second), activation, limit, alpha)
    x_codes, x_scale = quantized(x, decode_quant(first), None)
    if x.is_cuda and has_triton():
        from omniplat.portable.experts_triton import combine, tokens_of
        from omniplat.portable.routing_triton import sort_in_tiles
        from omniplat.portable.scaled_product_triton import tile_of_experts

        tile = tile_of_experts(tokens_of(topk_ids.numel(), len(w13), x.device))
        order, tiles = sort_in_tiles(topk_ids, expert_map, len(w13), tile.tokens)
        out = _in_triton(x_codes, x_scale, x.dtype, tile, tiles, up, middle, down)
        return combine(out, order.place, topk_weights, order.ends[-1:], out_dtype)
    order = sort_by_expert(topk_ids, expert_map, len(w13))
    both = _by_expert(x_codes[order.rows], x_scale[:, order.rows], up, order.ends)
    out = _by_expert(*_activated(both.to(x.dtype), middle), down, order.ends)
    return weighted_sum(out, order.place, topk_weights, order.ends[-1:], out_dtype)


def _in_triton(
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
    tile: Tile,
    tiles: ExpertTiles,
    up: _Weight,
    middle: _Middle,
    down: _Weight,
) -> torch.Tensor:
    """What the experts make of the rows of `tiles`, [R, K] in `dtype`; rows of no expert hold anything."""
    from omniplat.portable.experts_triton import in_place
    from omniplat.portable.scaled_product_triton import scaled_product

    def product(codes: torch.Tensor, scale: torch.Tensor, weight: _Weight, tiles: ExpertTiles) -> torch.Tensor:
        y = torch.empty((len(tiles.rows), weight.codes.shape[1]), dtype=dtype, device=codes.device)
        a, b = as_numbers(codes), as_numbers(weight.codes)
        scaled_product(a, b, scale, weight.scale, weight.bias, y, weight.block_rows, tile, tiles)
        return y

    both = product(x_codes, x_scale, up, tiles)
    return product(*_activated(both, middle), down, in_place(tiles))


def _activated(both: torch.Tensor, middle: _Middle) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [R, I] and multipliers [G, R] of what w2 sees of gate and up, `both` [R, 2I]."""
    quant = middle.quant
    in_one_pass = middle.activation == "silu" and not middle.limit and quant.scale_format in ("f32", "e8m0")
    if in_one_pass and both.is_cuda and has_triton():
        codes, scale = quantize_gated(both, quant)
        return codes, scale if quant.granularity == "group" else scale.view(1, -1)
    gate, up = both.to(torch.float32).chunk(2, dim=1)
    values = activate(gate, up, middle.activation, middle.limit, middle.alpha)
    return quantized(values.to(both.dtype), quant, None)


def _by_expert(codes: torch.Tensor, scale: torch.Tensor, weight: _Weight, ends: torch.Tensor) -> torch.Tensor:
    """Rows up to ends[e] by the weight of expert e, f32 [R, N]; rows beyond the last end are NaN."""
    x = represented_codes(codes, scale.t(), min(1, weight.block_rows))
    y = torch.full((len(codes), weight.codes.shape[1]), torch.nan, device=codes.device)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        held = represented_codes(weight.codes[expert], weight.scale[expert], weight.block_rows)
        bias = None if weight.bias is None else weight.bias[expert].to(torch.float32)
        y[start:end] = F.linear(x[start:end], held, bias)
        start = end
    return y


register(
    _LIBRARY,
    "eight_bit_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, Tensor w13, "
    "Tensor w13_scale, Tensor? w13_bias, Tensor w2, Tensor w2_scale, Tensor? w2_bias, int w13_rows, int w2_rows, "
    "str first, str second, str activation, float limit, float alpha, ScalarType out_dtype) -> Tensor",
    dict.fromkeys(("CUDA", "CPU"), _experts),
    experts_fake,
)
