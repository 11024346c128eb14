"""Linear layers in FP8 blocks (DeepSeek's): e4m3 weights with a scale for every block of so many rows by 128 columns,
and inputs quantized to e4m3 with one for every 128 columns of a token.

`PortableFp8Block` is the kernel, `omniplat::fp8_block_linear` its operator: Triton's form on CUDA, plain torch
elsewhere, which writes the whole weight out at every call and is there for tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.portable.decoded import FP8_BLOCKS
from omniplat.portable.eight_bits import as_numbers, block_rows_of, coded_tensors, quantized, represented_codes, why_not
from omniplat.portable.quantize import has_triton
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.operators import linear_fake, new_library, register
from omniplat.runtime.quant_text import decode_quant, encode_quant
from omniplat.runtime.tensors import WeightTensors

_ROLES = frozenset({"codes", "scale", "pre_scale", "bias"})
_LIBRARY = new_library()


@dataclass(frozen=True, slots=True)
class Fp8BlockConfig:
    """`activation` is the input's TensorQuant as JSON; a block of the weight is `block_rows` high."""

    activation: str
    block_rows: int


class PortableFp8Block(LinearKernel[Fp8BlockConfig]):
    """Buffers: `codes` uint8 [N, K] (bytes of e4m3fn), `scale` f32 [ceil(N/bn), ceil(K/128)], `pre_scale` f32 [K] where
    there is one.

    Products of 128 columns are summed up in what FP8 units keep, then scaled and added up in f32; a result is rounded
    once. Beside the input's codes and scales, M * (K + 4 * ceil(K/128)) bytes while a call lasts, it takes no memory.
    """

    name: ClassVar[str] = "portable_fp8_block"
    config_type = Fp8BlockConfig
    #: Takes what `fp8_block_linear` does, in the library `omniplat`.
    operator: ClassVar[str] = "fp8_block_linear"

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[Fp8BlockConfig]:
        """Raises UnsupportedCombinationError for other schemes, InvalidCheckpointError for NaN codes."""
        reason = "a weight without experts" if weight.experts else why_not(weight, FP8_BLOCKS, _ROLES)
        if reason:
            raise UnsupportedCombinationError(
                "portable", spec.op, weight.scheme.id, [spec.name], [f"{self.name}  needs {reason}"]
            )
        assert weight.scheme.activation is not None
        tensors = coded_tensors(weight, spec.name)
        if "pre_scale" in weight.tensors:
            tensors["pre_scale"] = weight.tensors["pre_scale"].to(torch.float32).reshape(-1).contiguous()
        config = Fp8BlockConfig(encode_quant(weight.scheme.activation), block_rows_of(weight))
        return Prepared(tensors, config)

    def apply(
        self,
        config: Fp8BlockConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = getattr(torch.ops.omniplat, self.operator)(
            x,
            tensors["codes"],
            tensors["scale"],
            tensors.get("pre_scale"),
            bias,
            config.activation,
            config.block_rows,
            out_dtype,
        )
        return y


def fp8_block_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    pre_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    block_rows: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`codes` and `scale` as the kernel's buffers, `activation` and `block_rows` as its config."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = torch.empty((*x.shape[:-1], codes.shape[0]), dtype=out_dtype, device=x.device)
    if not len(rows):
        return y
    x_codes, x_scale = quantized(rows, decode_quant(activation), pre_scale)
    if x.is_cuda and has_triton():
        from omniplat.portable.scaled_product_triton import scaled_product, tile_of

        tile = tile_of(len(rows))
        scaled_product(as_numbers(x_codes), as_numbers(codes), x_scale, scale, bias, y, block_rows, tile)
        return y
    product = F.linear(represented_codes(x_codes, x_scale.t(), 1), represented_codes(codes, scale, block_rows))
    if bias is not None:
        product = product + bias.to(torch.float32)
    return product.to(out_dtype).view(y.shape)


#: Of operators that stand for this one.
ARGUMENTS = (
    "(Tensor x, Tensor codes, Tensor scale, Tensor? pre_scale, Tensor? bias, str activation, int block_rows, "
    "ScalarType out_dtype) -> Tensor"
)
register(
    _LIBRARY,
    "fp8_block_linear" + ARGUMENTS,
    dict.fromkeys(("CUDA", "CPU"), fp8_block_linear),
    linear_fake,
)
