"""Linear layers over vLLM's Marlin: weights in 4 and 8 bits, decoded in registers, inputs in 16 bits.

Scales are held in the input's dtype, the only one that Marlin reads: those that are no numbers of it are rounded, those
beyond its range refused.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from omniplat.capability import Capability
from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError, UsageError
from omniplat.layer import LayerSpec
from omniplat.runtime.declared import require_declared
from omniplat.runtime.finite import e8m0_scale, fp8_codes
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.tensors import DTYPES, WeightTensors
from omniplat_cuda.capabilities import vllm as declared
from omniplat_cuda.kernels import marlin_layout, vllm_ops


@dataclass(frozen=True, slots=True)
class MarlinConfig:
    """`weight_type` is a key of `vllm_ops.TYPE_IDS`."""

    weight_type: str


class _Marlin(LinearKernel[MarlinConfig]):
    """Buffers: `words` int32 [K/16, N * bits/2] in tiles, `scale` [G, N] in the layer's dtype or bytes, `zero` int32
    [G, N/8], `global_scale` f32 [1], `row_scale` f32 [N] and `pre_scale` f32 [K] where there are such."""

    config_type = MarlinConfig
    capability: ClassVar[Capability]
    #: Canonical tensors beside codes and scales.
    roles: ClassVar[tuple[str, ...]] = ()

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[MarlinConfig]:
        """Raises UnsupportedCombinationError for what is not declared and for scales that Marlin cannot hold;
        InvalidCheckpointError for NaN; UsageError for a layer in another dtype."""
        require_declared("cuda", self.capability, weight, spec, ("codes", "scale", "pre_scale", *self.roles))
        dtype = DTYPES[spec.dtype]
        if spec.dtype not in self.capability.dtypes:
            raise UsageError(f"{self.name} computes in {', '.join(self.capability.dtypes)}, not in {spec.dtype}")
        for rule in self.capability.shapes:
            size = {"out": weight.out_features, "in": weight.in_features}[rule.dim]
            if weight.experts or not rule.accepts(size):
                raise self.refuse(weight, spec, f"{rule.dim} {rule.needed} and no experts")
        tensors = {
            "words": vllm_ops.repacked(_words(self._codes(weight, spec)), weight.scheme.weight.bits),
            **self._scales(weight, spec, dtype),
        }
        if "pre_scale" in weight.tensors:
            tensors["pre_scale"] = weight.tensors["pre_scale"].to(torch.float32).reshape(-1).contiguous()
        return Prepared(tensors, MarlinConfig(self._type(weight)))

    def apply(
        self,
        config: MarlinConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        if workspace is None:
            workspace = torch.zeros(vllm_ops.LOCKS, dtype=torch.uint8, device=x.device)
        optional = (tensors.get(role) for role in ("zero", "global_scale", "row_scale", "pre_scale"))
        y: torch.Tensor = torch.ops.omniplat.cuda_vllm_marlin_linear(
            x, tensors["words"], tensors["scale"], *optional, bias, workspace, config.weight_type, out_dtype
        )
        return y

    def workspace_bytes(self, config: MarlinConfig) -> int:
        return vllm_ops.LOCKS

    def refuse(self, weight: WeightTensors, spec: LayerSpec, reason: str) -> UnsupportedCombinationError:
        return UnsupportedCombinationError(
            "cuda", spec.op, weight.scheme.id, [spec.name], [f"{self.name}  needs {reason}"]
        )

    @abstractmethod
    def _type(self, weight: WeightTensors) -> str: ...

    @abstractmethod
    def _codes(self, weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
        """Unsigned codes, bytes [N, K * bits / 8]."""

    @abstractmethod
    def _scales(self, weight: WeightTensors, spec: LayerSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Buffers beside the codes."""

    def _float_scale(self, weight: WeightTensors, spec: LayerSpec, dtype: torch.dtype) -> torch.Tensor:
        """Scales [G, N] in the layer's dtype, in canonical order."""
        stored = weight.tensors["scale"].to(torch.float32)
        scale = stored.to(dtype)
        if not bool(torch.isfinite(scale).all()) or bool(((scale == 0) != (stored == 0)).any()):
            raise self.refuse(weight, spec, f"scales within the range of {spec.dtype}")
        return scale.t().contiguous()


