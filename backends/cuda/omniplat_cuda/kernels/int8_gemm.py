"""int8 by int8 where Triton is: the kernel for a device, a number of tokens and a dtype. Imports triton."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from omniplat.portable import int8_gemm_triton
from omniplat.portable.declared import meets
from omniplat.portable.launch import is_nvidia
from omniplat_cuda.capabilities.common import GLUON

#: With as few tokens tiles of Hopper's kernel would be mostly empty.
FEW_TOKENS = 512


def int8_product(
    x: torch.Tensor,
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """As `omniplat.portable.int8_gemm_triton.int8_product`: every kernel gives the same bits."""
    m, columns = x.shape
    if m > FEW_TOKENS and out_dtype.itemsize == 2 and _has_whole_rows(codes) and is_hopper(x.device):
        from omniplat_cuda.kernels import int8_gemm_hopper

        return int8_gemm_hopper.int8_product(x, codes, x_scale, scale, bias, out_dtype)
    tile = int8_gemm_triton.tile_of(m, columns, x.device)
    return int8_gemm_triton.int8_product(x, codes, x_scale, scale, bias, out_dtype, tile)


def _has_whole_rows(codes: torch.Tensor) -> bool:
    """The copy engine takes matrices whose rows are multiples of 16 bytes: operands of int8, outputs of 16 bits."""
    return codes.shape[1] % 16 == 0 and codes.shape[0] % 8 == 0


@lru_cache(maxsize=64)
def is_hopper(device: torch.device) -> bool:
    """True on NVIDIA's sm90, whose products of warpgroups later devices do not have, where `has_gluon`."""
    return has_gluon() and is_nvidia(device, (9, 0)) and not is_nvidia(device, (10, 0))


def has_gluon() -> bool:
    """True for the releases of Triton in whose Gluon Hopper's kernels are written."""
    return meets(triton.__version__, GLUON)
