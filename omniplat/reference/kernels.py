"""Kernel classes of the cpu backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.reference import ops as _ops  # registers the operators
from omniplat.reference.linear import splits_for
from omniplat.runtime.kernel import LinearKernel, MoeKernel, Prepared
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import ELEMENT_BITS, Scheme, TensorQuant


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Role names in the order of the operator's tensor list, the scheme as JSON, and `splits` (see `linear`)."""

    names: tuple[str, ...]
    scheme: str
    out_features: int
    in_features: int
    splits: int = 0


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """As LinearConfig; names carry the prefix `w13_` or `w2_`, `splits` has one entry for each.

    `parameters` holds limit and alpha of the activation, as text: a compiler takes a float for an input that varies.
    """

    names: tuple[str, ...]
    w13_scheme: str
    w2_scheme: str
    experts: int
    splits: tuple[int, int] = (0, 0)
    parameters: tuple[str, str] = ("0.0", "1.0")


class DequantLinear(LinearKernel[LinearConfig]):
    """Every scheme: rows of the weight are decoded to float32 a tile at a time, inside the operator.

    Keeps the canonical tensors as they are, so a layer is as large as its stored weight.
    """

    name: ClassVar[str] = "dequant_linear"
    config_type = LinearConfig

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[LinearConfig]:
        """Raises InvalidCheckpointError for NaN codes, UnsupportedCombinationError for opaque elements."""
        _check(weight, spec, self.name)
        return self._prepared(weight, 0)

    def _prepared(self, weight: WeightTensors, splits: int) -> Prepared[LinearConfig]:
        tensors = {name: _ops.as_bytes(tensor) for name, tensor in weight.tensors.items() if name != "bias"}
        scheme = _ops.encode_scheme(weight.scheme)
        config = LinearConfig(tuple(tensors), scheme, weight.out_features, weight.in_features, splits)
        return Prepared(tensors, config)

    def apply(
        self,
        config: LinearConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        held = [tensors[name] for name in config.names]
        names = list(config.names)
        y: torch.Tensor = torch.ops.omniplat.reference_linear(
            x, held, bias, names, config.scheme, config.out_features, config.splits, out_dtype
        )
        return y


class FloatLinear(DequantLinear):
    """bf16, f16 and f32 weights; in bf16 where the CPU has units for it, else in float32 row tiles."""

    name: ClassVar[str] = "float_linear"


class LlmInt8Linear(DequantLinear):
    """bitsandbytes' LLM.int8 weights with activations as they are: outlier columns need no splitting then."""

    name: ClassVar[str] = "llm_int8_linear"

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[LinearConfig]:
        return super().prepare(replace(weight, scheme=Scheme(TensorQuant("int8", "channel"))), spec)


class Int8Linear(DequantLinear):
    """Integer weights of up to 8 bits with one scale per row, and symmetric integer activations.

    Codes are multiplied exactly: with the CPU's int8 products where those do not saturate, else in float32 over
    pieces of K so short that every sum is exact.
    """

    name: ClassVar[str] = "int8_linear"

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[LinearConfig]:
        if not _is_integer_product(weight):
            raise UnsupportedCombinationError(
                "cpu", spec.op, weight.scheme.id, [spec.name], [f"{self.name}  needs integer codes on both sides"]
            )
        return self._prepared(weight, _splits(weight))


class ExpertLoop(MoeKernel[MoeConfig]):
    """Every scheme; every expert runs once over the rows that chose it, with the products of a linear layer."""

    name: ClassVar[str] = "expert_loop"
    config_type = MoeConfig

    def prepare(self, w13: WeightTensors, w2: WeightTensors, spec: LayerSpec) -> Prepared[MoeConfig]:
        tensors: dict[str, torch.Tensor] = {}
        for prefix, weight in (("w13_", w13), ("w2_", w2)):
            _check(weight, spec, self.name)
            tensors |= {prefix + name: _ops.as_bytes(tensor) for name, tensor in weight.tensors.items()}
        schemes = _ops.encode_scheme(w13.scheme), _ops.encode_scheme(w2.scheme)
        splits = tuple(_splits(weight) if _is_integer_product(weight) else 0 for weight in (w13, w2))
        moe = spec.moe or MoeSpec(w13.experts, w2.in_features)
        parameters = repr(moe.limit), repr(moe.alpha)
        config = MoeConfig(tuple(tensors), *schemes, w13.experts, (splits[0], splits[1]), parameters)
        return Prepared(tensors, config)

    def apply(
        self,
        config: MoeConfig,
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
        names = list(config.names)
        y: torch.Tensor = torch.ops.omniplat.reference_moe(
            x,
            held,
            topk_ids,
            topk_weights,
            expert_map,
            names,
            config.w13_scheme,
            config.w2_scheme,
            list(config.splits),
            activation,
            list(config.parameters),
            out_dtype,
        )
        return y


def _is_integer_product(weight: WeightTensors) -> bool:
    """True where integer codes of a row share one scale, and so do those of an input."""
    quant, activation = weight.scheme.weight, weight.scheme.activation
    return (
        quant.element.startswith("int")
        and quant.bits != 4
        and quant.granularity in ("tensor", "channel")
        and "zero_point" not in weight.tensors
        and activation is not None
        and activation.symmetric
        and activation.element.startswith("int")
        and activation.granularity in ("token", "tensor")
    )


def _splits(weight: WeightTensors) -> int:
    assert weight.scheme.activation is not None
    codes = weight.tensors["codes"]
    return splits_for(codes.reshape(-1, codes.shape[-1]), 2 ** (weight.scheme.activation.bits - 1))


def _check(weight: WeightTensors, spec: LayerSpec, kernel: str) -> None:
    quant, activation = weight.scheme.weight, weight.scheme.activation
    if quant.element not in ELEMENT_BITS or (activation is not None and activation.element not in ELEMENT_BITS):
        raise UnsupportedCombinationError(
            "cpu", spec.op, weight.scheme.id, [spec.name], [f"{kernel}  needs codes that it can decode on both sides"]
        )
    if quant.element in ("fp8_e4m3", "fp8_e5m2"):
        first_nan = 0x7F if quant.element == "fp8_e4m3" else 0x7C
        # A slice at a time, in one small buffer: a check must not need as much memory as the weight.
        every = weight.tensors["codes"].view(torch.int8).reshape(-1)
        magnitudes = torch.empty(min(every.numel(), 1 << 18), dtype=torch.int8)
        for codes in torch.split(every, 1 << 18):
            if (
                codes.numel()
                and int(torch.bitwise_and(codes, 0x7F, out=magnitudes[: codes.numel()]).max()) >= first_nan
            ):
                raise InvalidCheckpointError(f"{quant.element} weight holds NaN or Inf", key=spec.name)