class MarlinInt(_Marlin):
    """int4 and int8, as unsigned codes around their middle."""

    name: ClassVar[str] = "vllm_marlin_int"
    capability: ClassVar[Capability] = declared.MARLIN_INT

    def _type(self, weight: WeightTensors) -> str:
        return {4: "uint4b8", 8: "uint8b128"}[weight.scheme.weight.bits]

    def _codes(self, weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
        middle = {4: 0x88, 8: 0x80}[weight.scheme.weight.bits]
        return weight.tensors["codes"].contiguous().view(torch.uint8) ^ middle

    def _scales(self, weight: WeightTensors, spec: LayerSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {"scale": marlin_layout.scales(self._float_scale(weight, spec, dtype))}


class MarlinUint4(_Marlin):
    """uint4 with zero points that are codes themselves."""

    name: ClassVar[str] = "vllm_marlin_uint4"
    capability: ClassVar[Capability] = declared.MARLIN_UINT4
    roles: ClassVar[tuple[str, ...]] = ("zero_point",)

    def _type(self, weight: WeightTensors) -> str:
        return "uint4"

    def _codes(self, weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
        return weight.tensors["codes"].contiguous()

    def _scales(self, weight: WeightTensors, spec: LayerSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        scale = self._float_scale(weight, spec, dtype)
        points = weight.tensors.get("zero_point")
        if points is None:
            raise self.refuse(weight, spec, "a zero point")
        whole = points.to(torch.int32)
        if not bool(((whole == points) & (whole >= 0) & (whole <= 15)).all()):
            raise self.refuse(weight, spec, "zero points that are whole numbers from 0 to 15")
        zero = marlin_layout.zero_points(whole.t().expand(scale.shape))
        return {"scale": marlin_layout.scales(scale), "zero": zero}


class MarlinFp8(_Marlin):
    """e4m3 with scales per row or in groups of 128."""

    name: ClassVar[str] = "vllm_marlin_fp8"
    capability: ClassVar[Capability] = declared.MARLIN_FP8

    def _type(self, weight: WeightTensors) -> str:
        return "float8_e4m3fn"

    def _codes(self, weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
        return fp8_codes(weight.tensors["codes"], spec.name)

    def _scales(self, weight: WeightTensors, spec: LayerSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        scale = marlin_layout.fp8_scales(self._float_scale(weight, spec, dtype))
        if not bool(torch.isfinite(scale).all()):
            raise self.refuse(weight, spec, f"scales below 256, for {spec.dtype}")
        return {"scale": scale}


class MarlinMx(_Marlin):
    """mxfp4 and mxfp8."""

    name: ClassVar[str] = "vllm_marlin_mx"
    capability: ClassVar[Capability] = declared.MARLIN_MX

    def _type(self, weight: WeightTensors) -> str:
        return {4: "float4_e2m1f", 8: "float8_e4m3fn"}[weight.scheme.weight.bits]

    def _codes(self, weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
        codes = weight.tensors["codes"]
        return codes.contiguous() if weight.scheme.weight.bits == 4 else fp8_codes(codes, spec.name)

    def _scales(self, weight: WeightTensors, spec: LayerSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        scale = e8m0_scale(weight.tensors["scale"], spec.name)
        return {"scale": marlin_layout.e8m0_scales(scale.t().contiguous())}


class MarlinNvfp4(_Marlin):
    """nvfp4. The scale of the whole weight is the largest of its rows'; what rows lack to it multiplies the output."""

    name: ClassVar[str] = "vllm_marlin_nvfp4"
    capability: ClassVar[Capability] = declared.MARLIN_NVFP4
    roles: ClassVar[tuple[str, ...]] = ("global_scale",)

    def _type(self, weight: WeightTensors) -> str:
        return "float4_e2m1f"

    def _codes(self, weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
        return weight.tensors["codes"].contiguous()

    def _scales(self, weight: WeightTensors, spec: LayerSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        stored = weight.tensors["scale"].to(torch.float32).t().contiguous()
        rows = weight.tensors["global_scale"].to(torch.float32).reshape(-1)
        if not bool(torch.isfinite(stored).all()) or not bool(torch.isfinite(rows).all()):
            raise InvalidCheckpointError("a scale is NaN or infinite", key=spec.name)
        if bool((stored < 0).any()) or bool((rows < 0).any()):
            raise self.refuse(weight, spec, "scales that are not negative")
        scale, factor = marlin_layout.e4m3_scales(stored, dtype)
        if int((scale != 0).sum()) != int((stored != 0).sum()):
            raise self.refuse(weight, spec, f"scales of at least {2.0**-6 / factor:.3g}, or 0: others would become 0")
        largest = rows.max().reshape(1)
        tensors = {"scale": scale, "global_scale": marlin_layout.global_scale(largest, factor, dtype)}
        if not bool(torch.isfinite(tensors["global_scale"]).all()):
            raise self.refuse(weight, spec, f"a global scale below {2.0**9}, for {spec.dtype}")
        if bool((rows != largest).any()):
            tensors["row_scale"] = rows / largest
        return tensors


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [N, B] as int32 [B/4, N]: codes along K from the lowest bits on."""
    return codes.view(torch.int32).t().contiguous()
