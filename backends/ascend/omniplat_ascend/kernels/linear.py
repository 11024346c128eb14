"""Linear kernels: how each lays a canonical weight out for its product (`products`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from omniplat.canonical import TRANSFORM_ROLES
from omniplat.capability import Capability
from omniplat.errors import InvalidCheckpointError
from omniplat.layer import LayerSpec
from omniplat.runtime.declared import require_declared
from omniplat.runtime.finite import multipliers
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.tensors import DTYPES, WeightTensors
from omniplat.scheme import Scheme
from omniplat_ascend.kernels import layouts, ops
from omniplat_ascend.kernels.products import ROUND_MODES
from omniplat_ascend.spec import SPEC


@dataclass(frozen=True, slots=True)
class AscendConfig:
    """Names of the prepared tensors in the order of the operator's list, and how the device rounds activations.

    `clip_ratio` is that of a transformed input, as text: a compiler takes a float for an input that varies; "" where
    inputs are not transformed.
    """

    names: tuple[str, ...]
    rounding: str
    out_features: int
    in_features: int
    clip_ratio: str = ""


def capability_named(name: str) -> Capability:
    return next(item for item in SPEC.capabilities if item.name == name)


def device_rounding(kernel: str, scheme: Scheme) -> str:
    """How the device calls the rounding of the scheme's activation; its own where the capability lists another."""
    declared = scheme.activation.rounding if scheme.activation is not None else ""
    return ROUND_MODES[declared if declared in capability_named(kernel).roundings else ""]


