"""Linear kernels over AITER's MXFP4 products. Biases are added outside: none of them adds one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from omniplat.layer import LayerSpec
from omniplat.runtime.finite import e8m0_scale
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.tensors import WeightTensors
from omniplat_rocm.kernels import ops as _ops  # noqa: F401 -- registers the operators
from omniplat_rocm.kernels import vendor


@dataclass(frozen=True, slots=True)
class Fp4Config:
    out_features: int
    in_features: int


class GemmA4W4(LinearKernel[Fp4Config]):
    """MXFP4 by MXFP4 on gfx950's own units. Buffers: `codes` uint8 [N, K/2] in tiles of 16 x 16, `scale` bytes,
    shuffled, rows padded to a multiple of 256."""

    name: ClassVar[str] = "gemm_a4w4"
    config_type = Fp4Config

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[Fp4Config]:
        """Raises UnsupportedCombinationError for what is not declared, InvalidCheckpointError for scales of NaN."""
        vendor.require(weight, spec, self.name)
        vendor.layer_dtype(spec)
        scale = e8m0_scale(weight.tensors["scale"], spec.name).contiguous()
        codes = weight.tensors["codes"].contiguous()
        tensors = {
            "codes": vendor.aiter("ops.shuffle", "shuffle_weight")(codes, layout=(16, 16)),
            "scale": vendor.aiter("utility.fp4_utils", "e8m0_shuffle")(scale),
        }
        return Prepared(tensors, Fp4Config(weight.out_features, weight.in_features))

    def apply(
        self,
        config: Fp4Config,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.rocm_gemm_a4w4(x, tensors["codes"], tensors["scale"], bias, out_dtype)
        return y


class GemmA4W4Even(GemmA4W4):
    """With the quantizer of releases before 0.1.16."""

    name: ClassVar[str] = "gemm_a4w4_even"


class GemmAfp4Wfp4(LinearKernel[Fp4Config]):
    """MXFP4 by MXFP4 in Triton, for sizes that the other does not take. Buffers: `codes` [N, K/2], `scale` [K/32, N],
    bytes both."""

    name: ClassVar[str] = "gemm_afp4wfp4"
    config_type = Fp4Config

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[Fp4Config]:
        """Raises UnsupportedCombinationError for what is not declared, InvalidCheckpointError for scales of NaN."""
        vendor.require(weight, spec, self.name)
        vendor.layer_dtype(spec)
        scale = e8m0_scale(weight.tensors["scale"], spec.name).t().contiguous()
        tensors = {"codes": weight.tensors["codes"].contiguous(), "scale": scale}
        return Prepared(tensors, Fp4Config(weight.out_features, weight.in_features))

    def apply(
        self,
        config: Fp4Config,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.rocm_gemm_afp4wfp4(x, tensors["codes"], tensors["scale"], bias, out_dtype)
        return y


class GemmA8Wfp4(LinearKernel[Fp4Config]):
    """MXFP4 weights by fp8 inputs with a scale per token, in Triton. Buffers: `codes` [N, K/2], `scale` [N, K/32],
    `pre_scale` f32 [K]."""

    name: ClassVar[str] = "gemm_a8wfp4"
    config_type = Fp4Config

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[Fp4Config]:
        """Raises UnsupportedCombinationError for what is not declared, InvalidCheckpointError for scales of NaN."""
        vendor.require(weight, spec, self.name, "pre_scale")
        vendor.layer_dtype(spec)
        tensors = {
            "codes": weight.tensors["codes"].contiguous(),
            "scale": e8m0_scale(weight.tensors["scale"], spec.name).contiguous(),
        }
        if "pre_scale" in weight.tensors:
            tensors["pre_scale"] = weight.tensors["pre_scale"].to(torch.float32).reshape(-1).contiguous()
        return Prepared(tensors, Fp4Config(weight.out_features, weight.in_features))

    def apply(
        self,
        config: Fp4Config,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.rocm_gemm_a8wfp4(
            x, tensors["codes"], tensors["scale"], tensors.get("pre_scale"), bias, out_dtype
        )
        return y
