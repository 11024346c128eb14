"""Linear layers over bitsandbytes' own operator for its 4-bit weights. Imports bitsandbytes.

It decodes weights in registers for few rows; for more, by thresholds of its own, it writes the weight out in x's dtype
and multiplies that: the same numbers either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import bitsandbytes  # noqa: F401  registers its operators
import torch

from omniplat.capability import Capability
from omniplat.layer import LayerSpec
from omniplat.runtime.declared import require_declared
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.operators import linear_fake, new_library, register
from omniplat.runtime.tensors import WeightTensors
from omniplat_cuda.capabilities import others as declared

_LIBRARY = new_library()
_TYPES = {"nf4": "nf4", "fp4_bnb": "fp4"}


@dataclass(frozen=True, slots=True)
class BitsAndBytesConfig:
    """`quant_type` is "nf4" or "fp4"; `blocksize` columns share a scale."""

    quant_type: str
    blocksize: int


class BitsAndBytes4Bit(LinearKernel[BitsAndBytesConfig]):
    """Buffers: `codes` uint8 [N, K/2], the even column in the high nibble, and `absmax` f32 [N, K/blocksize]."""

    name: ClassVar[str] = "bitsandbytes_4bit"
    config_type = BitsAndBytesConfig
    capability: ClassVar[Capability] = declared.BITSANDBYTES_4BIT

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[BitsAndBytesConfig]:
        """Raises UnsupportedCombinationError for what the capability does not declare."""
        require_declared("cuda", self.capability, weight, spec, ("codes", "scale"))
        quant = weight.scheme.weight
        codes = weight.tensors["codes"].contiguous().view(torch.uint8)
        tensors = {
            "codes": (codes << 4) | (codes >> 4),
            "absmax": weight.tensors["scale"].to(torch.float32).contiguous(),
        }
        return Prepared(tensors, BitsAndBytesConfig(_TYPES[quant.element], quant.group_size))

    def apply(
        self,
        config: BitsAndBytesConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.cuda_bitsandbytes_linear(
            x, tensors["codes"], tensors["absmax"], bias, config.quant_type, config.blocksize, out_dtype
        )
        return y


def _linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    bias: torch.Tensor | None,
    quant_type: str,
    blocksize: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    shape = (codes.shape[0], x.shape[-1])
    if not x.numel():
        return x.new_empty((*x.shape[:-1], shape[0]), dtype=out_dtype)
    # its operator adds a bias of x's dtype only
    fused = bias is not None and bias.dtype == x.dtype
    y: torch.Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
        x.contiguous(), codes, shape, absmax, blocksize, quant_type, bias if fused else None
    )
    if bias is not None and not fused:
        y = y.add_(bias)
    return y.to(out_dtype)


register(
    _LIBRARY,
    "cuda_bitsandbytes_linear(Tensor x, Tensor codes, Tensor absmax, Tensor? bias, str quant_type, int blocksize, "
    "ScalarType out_dtype) -> Tensor",
    dict.fromkeys(("CUDA", "CPU"), _linear),
    linear_fake,
)
