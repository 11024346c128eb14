"""Linear kernels over the vendor's int4 products: unsigned nibbles along K, eight in an int32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from omniplat.layer import LayerSpec
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.tensors import WeightTensors
from omniplat_xpu.kernels import ops as _ops  # noqa: F401 -- registers the operators
from omniplat_xpu.kernels import vendor

#: The zero point that stands for signed nibbles once their sign bit is flipped.
_MIDDLE = 8


@dataclass(frozen=True, slots=True)
class Int4Config:
    group_size: int
    out_features: int
    in_features: int


class Int4Gemm(LinearKernel[Int4Config]):
    """int4 and uint4 in groups along K, inputs in 16 bits.

    Buffers: `words` int32 [N, K/8], `scale` [K/g, N] in the layer's dtype (the product has no other: scales that are
    no numbers of it are rounded), `zero_point` int8 [1] or int32 [K/g, N/8], and `order` int32 [K] where columns were
    sorted by group.
    """

    name: ClassVar[str] = "int4_gemm_w4a16"
    config_type = Int4Config

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[Int4Config]:
        """Raises UnsupportedCombinationError for what is not declared, and for groups or zero points that the
        product cannot hold."""
        vendor.require(weight, spec, self.name, "zero_point", "group_index")
        dtype = vendor.layer_dtype(spec)
        codes = weight.tensors["codes"]
        tensors = {}
        if "group_index" in weight.tensors:
            order = _sorted_by_group(weight, spec, self.name)
            codes = _permuted(codes, order)
            tensors["order"] = order.to(torch.int32)
        tensors |= {
            "words": _words(codes, signed=weight.scheme.weight.symmetric),
            "scale": weight.tensors["scale"].to(dtype).t().contiguous(),
            "zero_point": _zero_points(weight, spec, self.name),
        }
        config = Int4Config(weight.scheme.weight.group_size, weight.out_features, weight.in_features)
        return Prepared(tensors, config)

    def apply(
        self,
        config: Int4Config,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.xpu_int4_linear(
            x,
            tensors["words"],
            tensors["scale"],
            tensors["zero_point"],
            tensors.get("order"),
            bias,
            config.group_size,
            out_dtype,
        )
        return y


class Int4Int8Gemm(LinearKernel[Int4Config]):
    """int4 in groups along K by int8 with a scale per token; everything that is no code is f16.

    Buffers: `words` int32 [N, K/8], `scale` f16 [K/g, N], `zero_point` int8 [1], `pre_scale` f32 [K].
    """

    name: ClassVar[str] = "int4_gemm_w4a8"
    config_type = Int4Config

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[Int4Config]:
        """Raises UnsupportedCombinationError for what is not declared, and for scales beyond the range of f16."""
        vendor.require(weight, spec, self.name, "pre_scale")
        tensors = {
            "words": _words(weight.tensors["codes"], signed=True),
            "scale": vendor.half_scale(weight, spec, self.name).t().contiguous(),
            "zero_point": _zero_points(weight, spec, self.name),
        }
        if "pre_scale" in weight.tensors:
            tensors["pre_scale"] = weight.tensors["pre_scale"].to(torch.float32).reshape(-1).contiguous()
        config = Int4Config(weight.scheme.weight.group_size, weight.out_features, weight.in_features)
        return Prepared(tensors, config)

    def apply(
        self,
        config: Int4Config,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.xpu_int4_int8_linear(
            x,
            tensors["words"],
            tensors["scale"],
            tensors["zero_point"],
            tensors.get("pre_scale"),
            bias,
            config.group_size,
            out_dtype,
        )
        return y


def _words(codes: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Canonical nibbles [N, K/2] as int32 [N, K/8]; two's complement becomes unsigned around 8."""
    return _as_words(codes ^ 0x88 if signed else codes)


def _as_words(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [N, B] as int32 [N, B/4]."""
    return packed.reshape(-1).view(torch.int32).view(packed.shape[0], -1)


def _zero_points(weight: WeightTensors, spec: LayerSpec, name: str) -> torch.Tensor:
    """int8 [1] for symmetric weights, else nibbles along N: int32 [K/g, N/8]."""
    points = weight.tensors.get("zero_point")
    if points is None:
        if not weight.scheme.weight.symmetric:
            raise vendor.refuse(weight, spec, name, "a zero point")
        return torch.full((1,), _MIDDLE, dtype=torch.int8, device=weight.tensors["codes"].device)
    whole = points.to(torch.int32)
    if not bool(((whole == points) & (whole >= 0) & (whole <= 15)).all()):
        raise vendor.refuse(weight, spec, name, "zero points that are whole numbers from 0 to 15")
    nibbles = whole.expand(weight.tensors["scale"].shape).t().to(torch.uint8)
    return _as_words(nibbles[:, 0::2] | (nibbles[:, 1::2] << 4))


def _sorted_by_group(weight: WeightTensors, spec: LayerSpec, name: str) -> torch.Tensor:
    """Columns in the order of their groups, int64 [K]: column i of the sorted weight was column order[i]."""
    index = weight.tensors["group_index"].to(torch.int64)
    counts = torch.bincount(index, minlength=weight.tensors["scale"].shape[1])
    if not bool((counts == weight.scheme.weight.group_size).all()):
        raise vendor.refuse(weight, spec, name, f"groups of {weight.scheme.weight.group_size} columns each")
    return torch.argsort(index, stable=True)


def _permuted(codes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Nibbles [N, K/2] with their columns in another order."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1).index_select(1, order)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
