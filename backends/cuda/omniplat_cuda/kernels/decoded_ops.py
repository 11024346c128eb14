"""The operator over the product that decodes e2m1 weights in registers, in torch's library `omniplat` on import."""

from __future__ import annotations

import torch

from omniplat.runtime.operators import linear_fake, new_library, register
from omniplat.runtime.quant_text import decode_quant
from omniplat_cuda.kernels.decoded_words import to_e4m3
from omniplat_cuda.kernels.ops import quantize_to_fp8, scaled_linear, shaped

_LIBRARY = new_library()


def _on_device(
    x: torch.Tensor,
    words: torch.Tensor,
    shifts: torch.Tensor,
    scale: torch.Tensor,
    pre_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    wide: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """fp8 by e2m1: `words` and `shifts` as in `omniplat_cuda.kernels.decoded_words`, `scale` f32 [1, N]."""
    from omniplat_cuda.kernels.decoded_gluon import decoded_product, tile_of

    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count == 0:
        return x.new_empty((*x.shape[:-1], len(words)), dtype=out_dtype)
    quantized, row_scale = quantize_to_fp8(rows, decode_quant(activation), pre_scale, None, releases=True)
    tile = tile_of(count, len(words), x.device)
    y = decoded_product(quantized, words, shifts, row_scale, scale, bias, out_dtype, wide, tile)
    return shaped(y, x, out_dtype)


def _on_cpu(
    x: torch.Tensor,
    words: torch.Tensor,
    shifts: torch.Tensor,
    scale: torch.Tensor,
    pre_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    wide: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The same with torch's product of the decoded weight: slow, and enough to test the code around it."""
    codes = to_e4m3(words, shifts, x.shape[-1])
    return scaled_linear(x, codes, scale, pre_scale, None, bias, activation, out_dtype)


register(
    _LIBRARY,
    "cuda_decoded_linear(Tensor x, Tensor words, Tensor shifts, Tensor scale, Tensor? pre_scale, Tensor? bias, "
    "str activation, bool wide, ScalarType out_dtype) -> Tensor",
    {"CUDA": _on_device, "CPU": _on_cpu},
    linear_fake,
)
