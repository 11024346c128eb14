"""Weights for the tests of the cpu backend: quantized by the oracle, so that both sides start from the same codes."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import torch

from omniplat import oracle
from omniplat.canonical import Array, CanonicalWeight
from omniplat.layer import LayerSpec
from omniplat.reference.kernels import DequantLinear
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme

FLOAT_DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


class Weights:
    """Random weights and inputs from one seed."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def values(self, *shape: int) -> Array:
        """f32, exactly representable in bf16."""
        return self.random.standard_normal(shape).astype(ml_dtypes.bfloat16).astype(np.float32)

    def canonical(self, scheme: Scheme, rows: int, columns: int, *, stored: str = "bf16") -> CanonicalWeight:
        values = self.values(rows, columns)
        if scheme.weight.element == "bf16":
            return CanonicalWeight(scheme, rows, columns, {"codes": values.astype(FLOAT_DTYPES[stored])})
        weight = replace(oracle.quantize_weight(values, scheme.weight), scheme=scheme)
        tensors = dict(weight.tensors)
        if scheme.activation is not None and not scheme.activation.dynamic:
            tensors["input_scale"] = np.array([0.02], np.float32)
            if not scheme.activation.symmetric:
                tensors["input_zero_point"] = np.array([-7], np.int32)
        return replace(weight, tensors=tensors)


def layer_of(weight: CanonicalWeight, kernel: DequantLinear | None = None, name: str = "l") -> QuantLinear:
    """The layer that the load path would build of a canonical weight."""
    spec = LayerSpec(name, "linear", weight.out_features, weight.in_features, weight.scheme)
    tensors = to_torch(weight)
    chosen = kernel or DequantLinear()
    return QuantLinear(spec, chosen, chosen.prepare(tensors, spec), tensors.tensors.get("bias"))


def assert_within_f32(y: torch.Tensor, x: Array, weight: CanonicalWeight) -> None:
    """|y - oracle| <= gamma * sum |x^| |w|, for float32 accumulation over K and a handful of roundings around it."""
    quant = weight.scheme.activation
    used = x.reshape(-1, x.shape[-1])
    if quant is not None:
        roles = ("input_scale", "input_zero_point", "input_global_scale")
        used = oracle.quantize_activation(used, quant, **{r: weight.tensors[r] for r in roles if r in weight.tensors})
    expected = oracle.linear(x, weight).reshape(-1, weight.out_features)
    bound = np.abs(used).astype(np.float64) @ np.abs(oracle.dequantize(weight)).T
    if "bias" in weight.tensors:
        bound = bound + np.abs(weight.tensors["bias"].astype(np.float64))
    # Blocked summation: the error grows far slower than K; a wrong code or scale is thousands of times larger.
    n = 16 + np.sqrt(weight.in_features)
    error = np.abs(y.reshape(-1, weight.out_features).double().numpy() - expected)
    assert (error <= n * 2.0**-24 * bound + 1e-37).all(), float((error / np.maximum(bound, 1e-37)).max() * 2.0**24)
