"""Rows of a quantized weight as float32, a tile at a time: never more than a few megabytes of it exist.

torch's own fp8 and fp4 conversions are scalar on CPUs, so 6- and 8-bit floats are moved bit by bit into
float16 (every code is one, up to a power of two) and 4-bit codes are looked up two at a time. All of it is
exact; the power of two that is left over is `RowDecoder.factor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from omniplat.oracle.codecs import element_values
from omniplat.scheme import TensorQuant

Tensors = Mapping[str, torch.Tensor]

#: Columns that share one entry of `scale2`.
DUAL_COLUMNS = 512

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class _HalfMove:
    """How a float code becomes float16: shift left in 8 bits, sign-extend, shift left in 16 bits, mask.

    `factor` is the power of two by which the result is too small.
    """

    in_byte: int
    in_half: int
    mask: int
    factor: float


_HALF_MOVES: tuple[tuple[str, _HalfMove], ...] = (
    ("fp8_e4m3", _HalfMove(0, 7, 0xBF80 - 0x10000, 2.0**8)),
    ("fp8_e5m2", _HalfMove(0, 8, 0, 1.0)),
    ("fp6_e2m3", _HalfMove(2, 5, 0x8F80 - 0x10000, 2.0**14)),
    ("fp6_e3m2", _HalfMove(2, 6, 0x9F00 - 0x10000, 2.0**12)),
)


@lru_cache(maxsize=8)
def _pair_table(element: str) -> torch.Tensor:
    """int64 [256]: the two float32 values of each byte, low nibble first, as one word."""
    if element == "fp4_e2m1":
        values = [*_E2M1, *(-v for v in _E2M1)]
    elif element == "int4":
        values = [float(c if c < 8 else c - 16) for c in range(16)]
    elif element in ("nf4", "fp4_bnb"):
        values = [float(value) for value in element_values(element)]
    else:
        values = [float(c) for c in range(16)]
    pairs = [values[byte & 15] for byte in range(256)], [values[byte >> 4] for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.float32).t().contiguous().view(torch.int64).reshape(256)


@lru_cache(maxsize=1)
def _e8m0_table() -> torch.Tensor:
    """float32 [256]: 2^(b-127), with 2^-127 as a subnormal and NaN for 255."""
    exact = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).to(torch.float32)
    exact[255] = torch.nan
    return exact


def e8m0_values(scale: torch.Tensor) -> torch.Tensor:
    """uint8 bytes of any shape to their float32 powers of two."""
    return _e8m0_table()[scale.to(torch.int64)]


def _to_half(codes: torch.Tensor, move: _HalfMove, half: torch.Tensor) -> torch.Tensor:
    """The values of one-byte float codes, divided by `move.factor`, as float16 in `half` (int16, same shape)."""
    byte = codes.view(torch.int8)
    half.copy_(byte << move.in_byte if move.in_byte else byte)
    half.bitwise_left_shift_(move.in_half)
    if move.mask:
        half.bitwise_and_(move.mask)
    return half.view(torch.float16)


def scale_values(scale: torch.Tensor, quant: TensorQuant) -> torch.Tensor:
    """Stored scales as float32 multipliers."""
    if quant.scale_format == "e8m0" and scale.dtype == torch.uint8:
        return e8m0_values(scale)
    if quant.scale_format == "e4m3" and scale.element_size() == 1:
        move = dict(_HALF_MOVES)["fp8_e4m3"]
        return _to_half(scale, move, torch.empty(scale.shape, dtype=torch.int16)).to(torch.float32).mul_(move.factor)
    return scale.to(torch.float32)


def is_exact_in_bf16(quant: TensorQuant, codes: torch.dtype) -> bool:
    """True where every dequantized value is a bf16 number: bf16 itself, and few bits times a power of two."""
    if quant.element == "bf16":
        return codes == torch.bfloat16
    return quant.scale_format == "e8m0" and quant.granularity == "group" and not quant.second_scale


def tile_rows(columns: int, quant: TensorQuant) -> int:
    """Rows decoded at a time: about 4 MiB of float32, whole blocks of a block-scaled weight."""
    rows = max(16, (1 << 20) // max(columns, 1))
    unit = quant.block[0] if quant.granularity == "block" else 16
    return max(unit, rows // unit * unit)


class RowDecoder:
    """Decodes rows of one canonical weight [N, K] into a tile that it owns and reuses.

    `factor` (float) and `row_scale` (f32 [N] or None) are what the tile's values still have to be multiplied
    by: w = tile * row_scale[:, None] * factor. They are cheaper to apply to a product than to a weight.
    """

    def __init__(self, quant: TensorQuant, tensors: Tensors, columns: int) -> None:
        self._quant = quant
        self._tensors = tensors
        self._columns = columns
        self.codes = tensors["codes"]
        self.rows = self.codes.shape[0]
        self.tile = min(tile_rows(columns, quant), max(self.rows, 1))
        moves = dict(_HALF_MOVES)
        self._move = moves.get(quant.element)
        self.factor = self._move.factor if self._move else 1.0
        if quant.is_integer and quant.scale_format == "e8m0":
            self.factor = 2.0 ** -(quant.bits - 2)
        self._scaled_in_tile = quant.granularity in ("group", "block")
        self.row_scale = self._row_scale()
        size = self.tile * columns
        self._out = torch.empty(0 if self.is_float32 else size, dtype=torch.float32)
        self._half = torch.empty(size if self._move else 0, dtype=torch.int16)
        self._index = torch.empty(size // 2 if quant.bits == 4 else 0, dtype=torch.int32)
        group_index = tensors.get("group_index")
        self._group_index = group_index.to(torch.int64) if group_index is not None else None

    @property
    def is_float32(self) -> bool:
        """True where the stored weight is float32 and needs no decoding at all."""
        return self._quant.element == "bf16" and self.codes.dtype == torch.float32

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        """float32 [stop - start, K]; overwritten by the next call. `start` must be a multiple of `tile`."""
        out = self._out[: (stop - start) * self._columns].view(stop - start, self._columns)
        self._decode(self.codes[start:stop], out)
        if self._quant.element == "bf16":
            return out
        zero_point = self._tensors.get("zero_point")
        if zero_point is not None:
            self._apply(out, zero_point[start:stop].to(torch.float32), subtract=True)
        if self._quant.granularity == "block":
            self._apply_blocks(out, start, stop)
        elif self._quant.granularity == "group":
            self._apply(out, scale_values(self._tensors["scale"][start:stop], self._quant))
        if "scale2" in self._tensors:
            per_512 = self._tensors["scale2"][start:stop].to(torch.float32)
            whole = self._columns // DUAL_COLUMNS * DUAL_COLUMNS
            groups = whole // DUAL_COLUMNS
            out[:, :whole].view(out.shape[0], groups, DUAL_COLUMNS).mul_(per_512[:, :groups, None])
            if whole < self._columns:
                # the last of 512 may be partial
                out[:, whole:].mul_(per_512[:, -1:])
        return out

    def _row_scale(self) -> torch.Tensor | None:
        if self._quant.element == "bf16":
            return None
        scale = None if self._scaled_in_tile else scale_values(self._tensors["scale"], self._quant).reshape(-1)
        if "global_scale" in self._tensors:
            glob = self._tensors["global_scale"].to(torch.float32).reshape(-1)
            scale = glob if scale is None else scale * glob
        return scale

    def _decode(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        quant = self._quant
        if quant.bits == 4:
            index = self._index[: codes.numel()]
            index.copy_(codes.reshape(-1))
            torch.index_select(_pair_table(quant.element), 0, index, out=out.view(-1).view(torch.int64))
        elif self._move is not None:
            half = self._half[: codes.numel()].view(codes.shape)
            out.copy_(_to_half(codes, self._move, half))
        elif quant.element.startswith("int"):
            out.copy_(codes.view(torch.int8))
        else:
            out.copy_(codes)

    def _apply(self, out: torch.Tensor, values: torch.Tensor, *, subtract: bool = False) -> None:
        """Multiply `out` [r, K] by (or subtract) `values` [r, 1 | G]."""
        if values.shape[1] == 1:
            target, operand = out, values
        elif self._group_index is not None:
            target, operand = out, values.index_select(1, self._group_index)
        else:
            target, operand = out.view(out.shape[0], values.shape[1], -1), values.unsqueeze(-1)
        if subtract:
            target.sub_(operand)
        else:
            target.mul_(operand)

    def _apply_blocks(self, out: torch.Tensor, start: int, stop: int) -> None:
        rows, columns = self._quant.block
        scale = scale_values(self._tensors["scale"][start // rows : -(-stop // rows)], self._quant)
        per_column = scale.repeat_interleave(columns, dim=1)[:, : self._columns]
        for block in range(scale.shape[0]):
            out[block * rows : (block + 1) * rows].mul_(per_column[block])
