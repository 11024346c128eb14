"""Layers of experts over torch's grouped fp8 product: fp8 weights, and MX weights re-encoded as such."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from omniplat.capability import Capability
from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.portable import mx_grid, quantize
from omniplat.portable.reencode import reencode
from omniplat.runtime.declared import require_declared
from omniplat.runtime.finite import fp8_codes
from omniplat.runtime.kernel import MoeKernel, Prepared
from omniplat.runtime.quant_text import encode_quant
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import TensorQuant, parse_activation_id
from omniplat_cuda.capabilities import torch_native as declared
from omniplat_cuda.kernels import expert_ops  # noqa: F401  registers the operator

_ROLES = ("codes", "scale")


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """`first` and `second` are the TensorQuants of w13's and w2's input, as JSON."""

    first: str
    second: str
    limit: float
    alpha: float


class ScaledGroupedMm(MoeKernel[ExpertsConfig]):
    """Buffers: `w13_codes` uint8 [E, 2I, K], `w2_codes` uint8 [E, K, I] (bytes of e4m3fn), `w13_scale` f32 [E, 2I],
    `w2_scale` f32 [E, K]. Sums are kept in the 22 bits of the FP8 units."""

    name: ClassVar[str] = "scaled_grouped_mm"
    config_type = ExpertsConfig
    capability: ClassVar[Capability] = declared.GROUPED

    def prepare(self, w13: WeightTensors, w2: WeightTensors, spec: LayerSpec) -> Prepared[ExpertsConfig]:
        """Raises UnsupportedCombinationError for what the capability does not declare; InvalidCheckpointError for
        scales that span too many binades and for NaN."""
        tensors: dict[str, torch.Tensor] = {}
        quants = []
        for role, weight in (("w13", w13), ("w2", w2)):
            require_declared("cuda", self.capability, weight, spec, _ROLES)
            if "bias" in weight.tensors:
                reason = f"{self.name}  needs experts without bias, found {role} with one"
                raise UnsupportedCombinationError("cuda", spec.op, weight.scheme.id, [spec.name], [reason])
            quants.append(self._executed(weight, spec))
            name = f"{spec.name}.{role}"
            moved = reencode(weight, self.capability.via, name) if self.capability.via else weight
            tensors[f"{role}_codes"] = fp8_codes(moved.tensors["codes"], name)
            tensors[f"{role}_scale"] = moved.tensors["scale"].to(torch.float32).flatten(1).contiguous()
        assert spec.moe is not None
        first, second = (encode_quant(quant) for quant in quants)
        return Prepared(tensors, ExpertsConfig(first, second, spec.moe.limit, spec.moe.alpha))

    def apply(
        self,
        config: ExpertsConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        activation: str,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        weights = (tensors[name] for name in ("w13_codes", "w13_scale", "w2_codes", "w2_scale"))
        y: torch.Tensor = torch.ops.omniplat.cuda_scaled_experts(
            x,
            topk_ids,
            topk_weights,
            expert_map,
            *weights,
            config.first,
            config.second,
            activation,
            config.limit,
            config.alpha,
            out_dtype,
        )
        return y

    def _executed(self, weight: WeightTensors, spec: LayerSpec) -> TensorQuant:
        """How the input of a weight is quantized."""
        executes = self.capability.executes
        quant = parse_activation_id(executes) if executes else weight.scheme.activation
        is_mx = quant is not None and quant.scale_format == "e8m0"
        reason = mx_grid.why_not(quant, weight.in_features) if is_mx else quantize.why_not(quant)
        if reason or quant is None:
            raise UnsupportedCombinationError(
                "cuda", spec.op, weight.scheme.id, [spec.name], [f"{self.name}  needs {reason}"]
            )
        return quant


class ScaledGroupedMmMxfp8(ScaledGroupedMm):
    name: ClassVar[str] = "scaled_grouped_mm_mxfp8"
    capability: ClassVar[Capability] = declared.GROUPED_MXFP8


class ScaledGroupedMmMxfp4(ScaledGroupedMm):
    name: ClassVar[str] = "scaled_grouped_mm_mxfp4"
    capability: ClassVar[Capability] = declared.GROUPED_MXFP4