class AscendLinear(LinearKernel[AscendConfig]):
    """Prepares tensors and calls one function of `products`, by name."""

    config_type = AscendConfig
    product: ClassVar[str]
    #: Canonical tensors that the product reads, beside `bias`.
    roles: ClassVar[tuple[str, ...]] = ("codes", "scale", "pre_scale")

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[AscendConfig]:
        """Raises UnsupportedCombinationError for what the kernel's capability does not declare."""
        require_declared(SPEC.name, capability_named(self.name), weight, spec, self.roles)
        tensors = self.laid_out(weight, spec)
        if "pre_scale" in weight.tensors:
            tensors["pre_scale"] = weight.tensors["pre_scale"].to(torch.float32).reshape(-1).contiguous()
        rounding = device_rounding(self.name, weight.scheme)
        clip = repr(float(weight.tensors["clip_ratio"])) if weight.scheme.is_transformed else ""
        config = AscendConfig(tuple(tensors), rounding, weight.out_features, weight.in_features, clip)
        return Prepared(tensors, config)

    @abstractmethod
    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        """The tensors that the product reads. May share memory with `weight`."""

    def apply(
        self,
        config: AscendConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        held = [tensors[name] for name in config.names]
        names, rounding, clip = list(config.names), config.rounding, config.clip_ratio
        return ops.linear(x, held, bias, names, self.product, rounding, clip, config.out_features, out_dtype)


class Int8Linear(AscendLinear):
    """int8 weights with one scale per row, int8 activations with one per token."""

    name: ClassVar[str] = "quant_matmul_int8"
    product: ClassVar[str] = "int8_dynamic"

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return {"codes": layouts.integers(weight), "scale": layouts.row_scale(weight)}


class Int4A8Linear(Int8Linear):
    """int4 weights as int8: the device multiplies int4 by int8 in a mode of its own for experts only."""

    name: ClassVar[str] = "quant_matmul_int4_a8"

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return {"codes": layouts.int4_as_integers(weight), "scale": layouts.row_scale(weight)}


class Int8StaticLinear(AscendLinear):
    """int8 weights with one scale per row, int8 activations with one scale of the file and maybe a zero point."""

    name: ClassVar[str] = "quant_matmul_int8_static"
    product: ClassVar[str] = "int8_static"
    roles: ClassVar[tuple[str, ...]] = ("codes", "scale", "pre_scale", "input_scale", "input_zero_point")

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        """A zero point z of the input adds -z * input_scale * scale * sum(codes) to every output: `correction` [N]."""
        if "input_scale" not in weight.tensors:
            raise InvalidCheckpointError(f"{weight.scheme.activation_id} needs input_scale", key=spec.name)
        codes, scale = layouts.integers(weight), layouts.row_scale(weight)
        input_scale = weight.tensors["input_scale"].to(torch.float32).reshape(1)
        tensors = {"codes": codes, "scale": scale, "input_scale": input_scale}
        if "input_zero_point" in weight.tensors:
            zero = weight.tensors["input_zero_point"].to(torch.int32).reshape(1)
            total = codes.sum(1, dtype=torch.int64) * zero
            tensors["input_zero_point"] = zero
            tensors["correction"] = -(total.to(torch.float64) * scale * input_scale).to(torch.float32)
        return tensors


class Int4Linear(AscendLinear):
    """int4 by int4: weights with one scale per row, activations with one per token, which may be transformed before."""

    name: ClassVar[str] = "quant_matmul_int4"
    product: ClassVar[str] = "int4_dynamic"
    roles: ClassVar[tuple[str, ...]] = (*AscendLinear.roles, *TRANSFORM_ROLES)

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        tensors = {"codes": layouts.nibble_words(weight), "scale": layouts.row_scale(weight)}
        if weight.scheme.is_transformed:
            dtype = DTYPES[spec.dtype]
            tensors["left"] = weight.tensors["left_transform"].t().to(dtype).contiguous()
            tensors["right"] = weight.tensors["right_transform"].to(dtype).contiguous()
        return tensors


class Fp8Linear(AscendLinear):
    """fp8 weights with one scale per row, fp8 activations with one per token."""

    name: ClassVar[str] = "quant_matmul_fp8"
    product: ClassVar[str] = "fp8_dynamic"

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return {"codes": layouts.fp8_bytes(weight, spec), "scale": layouts.row_scale(weight)}


class Fp8BlockLinear(AscendLinear):
    """fp8 weights with a scale per tile of 128 x 128, fp8 activations with one per token and 128 columns."""

    name: ClassVar[str] = "quant_matmul_fp8_block"
    product: ClassVar[str] = "fp8_block"

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return {"codes": layouts.fp8_bytes(weight, spec), "scale": multipliers(weight, spec.name).contiguous()}


class Mxfp8Linear(AscendLinear):
    """MXFP8 weights and activations."""

    name: ClassVar[str] = "quant_matmul_mxfp8"
    product: ClassVar[str] = "mxfp8"

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return {"codes": layouts.fp8_bytes(weight, spec), "scale": layouts.paired_scale(weight, spec)}


class Mxfp4Linear(AscendLinear):
    """MXFP4 weights and activations."""

    name: ClassVar[str] = "quant_matmul_mxfp4"
    product: ClassVar[str] = "mxfp4"

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return {"codes": weight.tensors["codes"].contiguous(), "scale": layouts.paired_scale(weight, spec)}


class Mxfp4A8Linear(Mxfp4Linear):
    """MXFP4 weights, MXFP8 activations."""

    name: ClassVar[str] = "quant_matmul_mxfp4_a8"
    product: ClassVar[str] = "mxfp4_a8"


class DualLevelLinear(AscendLinear):
    """MXFP4 under a second scale per 512 columns, weights and activations."""

    name: ClassVar[str] = "dual_level_quant_matmul"
    product: ClassVar[str] = "mxfp4_dual"
    roles: ClassVar[tuple[str, ...]] = ("codes", "scale", "scale2", "pre_scale")

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return {
            "codes": layouts.in_nz(weight.tensors["codes"].contiguous().view(torch.int8)),
            "scale": layouts.paired_scale(weight, spec),
            "scale2": weight.tensors["scale2"].to(torch.float32).t().contiguous(),
        }


class WeightOnlyLinear(AscendLinear):
    """Integer weights with scales per row or group, activations of 16 bits.

    The operator takes scales and offsets in the input's dtype, and rounds to it what it multiplies them to.
    """

    product: ClassVar[str] = "weight_only"
    roles: ClassVar[tuple[str, ...]] = ("codes", "scale", "zero_point", "pre_scale")

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return layouts.weight_only(weight, spec)


class WeightOnlyInt8Linear(WeightOnlyLinear):
    name: ClassVar[str] = "weight_quant_batchmatmul_int8"


class WeightOnlyInt4Linear(WeightOnlyLinear):
    name: ClassVar[str] = "weight_quant_batchmatmul_int4"


class WeightOnlyMxfp4Linear(WeightOnlyLinear):
    """MXFP4 weights as int8 in groups of 32, for devices without MX units. Exact, and twice the stored size."""

    name: ClassVar[str] = "weight_quant_batchmatmul_mxfp4"
    roles: ClassVar[tuple[str, ...]] = ("codes", "scale", "pre_scale")

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return layouts.mxfp4_as_int8(weight, spec)
