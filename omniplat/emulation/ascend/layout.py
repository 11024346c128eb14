"""Where a tensor's bytes lie: the NZ format, and what the operators see of strides.

On the device the format belongs to the storage: views have it too, and a copy (`.to()`, `.clone()`, `.contiguous()`)
is plain again. The mark here is on the storage as well, and the bytes stay as they are: NZ keeps values and shape.
"""

from __future__ import annotations

import torch

from omniplat.emulation.core import Emulation

ND = 2
FRACTAL_NZ = 29
_ATTRIBUTE = "omniplat_npu_format"
#: No axis of a matrix that a matmul reads may be longer.
LONGEST_AXIS = 65535
_CARRIERS = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def npu_format(tensor: torch.Tensor) -> int:
    """ND or FRACTAL_NZ."""
    return int(getattr(tensor.untyped_storage(), _ATTRIBUTE, ND))


def is_nz(tensor: torch.Tensor) -> bool:
    return npu_format(tensor) == FRACTAL_NZ


def format_cast(
    emulation: Emulation,
    input: torch.Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> torch.Tensor:
    """npu_format_cast to ND (2) or FRACTAL_NZ (29): values and shape stay.

    8-bit floats and packed fp4 need `customize_dtype`, which says what the bytes are laid out as.
    """
    op = "npu_format_cast"
    emulation.require(op, acl_format in (ND, FRACTAL_NZ), f"format {acl_format} is neither ND (2) nor FRACTAL_NZ (29)")
    emulation.require(op, input.dim() >= 2, "a matrix is needed")
    emulation.require(op, input.is_contiguous(), "the input has to be contiguous")
    if acl_format == FRACTAL_NZ and input.dtype in _CARRIERS:
        emulation.require(op, customize_dtype is not None, f"{input.dtype} needs customize_dtype")
    result = input.clone()
    if acl_format == FRACTAL_NZ:
        setattr(result.untyped_storage(), _ATTRIBUTE, FRACTAL_NZ)
    return result


def copy_format(source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`result`, whose storage is its own, in the format of `source`."""
    setattr(result.untyped_storage(), _ATTRIBUTE, npu_format(source))
    return result


def get_npu_format(emulation: Emulation, input: torch.Tensor) -> int:
    return npu_format(input)


def is_transposed(tensor: torch.Tensor, trailing: int = 1) -> bool:
    """What the operators call transposed: the last two axes (before `trailing` elements each), swapped in memory.

    They look at strides, so that a single row or column can be either (op-plugin's `is_transpose_last_two_dims`).
    """
    first, second = (-2, -1) if trailing == 1 else (-3, -2)
    single = tensor.shape[first] == 1 and tensor.shape[second] == 1
    swapped = tensor.stride(first) == trailing and tensor.stride(second) == trailing * tensor.shape[first]
    return swapped and not single


def require_matrix(emulation: Emulation, op: str, name: str, tensor: torch.Tensor) -> None:
    """A matrix (or a stack) that is contiguous or a transposed view, with axes of legal length."""
    emulation.require(op, tensor.dim() >= 2, f"{name} is {tensor.dim()}-dimensional")
    lies = tensor.is_contiguous() or tensor.transpose(-2, -1).is_contiguous()
    emulation.require(op, lies, f"{name} is neither contiguous nor a transposed view")
    longest = max(tensor.shape[-2:])
    emulation.require(op, longest <= LONGEST_AXIS, f"{name} has an axis of {longest}; at most {LONGEST_AXIS}")
