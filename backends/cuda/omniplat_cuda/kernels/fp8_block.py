"""Linear layers in FP8 blocks of 128x128 by torch's own product on Hopper, which is cuBLAS's from CUDA 12.9 on."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F

from omniplat.layer import LayerSpec
from omniplat.portable.eight_bits import as_numbers, quantized
from omniplat.portable.fp8_block import ARGUMENTS, Fp8BlockConfig, PortableFp8Block, fp8_block_linear
from omniplat.runtime.declared import require_declared
from omniplat.runtime.kernel import Prepared
from omniplat.runtime.operators import linear_fake, new_library, register
from omniplat.runtime.quant_text import decode_quant
from omniplat.runtime.tensors import WeightTensors
from omniplat_cuda.capabilities.torch_native import FP8_BLOCK
from omniplat_cuda.kernels.ops import is_built_for_cuda, shaped

_LIBRARY = new_library()
#: Up to so many tokens Triton's product is as fast (docs/performance.md), and it is what computes where torch has none.
#: It computes the same: sums of 128 products in what FP8 units keep, scaled and added up in f32.
FEW_TOKENS = 16
#: cuBLAS takes tokens in fours.
_FOUR = 4


class ScaledMmBlock(PortableFp8Block):
    """fp8 e4m3 by fp8 e4m3 with `torch._scaled_mm`: scales f32 of 1x128 and of 128x128, tokens of a group side by side.

    K is a multiple of 512: of others torch 2.11 takes the weight's scales for what lies where cuBLAS looks for them, in
    rows of whole fours, and products are garbage.
    """

    name: ClassVar[str] = "scaled_mm_block"
    operator: ClassVar[str] = "cuda_fp8_block_linear"

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[Fp8BlockConfig]:
        """Raises UnsupportedCombinationError for what the capability does not declare, InvalidCheckpointError for NaN
        codes."""
        require_declared("cuda", FP8_BLOCK, weight, spec, ("codes", "scale", "pre_scale"))
        return super().prepare(weight, spec)


@lru_cache(maxsize=64)
def has_block_product(device: torch.device) -> bool:
    """True where torch has the product: on sm90 alone, built with CUDA 12.9 or later."""
    if device.type != "cuda" or not is_built_for_cuda(12, 9):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def _fp8_block_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    pre_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    block_rows: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """As `omniplat.portable.fp8_block.fp8_block_linear`, for blocks of 128 rows."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count <= FEW_TOKENS or not has_block_product(x.device):
        return fp8_block_linear(x, codes, scale, pre_scale, bias, activation, block_rows, out_dtype)
    if count % _FOUR:
        rows = F.pad(rows, (0, 0, 0, -count % _FOUR))
    x_codes, x_scale = quantized(rows, decode_quant(activation), pre_scale)
    # a bias is added before the one rounding
    dtype = out_dtype if bias is None else torch.float32
    y = torch._scaled_mm(as_numbers(x_codes), as_numbers(codes).t(), x_scale.t(), scale.t(), out_dtype=dtype)[:count]
    return shaped(y if bias is None else y.add_(bias), x, out_dtype)


register(
    _LIBRARY,
    "cuda_fp8_block_linear" + ARGUMENTS,
    dict.fromkeys(("CUDA", "CPU"), _fp8_block_linear),
    linear_fake,
)
