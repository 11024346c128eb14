"""Linear layers whose mxfp4 weights run on FP8 units and stay in 4 bits: decoded to e4m3 in registers.

What is multiplied is what `omniplat_cuda.kernels.reencoded` multiplies, bit by bit: codes of a row as e4m3 under one
power of two, inputs as there. Of the weight the device keeps the codes, a byte a group and the rows' scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from omniplat.capability import Capability
from omniplat.layer import LayerSpec
from omniplat.portable.reencode import row_binades
from omniplat.runtime.declared import require_declared
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.quant_text import encode_quant
from omniplat.runtime.tensors import WeightTensors
from omniplat_cuda.capabilities import torch_native as declared
from omniplat_cuda.kernels import decoded_ops as _ops  # noqa: F401 -- registers the operator
from omniplat_cuda.kernels.decoded_ptx import NORMAL
from omniplat_cuda.kernels.decoded_words import to_shifts, to_words
from omniplat_cuda.kernels.reencoded import ROLES, executed_activation


@dataclass(frozen=True, slots=True)
class DecodedConfig:
    """`activation` is the input's TensorQuant as JSON; `wide`: some group lies more than 11 binades below the largest
    of its row."""

    activation: str
    wide: bool


class Decoded(LinearKernel[DecodedConfig]):
    """Buffers: `words` uint8 [N, blocks * 64] and `shifts` int32 [blocks, N] as `omniplat_cuda.kernels.decoded_words`
    has them, `scale` f32 [1, N], `pre_scale` f32 [K] where there is one."""

    config_type = DecodedConfig
    capability: ClassVar[Capability]

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[DecodedConfig]:
        """Raises as `omniplat_cuda.kernels.reencoded.Reencoded.prepare` does."""
        require_declared("cuda", self.capability, weight, spec, ROLES)
        below, scale = row_binades(weight, spec.name)
        tensors = {
            "words": to_words(weight.tensors["codes"].view(torch.uint8)),
            "shifts": to_shifts(below),
            "scale": scale.reshape(1, -1),
        }
        if "pre_scale" in weight.tensors:
            tensors["pre_scale"] = weight.tensors["pre_scale"].to(torch.float32).reshape(-1).contiguous()
        activation = encode_quant(executed_activation(self.capability, weight, spec))
        return Prepared(tensors, DecodedConfig(activation, wide=int(below.max()) > NORMAL))

    def apply(
        self,
        config: DecodedConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.cuda_decoded_linear(
            x,
            tensors["words"],
            tensors["shifts"],
            tensors["scale"],
            tensors.get("pre_scale"),
            bias,
            config.activation,
            config.wide,
            out_dtype,
        )
        return y


class DecodedMxfp4(Decoded):
    name: ClassVar[str] = "fp8_decoded_mxfp4"
    capability: ClassVar[Capability] = declared.DECODED_MXFP4


class DecodedMxfp4A8(Decoded):
    name: ClassVar[str] = "fp8_decoded_mxfp4_a8"
    capability: ClassVar[Capability] = declared.DECODED_MXFP4_A8
