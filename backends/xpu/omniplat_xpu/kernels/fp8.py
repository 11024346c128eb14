"""Linear kernels over the vendor's fp8 and fp4 products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from omniplat.errors import InvalidCheckpointError
from omniplat.layer import LayerSpec
from omniplat.runtime.finite import e8m0_scale, fp8_codes, multipliers
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.tensors import WeightTensors
from omniplat_xpu.kernels import ops as _ops  # noqa: F401 -- registers the operators
from omniplat_xpu.kernels import vendor

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """`activation` is the id of the executed activation."""

    activation: str
    out_features: int
    in_features: int


class _Fp8(LinearKernel[LinearConfig]):
    """fp8 e4m3 by fp8 e4m3. Buffers: `codes` uint8 [N, K], `scale`, and `pre_scale` f32 [K], `input_scale` f32 [1]."""

    config_type = LinearConfig

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[LinearConfig]:
        """Raises UnsupportedCombinationError for what is not declared, InvalidCheckpointError for NaN."""
        activation = weight.scheme.activation
        static = activation is not None and not activation.dynamic
        vendor.require(weight, spec, self.name, "pre_scale", *(("input_scale",) if static else ()))
        vendor.layer_dtype(spec)
        tensors = {
            "codes": fp8_codes(weight.tensors["codes"], spec.name),
            "scale": self._scale(weight.tensors["scale"], weight, spec),
        }
        if "pre_scale" in weight.tensors:
            tensors["pre_scale"] = weight.tensors["pre_scale"].to(torch.float32).reshape(-1).contiguous()
        if static:
            if "input_scale" not in weight.tensors:
                raise InvalidCheckpointError(f"{weight.scheme.activation_id} needs input_scale", key=spec.name)
            tensors["input_scale"] = weight.tensors["input_scale"].to(torch.float32).reshape(1)
        return Prepared(tensors, LinearConfig(weight.scheme.activation_id, weight.out_features, weight.in_features))

    def _scale(self, scale: torch.Tensor, weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
        """The buffer `scale`, in the layout from which the product tells the mode."""
        raise NotImplementedError

    def apply(
        self,
        config: LinearConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        pre_scale, input_scale = tensors.get("pre_scale"), tensors.get("input_scale")
        y: torch.Tensor = torch.ops.omniplat.xpu_fp8_linear(
            x, tensors["codes"], tensors["scale"], pre_scale, input_scale, bias, config.activation, out_dtype
        )
        return y


class Fp8Gemm(_Fp8):
    """Scales per tensor or channel, by inputs with a scale per token."""

    name: ClassVar[str] = "fp8_gemm"

    def _scale(self, scale: torch.Tensor, weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
        return channel_scale(scale)


class Fp8GemmTensor(Fp8Gemm):
    """The same by inputs with one scale, which the vendor derives by another rule."""

    name: ClassVar[str] = "fp8_gemm_tensor"


class Fp8GemmBlock(_Fp8):
    """Scales of blocks of 128 x 128, by inputs with a scale per 128 values."""

    name: ClassVar[str] = "fp8_gemm_block"

    def _scale(self, scale: torch.Tensor, weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
        return block_scale(weight, spec)


class Fp8GemmMx(_Fp8):
    """MXFP8 by MXFP8: scales are bytes [K/32, N]."""

    name: ClassVar[str] = "fp8_gemm_mx"

    def _scale(self, scale: torch.Tensor, weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
        return mx_scale(scale, spec)


class Fp8WeightOnly(LinearKernel[LinearConfig]):
    """fp8 e4m3 weights with a scale per tensor or channel, inputs in 16 bits. Buffers: `codes` [N, K] and `scale`."""

    name: ClassVar[str] = "fp8_gemm_w8a16"
    config_type = LinearConfig

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[LinearConfig]:
        """Raises UnsupportedCombinationError for what is not declared, InvalidCheckpointError for NaN."""
        vendor.require(weight, spec, self.name)
        vendor.layer_dtype(spec)
        tensors = {
            "codes": fp8_codes(weight.tensors["codes"], spec.name),
            "scale": self._scale(weight.tensors["scale"], weight, spec),
        }
        return Prepared(tensors, LinearConfig("a16", weight.out_features, weight.in_features))

    def _scale(self, scale: torch.Tensor, weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
        return channel_scale(scale)

    def apply(
        self,
        config: LinearConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.xpu_fp8_weight_only(x, tensors["codes"], tensors["scale"], bias, out_dtype)
        return y


class Fp8WeightOnlyBlock(Fp8WeightOnly):
    """As `Fp8WeightOnly`, with scales of blocks of 128 x 128."""

    name: ClassVar[str] = "fp8_gemm_w8a16_block"

    def _scale(self, scale: torch.Tensor, weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
        return block_scale(weight, spec)


class Fp4Gemm(LinearKernel[LinearConfig]):
    """MXFP4 by MXFP4. Buffers: `codes` uint8 [N, K/2], `scale` bytes [K/32, N], `pre_scale` f32 [K].

    The vendor's quantizer of inputs rounds values in the middle of two codes towards zero.
    """

    name: ClassVar[str] = "fp4_gemm"
    config_type = LinearConfig

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[LinearConfig]:
        """Raises UnsupportedCombinationError for what is not declared, InvalidCheckpointError for scales of NaN."""
        vendor.require(weight, spec, self.name, "pre_scale")
        vendor.layer_dtype(spec)
        tensors = {"codes": weight.tensors["codes"].contiguous(), "scale": mx_scale(weight.tensors["scale"], spec)}
        if "pre_scale" in weight.tensors:
            tensors["pre_scale"] = weight.tensors["pre_scale"].to(torch.float32).reshape(-1).contiguous()
        return Prepared(tensors, LinearConfig("mxfp4", weight.out_features, weight.in_features))

    def apply(
        self,
        config: LinearConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.xpu_fp4_linear(
            x, tensors["codes"], tensors["scale"], tensors.get("pre_scale"), bias, out_dtype
        )
        return y


def channel_scale(scale: torch.Tensor) -> torch.Tensor:
    """Canonical [N, 1] as f32 [N], or [1] where all rows share one."""
    flat = scale.to(torch.float32).reshape(-1).contiguous()
    return flat[:1].clone() if bool((flat == flat[:1]).all()) else flat


def block_scale(weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
    """Canonical [N/128, K/128] as f32 [K/128, N/128]; as [N] where K is one block. Raises InvalidCheckpointError where
    an e8m0 scale is NaN.

    With one row of scales the products see scales per channel, and would read N of them.
    """
    blocks = multipliers(weight, spec.name).t().contiguous()
    return blocks.reshape(-1).repeat_interleave(_BLOCK) if weight.in_features == _BLOCK else blocks


def mx_scale(scale: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """Canonical bytes [N, K/32] as [K/32, N]; raises InvalidCheckpointError where one is NaN."""
    return e8m0_scale(scale, spec.name).t().contiguous()
