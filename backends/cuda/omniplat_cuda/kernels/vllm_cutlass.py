"""Linear layers over vLLM's CUTLASS products in 8 bits, and MX weights rewritten as fp8 for them.

Buffers, checks and re-encoding are those of the layers over torch's products; only the operator is another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from omniplat.capability import Capability
from omniplat.layer import LayerSpec
from omniplat.runtime.kernel import Prepared
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import TensorQuant
from omniplat_cuda.capabilities import vllm as declared
from omniplat_cuda.kernels import vllm_ops as _ops  # noqa: F401 -- registers the operators
from omniplat_cuda.kernels.reencoded import Reencoded
from omniplat_cuda.kernels.torch_native import IntMm, ScaledMm, TorchConfig, TorchLinear


class _Cutlass(TorchLinear):
    """Of what the capability declares, with its own rule for scales of inputs where a checkpoint has none."""

    operator: ClassVar[str] = "cuda_vllm_scaled_linear"
    multiple: ClassVar[int] = 16
    capability: ClassVar[Capability]

    def laid_out(self, weight: WeightTensors, spec: LayerSpec, activation: TensorQuant) -> Prepared[TorchConfig]:
        rule = activation.scale_rule or self.capability.scale_rules[0]
        return super().laid_out(weight, spec, replace(activation, scale_rule=rule))


class CutlassFp8(_Cutlass, ScaledMm):
    """One scale per token."""

    name: ClassVar[str] = "vllm_cutlass_fp8"
    capability: ClassVar[Capability] = declared.FP8_TOKEN
    weights: ClassVar[tuple[str, ...]] = declared.FP8_TOKEN.weights
    activations: ClassVar[tuple[str, ...]] = declared.FP8_TOKEN.activations


class CutlassFp8Tensor(_Cutlass, ScaledMm):
    """One scale for the whole input, taken from it or stored."""

    name: ClassVar[str] = "vllm_cutlass_fp8_tensor"
    capability: ClassVar[Capability] = declared.FP8_TENSOR
    weights: ClassVar[tuple[str, ...]] = declared.FP8_TENSOR.weights
    activations: ClassVar[tuple[str, ...]] = declared.FP8_TENSOR.activations


class CutlassInt8(_Cutlass, IntMm):
    """One scale per token; products exact in int32."""

    name: ClassVar[str] = "vllm_cutlass_int8"
    capability: ClassVar[Capability] = declared.INT8_TOKEN
    weights: ClassVar[tuple[str, ...]] = declared.INT8_TOKEN.weights
    activations: ClassVar[tuple[str, ...]] = declared.INT8_TOKEN.activations


class CutlassInt8Tensor(_Cutlass, IntMm):
    """One scale for the whole input, taken from it or stored; products exact in int32."""

    name: ClassVar[str] = "vllm_cutlass_int8_tensor"
    capability: ClassVar[Capability] = declared.INT8_TENSOR
    weights: ClassVar[tuple[str, ...]] = declared.INT8_TENSOR.weights
    activations: ClassVar[tuple[str, ...]] = declared.INT8_TENSOR.activations


class CutlassMxfp8(_Cutlass, Reencoded):
    """mxfp8 as fp8 with one power of two per row, by inputs with one scale per token."""

    name: ClassVar[str] = "vllm_cutlass_mxfp8"
    capability: ClassVar[Capability] = declared.MXFP8


class CutlassMxfp4(_Cutlass, Reencoded):
    """mxfp4 as fp8 with one power of two per row, by inputs on their MX grid."""

    name: ClassVar[str] = "vllm_cutlass_mxfp4"
    capability: ClassVar[Capability] = declared.MXFP4
