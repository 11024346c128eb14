"""Numbers of the OCP microscaling formats in plain torch: e8m0 bytes, e2m1 codes, nibbles. No vendor's rule.

Rules for scales and rounding differ between vendors, and are with each vendor's emulator.
"""

from __future__ import annotations

import torch

#: Magnitudes of e2m1 codes 0 to 7, and the midpoints between neighbours.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def e8m0_values(scale: torch.Tensor) -> torch.Tensor:
    """uint8 or float8_e8m0fnu bytes to f32 multipliers: 2^(b - 127), NaN for 255."""
    exponent = scale.view(torch.uint8).to(torch.int32)
    # 2^-127 is subnormal in f32.
    values = torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)
    return torch.where(exponent == 255, torch.nan, values)


def exponent_field(values: torch.Tensor) -> torch.Tensor:
    """The biased exponent of f32 `values`, int32: the byte that stands for their power of two, rounded down."""
    return (values.contiguous().view(torch.int32) >> 23) & 0xFF


def exponent_above(values: torch.Tensor) -> torch.Tensor:
    """As `exponent_field`, rounded up where `values` are no powers of two; 255 stays 255."""
    bits = values.contiguous().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    return torch.where(((bits & 0x7FFFFF) != 0) & (exponent < 255), exponent + 1, exponent)


def e2m1_codes(values: torch.Tensor, rounding: str) -> torch.Tensor:
    """f32 `values` to e2m1 codes, uint8, saturating at 6.

    `rounding`: "nearest-even", or "half-down" where a value in the middle goes to the smaller magnitude.
    """
    magnitude = values.abs().clamp(max=E2M1[-1])
    codes = torch.zeros(values.shape, dtype=torch.uint8)
    for index, middle in enumerate(MIDPOINTS):
        # In the middle above an odd code the next one is even.
        above = magnitude >= middle if rounding == "nearest-even" and index % 2 else magnitude > middle
        codes += above.to(torch.uint8)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """e2m1 codes, uint8, one a byte, to f32."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float32)
    return table[codes.to(torch.int64)]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., K], one a byte, to [..., K/2]: the even index in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`, of any one-byte dtype: uint8 [..., K]."""
    held = packed.contiguous().view(torch.uint8)
    return torch.stack((held & 0xF, held >> 4), dim=-1).flatten(-2)


def in_groups(values: torch.Tensor, groups: int) -> torch.Tensor:
    """[..., K] as [..., groups, K / groups]."""
    return values.reshape(*values.shape[:-1], groups, values.shape[-1] // groups)


def scaled_groups(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """f32 [..., K] times f32 scales [..., G] of K/G values each."""
    return (in_groups(values, scale.shape[-1]) * scale.unsqueeze(-1)).flatten(-2)
