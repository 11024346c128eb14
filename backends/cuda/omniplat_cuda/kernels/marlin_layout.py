"""Orders in which Marlin reads what goes with a weight: scales, zero points, a bias. Each is a transposition of runs.

From vLLM 0.30's vllm/model_executor/layers/quantization/utils/marlin_utils*.py, whose lists of indices these are.
Tensors are [G, N]: one row for each group along K.
"""

from __future__ import annotations

import torch

#: Powers of two by which Marlin's fp8 and fp4 numbers, whose bits it only moves, lie below the true ones.
_EXPONENTS = {("fp8", torch.bfloat16): 120, ("fp8", torch.float16): 8}
_GLOBAL_EXPONENTS = {torch.bfloat16: 119, torch.float16: 7}
#: NVFP4's scales are held above this power of two, so that their highest bit is always set and can be left out.
_E4M3_SHIFT = 7


def in_pairs(values: torch.Tensor) -> torch.Tensor:
    """The order of what there is once for a row of the weight: of every 32 the pairs 0, 4, 8, 12, then 1, 5, 9, 13,
    and so on."""
    return values.reshape(-1, 4, 4, 2).transpose(1, 2).reshape(values.shape)


def in_eighths(values: torch.Tensor) -> torch.Tensor:
    """The order of what there is for every group: of every 64 the numbers 0, 8, 16 to 56, then 1, 9, 17 and so on."""
    return values.reshape(-1, 8, 8).transpose(1, 2).reshape(values.shape)


def middle_swapped(values: torch.Tensor) -> torch.Tensor:
    """Of every four, the second and the third change places: scales of 8 bits are decoded in pairs."""
    return values.reshape(-1, 2, 2).transpose(1, 2).reshape(values.shape)


def scales(values: torch.Tensor) -> torch.Tensor:
    """Scales [G, N] of any dtype, contiguous, in the order of theirs."""
    return (in_eighths(values) if values.shape[0] > 1 else in_pairs(values)).contiguous()


def zero_points(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers 0 to 15, [G, N], as int32 [G, N/8]: eight in a word, the even ones below the odd ones."""
    ordered = in_eighths(values).reshape(-1, 4, 2).transpose(1, 2).reshape(values.shape).to(torch.int32)
    words = torch.zeros((values.shape[0], values.shape[1] // 8), dtype=torch.int32, device=values.device)
    for index in range(8):
        words |= ordered[:, index::8] << 4 * index
    return words


def fp8_scales(values: torch.Tensor) -> torch.Tensor:
    """Scales [G, N] of e4m3 codes, in bf16 or f16: raised by what decoding leaves out. May become infinite."""
    return scales(values) * 2.0 ** _EXPONENTS["fp8", values.dtype]


def e8m0_scales(values: torch.Tensor) -> torch.Tensor:
    """Bytes of e8m0 [G, N]."""
    return middle_swapped(scales(values))


def e4m3_scales(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Scales of NVFP4 [G, N], f32 numbers of e4m3 that are not negative, as bytes with one more bit of exponent and no
    sign; and the power of two by which they were raised. Numbers below 2^-6 after that have no byte and become 0.

    Only bf16 has the range for raising them: `dtype` is the layer's.
    """
    factor = 1.0
    largest = float(values.max())
    if dtype == torch.bfloat16 and 0 < largest < 448.0:
        factor = float(torch.exp2(torch.floor(torch.log2(torch.tensor(448.0 / largest)))))
    raised = middle_swapped(scales(values * factor)).to(torch.float16) * 2.0**_E4M3_SHIFT
    raised = torch.where(raised < 2.0, 0.0, raised)
    # Two bits of f16's exponent and all but three of its fraction are not needed: what remains is the upper byte.
    return (raised.view(torch.int16) << 1).view(torch.uint8)[:, 1::2].contiguous(), factor


def global_scale(value: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """NVFP4's scale of the whole weight, f32, raised by what decoding leaves out and lowered by `factor`."""
    return value * (2.0 ** _GLOBAL_EXPONENTS[dtype] / factor)
