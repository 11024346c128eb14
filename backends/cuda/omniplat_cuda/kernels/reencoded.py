"""Linear layers whose MX weights run on FP8 units: rewritten as e4m3 with one power of two per row.

What is multiplied are the declared values: mxfp4 weights move exactly, mxfp8 weights lose only what lies below e4m3's
subnormals (`omniplat.reencoding`). mxfp4 activations are rounded to their MX grid and then held as e4m3 under one scale
per token, exactly where a token's groups span at most 14 binades (`omniplat.portable.mx_grid`); mxfp8 activations are
replaced by fp8 with one scale per token, as the plan says.
"""

from __future__ import annotations

from typing import ClassVar

from omniplat.capability import Capability
from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.portable.mx_grid import why_not
from omniplat.portable.reencode import reencode
from omniplat.runtime.declared import require_declared
from omniplat.runtime.kernel import Prepared
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import TensorQuant, parse_activation_id
from omniplat_cuda.capabilities import torch_native as declared
from omniplat_cuda.kernels.torch_native import ScaledMm, TorchConfig

ROLES = ("codes", "scale", "pre_scale")


class Reencoded(ScaledMm):
    """Buffers: `codes` uint8 [N, K] (bytes of e4m3fn), `scale` f32 [1, N], `pre_scale` f32 [K] where there is one."""

    capability: ClassVar[Capability]

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[TorchConfig]:
        """Raises UnsupportedCombinationError for what the capability does not declare; InvalidCheckpointError for
        scales that span too many binades and for NaN."""
        require_declared("cuda", self.capability, weight, spec, ROLES)
        moved = reencode(weight, self.capability.via, spec.name)
        return self.laid_out(moved, spec, executed_activation(self.capability, weight, spec))


def executed_activation(capability: Capability, weight: WeightTensors, spec: LayerSpec) -> TensorQuant:
    """How inputs of a re-encoded weight are quantized; raises UnsupportedCombinationError for a rule of MX scales or
    rounding that no quantizer here has."""
    if capability.executes:
        executed = parse_activation_id(capability.executes)
    else:
        executed = weight.scheme.activation
        if reason := why_not(executed, weight.in_features):
            raise UnsupportedCombinationError(
                "cuda", spec.op, weight.scheme.id, [spec.name], [f"{capability.name}  needs {reason}"]
            )
    assert executed is not None
    return executed


class ScaledMmMxfp8(Reencoded):
    name: ClassVar[str] = "scaled_mm_mxfp8"
    capability: ClassVar[Capability] = declared.MXFP8


class ScaledMmMxfp4(Reencoded):
    name: ClassVar[str] = "scaled_mm_mxfp4"
    capability: ClassVar[Capability] = declared.MXFP4


class ScaledMmMxfp4A8(Reencoded):
    name: ClassVar[str] = "scaled_mm_mxfp4_a8"
    capability: ClassVar[Capability] = declared.MXFP4_A8
