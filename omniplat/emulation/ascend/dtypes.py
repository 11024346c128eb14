"""How torch_npu names dtypes in integer arguments: torch's own numbers, or the NPU's from 256 on. Both are accepted.

A `torch.dtype` that is given for such an argument arrives as torch's number.
"""

from __future__ import annotations

import torch

from omniplat.emulation.core import Emulation

#: Element formats that are no dtype of a tensor: two codes share a byte, or eight an int32.
FP4 = "fp4_e2m1"
INT4 = "int4"

_NUMBERS: dict[int, torch.dtype | str] = {
    1: torch.int8,
    3: torch.int32,
    5: torch.float16,
    6: torch.float32,
    12: torch.int8,  # qint8
    15: torch.bfloat16,
    16: INT4,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    44: torch.float8_e8m0fnu,
    45: FP4,
    256: torch.float32,
    257: torch.float16,
    258: torch.int8,
    259: torch.int32,
    283: torch.bfloat16,
    285: INT4,
    291: torch.float8_e5m2,
    292: torch.float8_e4m3fn,
    293: torch.float8_e8m0fnu,
    296: FP4,
}


def element(emulation: Emulation, op: str, number: int | None, default: torch.dtype | str) -> torch.dtype | str:
    """The dtype or element format that an argument names; `default` where it is None."""
    if number is None:
        return default
    emulation.require(op, number in _NUMBERS, f"{number} is no dtype that this operator takes")
    return _NUMBERS[number]


def floating(emulation: Emulation, op: str, number: int | None, allowed: tuple[torch.dtype, ...]) -> torch.dtype:
    """The output dtype that an argument names, one of `allowed`."""
    found = element(emulation, op, number, torch.int8)
    emulation.require(op, found in allowed, f"the output cannot be {found}; it is one of {allowed}")
    assert isinstance(found, torch.dtype)
    return found
