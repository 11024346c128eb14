"""Linear kernels over torch's own 8-bit matrix products."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.portable.quantize import why_not
from omniplat.runtime.finite import fp8_codes
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.quant_text import encode_quant
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import TensorQuant
from omniplat_cuda.kernels import ops as _ops  # noqa: F401 -- registers the operators

#: Roles that a layer of these kernels may have; `input_scale` is kept for static activations only.
_ROLES = frozenset({"codes", "scale", "pre_scale", "input_scale", "bias"})


@dataclass(frozen=True, slots=True)
class TorchConfig:
    """`activation` is the input's TensorQuant as JSON."""

    activation: str
    out_features: int
    in_features: int


class TorchLinear(LinearKernel[TorchConfig]):
    """Buffers: `codes` [N, K], `scale` f32 [1, N] (or [1, 1]), `pre_scale` f32 [K] and `input_scale` f32 [1, 1]."""

    config_type = TorchConfig
    weights: ClassVar[tuple[str, ...]]
    activations: ClassVar[tuple[str, ...]]
    multiple: ClassVar[int]
    #: The operator, in the library `omniplat`.
    operator: ClassVar[str]
    #: It has a faster product where one scale holds for the whole weight.
    takes_one_scale: ClassVar[bool] = False

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[TorchConfig]:
        """Raises UnsupportedCombinationError for what the kernel's capability does not declare."""
        activation = weight.scheme.activation
        reason = self._refusal(weight)
        if reason or activation is None:
            raise UnsupportedCombinationError(
                "cuda", spec.op, weight.scheme.id, [spec.name], [f"{self.name}  needs {reason}"]
            )
        return self.laid_out(weight, spec, activation)

    def laid_out(self, weight: WeightTensors, spec: LayerSpec, activation: TensorQuant) -> Prepared[TorchConfig]:
        """The buffers of a weight in 8-bit codes with scales per row, for inputs quantized by `activation`."""
        tensors = {
            "codes": self._codes(weight.tensors["codes"], spec),
            "scale": weight.tensors["scale"].to(torch.float32).reshape(1, -1).contiguous(),
        }
        if (
            self.takes_one_scale
            and activation.granularity == "tensor"
            and bool((tensors["scale"] == tensors["scale"][:, :1]).all())
        ):
            tensors["scale"] = tensors["scale"][:, :1].clone()
        if "pre_scale" in weight.tensors:
            tensors["pre_scale"] = weight.tensors["pre_scale"].to(torch.float32).reshape(-1).contiguous()
        if not activation.dynamic:
            if "input_scale" not in weight.tensors:
                raise InvalidCheckpointError(f"{weight.scheme.activation_id} needs input_scale", key=spec.name)
            tensors["input_scale"] = weight.tensors["input_scale"].to(torch.float32).reshape(1, 1)
        config = TorchConfig(encode_quant(activation), weight.out_features, weight.in_features)
        return Prepared(tensors, config)

    def apply(
        self,
        config: TorchConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = getattr(torch.ops.omniplat, self.operator)(
            x,
            tensors["codes"],
            tensors["scale"],
            tensors.get("pre_scale"),
            tensors.get("input_scale"),
            bias,
            config.activation,
            out_dtype,
        )
        return y

    def _refusal(self, weight: WeightTensors) -> str:
        """What the kernel needs and `weight` does not have; "" where it runs."""
        if weight.scheme.weight_id not in self.weights or weight.scheme.activation_id not in self.activations:
            return f"{' or '.join(self.weights)} with {' or '.join(self.activations)}"
        if weight.out_features % self.multiple or weight.in_features % self.multiple:
            return f"multiples of {self.multiple} on both sides"
        if weight.experts or not weight.tensors.keys() <= _ROLES:
            return f"no roles but {', '.join(sorted(_ROLES))}"
        return why_not(weight.scheme.activation)

    @abstractmethod
    def _codes(self, codes: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        """The buffer of codes, contiguous [N, K]."""


class ScaledMm(TorchLinear):
    """fp8 e4m3 by fp8 e4m3 with `torch._scaled_mm`: scales f32 [M, 1] and [1, N], or one each.

    Sums are kept in the 22 bits of the FP8 units ("fast accumulation"); a result is rounded once.
    """

    multiple: ClassVar[int] = 16
    operator: ClassVar[str] = "cuda_scaled_linear"
    takes_one_scale: ClassVar[bool] = True

    def _codes(self, codes: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        return fp8_codes(codes, spec.name)


class ScaledMmTensor(ScaledMm):
    """One scale for the whole input, and for each part of the weight."""

    name: ClassVar[str] = "scaled_mm_tensor"
    weights: ClassVar[tuple[str, ...]] = ("fp8-tensor",)
    activations: ClassVar[tuple[str, ...]] = ("fp8-tensor", "fp8-tensor-static")


class ScaledMmRow(ScaledMm):
    """One scale per token and per row of the weight, either of which may be the same for all."""

    name: ClassVar[str] = "scaled_mm_row"
    weights: ClassVar[tuple[str, ...]] = ("fp8-tensor", "fp8-channel")
    activations: ClassVar[tuple[str, ...]] = ("fp8-token", "fp8-tensor", "fp8-tensor-static")


class IntMm(TorchLinear):
    """int8 by int8, exact in int32, then scaled and rounded once: in Triton where it is, else with `torch._int_mm`."""

    name: ClassVar[str] = "int_mm"
    multiple: ClassVar[int] = 8
    operator: ClassVar[str] = "cuda_int_linear"
    weights: ClassVar[tuple[str, ...]] = ("int8-tensor", "int8-channel")
    activations: ClassVar[tuple[str, ...]] = ("int8-token", "int8-tensor", "int8-tensor-static")

    def _codes(self, codes: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        return codes.contiguous().view(torch.int8)
