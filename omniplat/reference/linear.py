"""Linear layers in float32: `y = x^ @ W^T + bias`, where x^ is x after the declared activation quantization.

Products are accumulated in float32 (`matmul_tiles`) or, for integer codes on both sides, exactly in int32
(`matmul_int8`). The result is rounded once, to the output dtype.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from omniplat.reference.activations import Quantized, quantize_activation
from omniplat.reference.decode import RowDecoder, Tensors, is_exact_in_bf16
from omniplat.scheme import Scheme

#: From this many rows on, a bf16 product gains more than converting the weight's tiles once more costs.
ROWS_FOR_BF16 = 8

#: Below this every sum of products of integers is exact in float32, in any order.
EXACT_FLOAT32 = 1 << 24

#: Codes that are summed at once to learn how large sums get: bounds what that needs beside the weight.
_SUMMED = 1 << 14


def linear(
    x: torch.Tensor,
    scheme: Scheme,
    tensors: Tensors,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    splits: int = 0,
) -> torch.Tensor:
    """`x` [M, K] to [M, N] in `out_dtype`.

    `splits` > 0: both sides are integers, multiplied exactly; the number of pieces of K whose products of codes
    are exact in float32. 0: everything else.
    """
    if x.shape[0] == 0 or tensors["codes"].shape[0] == 0:
        return x.new_zeros((x.shape[0], tensors["codes"].shape[0]), dtype=out_dtype)
    in_bf16 = not splits and x.dtype == out_dtype == torch.bfloat16 and runs_in_bf16(scheme, tensors["codes"], bias)
    if in_bf16 and scheme.is_unquantized:
        return F.linear(x, tensors["codes"], bias)
    return multiply(quantize_input(x, scheme, tensors), scheme, tensors, bias, splits, out_dtype, in_bf16=in_bf16)


def quantize_input(x: torch.Tensor, scheme: Scheme, tensors: Tensors) -> Quantized:
    """`x` [M, K], M > 0, as the layer sees it: smoothed, transformed, then quantized as the scheme says."""
    values = x.to(torch.float32)
    if "pre_scale" in tensors:
        values = values * tensors["pre_scale"]
    if scheme.is_transformed:
        matrices = values.view(-1, *scheme.transform) @ tensors["right_transform"]
        values = (tensors["left_transform"].t() @ matrices).reshape(values.shape)
    return quantize_activation(values, scheme.activation, tensors)


def multiply(
    x: Quantized,
    scheme: Scheme,
    tensors: Tensors,
    bias: torch.Tensor | None,
    splits: int,
    out_dtype: torch.dtype,
    *,
    in_bf16: bool = False,
) -> torch.Tensor:
    """The product with the weight, plus bias: [M, N] in `out_dtype`, M > 0. `splits` as in `linear`.

    `in_bf16` (see `runs_in_bf16`) only for an input of bf16 numbers and an output in bf16.
    """
    if in_bf16 and scheme.weight.element == "bf16":
        return F.linear(x.dequantized().to(torch.bfloat16), tensors["codes"], bias)
    if in_bf16 and x.values.shape[0] >= ROWS_FOR_BF16:
        decoder = RowDecoder(scheme.weight, tensors, x.values.shape[1])
        return matmul_bf16(x.values.to(torch.bfloat16), decoder, bias)
    if splits:
        y = matmul_int8(x, tensors["codes"], splits)
        y.mul_(tensors["scale"].to(torch.float32).reshape(1, -1))
    else:
        decoder = RowDecoder(scheme.weight, tensors, x.values.shape[1])
        y = matmul_tiles(x.values, decoder)
        if decoder.row_scale is not None:
            y.mul_(decoder.row_scale)
        if decoder.factor != 1.0:
            y.mul_(decoder.factor)
    if x.scale is not None:
        y.mul_(x.scale)
    if bias is not None:
        y.add_(bias)
    return y.to(out_dtype)


def matmul_tiles(x: torch.Tensor, decoder: RowDecoder) -> torch.Tensor:
    """`x` f32 [M, K] times the rows of `decoder`, a tile at a time: f32 [M, N]."""
    if decoder.is_float32:
        return x @ decoder.codes.t()
    y = x.new_empty((x.shape[0], decoder.rows))
    for start in range(0, decoder.rows, decoder.tile):
        stop = min(start + decoder.tile, decoder.rows)
        torch.mm(x, decoder(start, stop).t(), out=y[:, start:stop])
    return y


def matmul_bf16(x: torch.Tensor, decoder: RowDecoder, bias: torch.Tensor | None) -> torch.Tensor:
    """As `matmul_tiles` with bf16 operands and a bf16 result, accumulated in float32 and rounded once.

    `bias` is bf16 [N]: oneDNN adds it before it rounds. The decoder's factor is a power of two, so it may be
    applied after the rounding.
    """
    if bias is not None:
        bias = bias * (1.0 / decoder.factor)
    y = x.new_empty((x.shape[0], decoder.rows))
    buffer = x.new_empty((decoder.tile, x.shape[1]))
    for start in range(0, decoder.rows, decoder.tile):
        stop = min(start + decoder.tile, decoder.rows)
        weights = buffer[: stop - start].copy_(decoder(start, stop))
        y[:, start:stop] = F.linear(x, weights, bias[start:stop] if bias is not None else None)
    return y.mul_(decoder.factor) if decoder.factor != 1.0 else y


def matmul_int8(x: Quantized, codes: torch.Tensor, splits: int) -> torch.Tensor:
    """Integer codes times integer codes, exactly: f32 [M, N] (rounded once where a sum passes 2^24)."""
    columns = codes.shape[1]
    if columns % 16 == 0 and int_mm_is_exact():
        return torch._int_mm(x.values.to(torch.int8), codes.view(torch.int8).t()).to(torch.float32)
    rows = codes.shape[0]
    y = x.values.new_empty((x.values.shape[0], rows))
    step = -(-columns // splits)
    tile = max(16, min(rows, (1 << 20) // step))
    buffer = torch.empty(tile * step, dtype=torch.float32)
    for start in range(0, rows, tile):
        part = codes[start : start + tile].view(torch.int8)
        total: torch.Tensor | None = None
        for k in range(0, columns, step):
            piece = part[:, k : k + step]
            weights = buffer[: piece.numel()].view(piece.shape)
            weights.copy_(piece)
            product = x.values[:, k : k + step] @ weights.t()
            if splits > 1:
                exact = product.to(torch.int32)
                total = exact if total is None else total.add_(exact)
            else:
                total = product
        assert total is not None
        y[:, start : start + tile] = total
    return y


def splits_for(codes: torch.Tensor, largest_input: int) -> int:
    """Pieces into which K must be cut so that every sum |x * code| stays below 2^24. `codes` int8 [N, K]."""
    rows, columns = codes.shape
    signed = codes.view(torch.int8)
    tile = max(_SUMMED // max(columns, 1), 1)
    # one buffer for all: many small ones would spread over the heap, which then holds more than the weight
    buffer = torch.empty(tile * columns, dtype=torch.int64)
    for splits in range(1, columns + 1):
        step = -(-columns // splits)
        if step * 128 * largest_input < EXACT_FLOAT32:
            return splits
        worst = 0
        for start in range(0, rows, tile):
            for k in range(0, columns, step):
                piece = signed[start : start + tile, k : k + step]
                magnitudes = buffer[: piece.numel()].view(piece.shape).copy_(piece).abs_()
                worst = max(worst, int(magnitudes.sum(1).max()))
        if worst * largest_input < EXACT_FLOAT32:
            return splits
    return max(columns, 1)


@lru_cache(maxsize=1)
def int_mm_is_exact() -> bool:
    """True where this CPU's int8 matrix product does not saturate.

    Without VNNI, oneDNN multiplies pairs of int8 into int16 and saturates: silently wrong for large codes. So
    the question is put to the hardware, with the codes that would saturate, in the shapes of its code paths.
    """
    for m in (1, 3, 64):
        for x_code, w_code in ((127, 127), (-128, -128), (127, -128)):
            x = torch.full((m, 256), x_code, dtype=torch.int8)
            w = torch.full((48, 256), w_code, dtype=torch.int8)
            try:
                product = torch._int_mm(x, w.t())
            except (RuntimeError, NotImplementedError):
                return False
            if not bool((product == 256 * x_code * w_code).all()):
                return False
    return True


@lru_cache(maxsize=1)
def has_bf16_units() -> bool:
    """True where bf16 matrix products run in hardware (AVX512-BF16 or AMX) and accumulate in float32."""
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if probe is None or "512" not in torch.backends.cpu.get_cpu_capability():
        return False
    return bool(probe() and torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def runs_in_bf16(scheme: Scheme, codes: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """True where a product of bf16 numbers differs in the order of its sums only, and the CPU has units for it.

    Every operand is a bf16 number then, provided that the input is one before it is quantized.
    """
    bf16, activation = torch.bfloat16, scheme.activation
    return (
        not scheme.pre_scale
        and not scheme.is_transformed
        and (bias is None or bias.dtype == bf16)
        and is_exact_in_bf16(scheme.weight, codes.dtype)
        and (activation is None or is_exact_in_bf16(activation, bf16))
        and has_bf16_units()
    )
