"""What the kernels that quantize activations share: how a program takes its row, e4m3 codes without units for them, and
that what follows may start.

A program holds its row in registers, as chunks of a power of two of columns: nothing is computed for columns that are
not there, as it would be with a row of 3072 in 4096. Imports triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import is_nvidia


@lru_cache(maxsize=64)
def launches_early(device: torch.device) -> bool:
    """True on NVIDIA's devices that may start a kernel before the one ahead of it has ended: from sm90 on. Not where
    Triton interprets."""
    return is_nvidia(device, (9, 0)) and not triton.knobs.runtime.interpret


@triton.jit
def release_next(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    """If EARLY, the next kernel on the stream may start once all programs have come here; where `launches_early`.

    That is for kernels launched so that they may, which wait by themselves before they take what this one writes
    (CUDA's programmatic dependent launch); others start when this one is complete.
    """
    if EARLY:
        # an operand that is not used: Triton knows no instructions without a result
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def row_values(  # type: ignore[no-untyped-def]
    x, pre, columns, k, GATED: tl.constexpr, PRE: tl.constexpr
):
    """Columns `k` of the row at `x`, in f32: silu(left half) * right half if GATED, by `pre` if PRE; 0 past its end."""
    inside = k < columns
    v = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        v = v / (1.0 + tl.exp(-v)) * tl.load(x + columns + k, mask=inside, other=0.0).to(tl.float32)
    if PRE:
        v = v * tl.load(pre + k, mask=inside, other=0.0)
    return v


@triton.jit
def e4m3_codes(magnitude):  # type: ignore[no-untyped-def]
    """int32 codes of magnitudes up to 448, to nearest even, rounded on the bits."""
    pattern = magnitude.to(tl.int32, bitcast=True)
    normal = ((pattern + 0x7FFFF + ((pattern >> 20) & 1)) >> 20) - 960
    # 2^14: its unit is 2^-9, the spacing of e4m3's subnormals
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0.015625, subnormal, normal)


@triton.jit
def saturated_codes(value, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint8 e4m3 codes of f32 numbers, saturated; NaN for NaN. HARDWARE: by the device's conversion."""
    if HARDWARE:
        code = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        absolute = tl.abs(value)
        code = e4m3_codes(tl.where(absolute > 448.0, 448.0, absolute))
        sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
        code = (tl.where(absolute != absolute, 0x7F, code) | sign).to(tl.uint8)
    return code


@dataclass(frozen=True, slots=True)
class Tile:
    """A row is held as `chunks` times `width` columns, by `warps` warps."""

    width: int
    chunks: int
    warps: int


#: columns up to which a row is held by so many warps: measured on an H200 for 1 to 4096 rows of 3072 to 12288 columns
_WARPS = ((256, 1), (512, 2), (8192, 4), (16384, 8))
_MOST_WARPS = 16
#: The device converts four numbers of a thread at once, and mixes them up where a thread has fewer.
_LEAST_WIDTH = 128


def tile_of(columns: int) -> Tile:
    """How a row of `columns` is held: a thread has 16 columns of a chunk where that leaves no rest, else 8 or fewer."""
    warps = next((warps for most, warps in _WARPS if columns <= most), _MOST_WARPS)
    width = 256 * warps
    if columns % (2 * width) == 0:
        width *= 2
    width = min(width, max(_LEAST_WIDTH, 1 << (columns - 1).bit_length()))
    return Tile(width, -(-columns // width), warps)
