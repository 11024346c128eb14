"""The canonical form: the named arrays that hold a quantized weight, the same whatever dialect it came from.

Formats produce it, the slicer cuts it, the oracle defines what it means, kernels take nothing else. Arrays
are NumPy (with ml_dtypes for bf16 and fp8), so that neither reading a checkpoint nor the oracle needs torch.

For a linear layer with N rows (out features) and K columns (in features):

    codes          8-bit:  [N, K]            float8_e4m3fn, float8_e5m2, int8 or uint8
                   4-bit:  uint8 [N, K/2]    even K index in the low nibble; signed = two's complement nibble
                   2, 3, 5, 6, 7 bits: uint8 [N, K], one code a byte; signed = two's complement byte
                   unquantized: [N, K]       bfloat16, float16 or float32
    scale          multipliers. tensor and channel: f32 [N, 1] (a scalar is repeated per row);
                   group: [N, G] in the stored dtype; block: [ceil(N/bn), ceil(K/bk)]
                   e8m0 scales are uint8: 2^(b-127), 255 = NaN. Reinterpreted, never converted
                   bitsandbytes' blocks are groups: f32 [N, K/block], where the block divides K; LLM.int8: amax / 127
    zero_point     int16 [N, 1 | G]; f32 where a dialect's are fractional. w = (code - zero_point) * scale
    global_scale   f32 [N, 1], a multiplier (NVFP4); f64 where the file has a divisor: the reciprocal must lead back
    scale2         f32 [N, K/512] (dual level)
    group_index    int32 [K]: column k uses scale[:, group_index[k]]
    pre_scale      f32 [K]: y = (x * pre_scale) @ W^T
    left_transform, right_transform  f32 [A, A] and [B, B], A * B = K: an input row as a matrix X [A, B] becomes L^T X R
    clip_ratio     f32 [1] in (0, 1]: what scales of a transformed input are multiplied by
    input_scale    f32 [1], a multiplier: x = q * input_scale; input_zero_point int32 [1]
    input_global_scale  f32 (or f64, as above) [1], a multiplier (NVFP4 activations)
    bias           [N] in the stored dtype

A stacked MoE weight has a leading E on every array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniplat.scheme import Scheme

Array = NDArray[Any]

ROLES: tuple[str, ...] = (
    "codes",
    "scale",
    "zero_point",
    "global_scale",
    "scale2",
    "group_index",
    "pre_scale",
    "codebook",
    "low_rank_down",
    "low_rank_up",
    "left_transform",
    "right_transform",
    "clip_ratio",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "bias",
)

#: Roles of a transformed input: all of them or none.
TRANSFORM_ROLES: tuple[str, ...] = ("left_transform", "right_transform", "clip_ratio")

#: Roles with one entry per row: they follow a permutation or a slice of the rows.
ROW_ROLES: tuple[str, ...] = ("codes", "scale", "zero_point", "global_scale", "scale2", "low_rank_up", "bias")


@dataclass(frozen=True, slots=True)
class CanonicalWeight:
    """One weight in canonical form. `tensors` maps names of `ROLES` to arrays; treat them as read-only."""

    scheme: Scheme
    out_features: int
    in_features: int
    tensors: Mapping[str, Array]

    @property
    def nbytes(self) -> int:
        return sum(int(np.asarray(t).nbytes) for t in self.tensors.values())
