"""Kernels for experts: how each lays stacked canonical weights out for its products (`experts`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from omniplat.layer import LayerSpec, MoeSpec
from omniplat.portable.reencode import reencode
from omniplat.runtime.declared import require_declared
from omniplat.runtime.kernel import MoeKernel, Prepared
from omniplat.runtime.tensors import WeightTensors
from omniplat_ascend.kernels import layouts, ops
from omniplat_ascend.kernels.linear import capability_named, device_rounding
from omniplat_ascend.spec import SPEC


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Names of the prepared tensors, how the device rounds activations, and limit and alpha of the activation as text:
    a compiler takes a float for an input that varies."""

    names: tuple[str, ...]
    rounding: str
    parameters: tuple[str, str]


class AscendExperts(MoeKernel[ExpertsConfig]):
    """Prepares tensors of w13 and w2 and calls one of `experts.EXPERTS`, by name."""

    config_type = ExpertsConfig
    product: ClassVar[str]
    #: Canonical tensors that the product reads, beside `bias`.
    roles: ClassVar[tuple[str, ...]] = ("codes", "scale")

    def prepare(self, w13: WeightTensors, w2: WeightTensors, spec: LayerSpec) -> Prepared[ExpertsConfig]:
        """Raises UnsupportedCombinationError for what the kernel's capability does not declare."""
        tensors: dict[str, torch.Tensor] = {}
        for prefix, weight in (("w13_", w13), ("w2_", w2)):
            require_declared(SPEC.name, capability_named(self.name), weight, spec, self.roles)
            tensors |= {prefix + name: tensor for name, tensor in self.laid_out(weight, spec).items()}
            if "bias" in weight.tensors:
                tensors[prefix + "bias"] = weight.tensors["bias"].contiguous()
        moe = spec.moe or MoeSpec(w13.experts, w2.in_features)
        rounding = device_rounding(self.name, w13.scheme)
        config = ExpertsConfig(tuple(tensors), rounding, (repr(moe.limit), repr(moe.alpha)))
        return Prepared(tensors, config)

    @abstractmethod
    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        """The tensors of one stack [E, ...] that the product reads. May share memory with `weight`."""

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
        held = [tensors[name] for name in config.names]
        names, parameters = list(config.names), list(config.parameters)
        return ops.moe(
            x, held, topk_ids, topk_weights, expert_map, names, self.product, config.rounding, activation, parameters,
            out_dtype,
        )  # fmt: skip


class Int8Experts(AscendExperts):
    """int8 weights with one scale per row, int8 activations with one per token."""

    name: ClassVar[str] = "grouped_matmul_int8"
    product: ClassVar[str] = "int8"

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return {"codes": layouts.integers(weight), "scale": layouts.row_scale(weight)}


class Int4A8Experts(Int8Experts):
    """int4 weights with one scale per row as int8, int8 activations with one per token."""

    name: ClassVar[str] = "grouped_matmul_int4_a8"

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return {"codes": layouts.int4_as_integers(weight), "scale": layouts.row_scale(weight)}


class Int4ByInt8Experts(AscendExperts):
    """int4 weights with scales per row or 256 columns, int8 activations with one per token, at the stored size."""

    name: ClassVar[str] = "grouped_matmul_w4a8"
    product: ClassVar[str] = "int4_a8"

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return layouts.int4_by_int8(weight)


class Fp8Experts(AscendExperts):
    """fp8 weights with one scale per row, fp8 activations with one per token."""

    name: ClassVar[str] = "grouped_matmul_fp8"
    product: ClassVar[str] = "fp8"

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return {"codes": layouts.fp8_bytes(weight, spec), "scale": layouts.row_scale(weight)}


class Mxfp8Experts(AscendExperts):
    """MXFP8 weights and activations."""

    name: ClassVar[str] = "grouped_matmul_mxfp8"
    product: ClassVar[str] = "mxfp8"

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return {"codes": layouts.fp8_bytes(weight, spec), "scale": layouts.paired_scale(weight, spec)}


class Mxfp4Experts(AscendExperts):
    """MXFP4 weights and activations."""

    name: ClassVar[str] = "grouped_matmul_mxfp4"
    product: ClassVar[str] = "mxfp4"

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return {"codes": weight.tensors["codes"].contiguous(), "scale": layouts.paired_scale(weight, spec)}


class Mxfp4A8Experts(Mxfp4Experts):
    """MXFP4 weights, MXFP8 activations."""

    name: ClassVar[str] = "grouped_matmul_mxfp4_a8"
    product: ClassVar[str] = "mxfp4_a8"


class Mxfp4A16Experts(AscendExperts):
    """MXFP4 weights, activations of 16 bits."""

    name: ClassVar[str] = "grouped_matmul_mxfp4_a16"
    product: ClassVar[str] = "mxfp4_a16"

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        return layouts.fp4_by_sixteen_bits(weight, spec)


class WeightOnlyExperts(AscendExperts):
    """Integer weights with scales per row or group, activations of 16 bits.

    The operator wants int4 packed along the columns of its [K, N], scales of whole rows without an axis for groups, and
    an offset always.
    """

    product: ClassVar[str] = "weight_only"
    roles: ClassVar[tuple[str, ...]] = ("codes", "scale", "zero_point")

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        tensors = layouts.weight_only(weight, spec)
        tensors.setdefault("offset", torch.zeros_like(tensors["scale"]))
        if tensors["codes"].dtype == torch.int32:
            tensors["codes"] = layouts.packed_along_rows(tensors["codes"])
        if tensors["scale"].shape[-2] == 1:
            tensors["scale"], tensors["offset"] = (tensors[name].squeeze(-2) for name in ("scale", "offset"))
        return tensors


class WeightOnlyInt8Experts(WeightOnlyExperts):
    name: ClassVar[str] = "grouped_matmul_w8a16"


class WeightOnlyInt4Experts(WeightOnlyExperts):
    name: ClassVar[str] = "grouped_matmul_w4a16"


class ReencodedMxfp4Experts(WeightOnlyExperts):
    """MXFP4 weights as int8 under one scale per row, for devices without MX units. Exact, and twice the stored size."""

    name: ClassVar[str] = "grouped_matmul_mxfp4_w8a16"
    roles: ClassVar[tuple[str, ...]] = ("codes", "scale")

    def laid_out(self, weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
        """Raises InvalidCheckpointError where a row's scales span too many binades; the preflight asks before."""
        return super().laid_out(reencode(weight, "int8-channel", spec.name), spec)
