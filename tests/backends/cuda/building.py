"""Layers of the cuda backend's kernels, on CUDA and on the CPU's forms of torch's products, and what they compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from omniplat_cuda.spec import SPEC

from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.conformance import expected
from omniplat.conformance.tolerances import excess
from omniplat.layer import LayerSpec
from omniplat.portable.quantize import has_triton
from omniplat.runtime.kernel import LinearKernel, load_kernel
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme
from tests.support.triton import needs_cuda

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
if has_triton():
    from omniplat_cuda.kernels.int8_gemm import has_gluon

    HAS_GLUON = has_gluon()
else:
    HAS_GLUON = False

needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="no release of Triton in whose Gluon the kernel is written")
CAPABILITIES = {capability.name: capability for capability in SPEC.capabilities if capability.impl}


def has_rowwise_product() -> bool:
    """True where the CPU's `torch._scaled_mm` takes scales per row: newer torch only."""
    codes = torch.zeros(16, 16, dtype=torch.float8_e4m3fn)
    try:
        torch._scaled_mm(codes, codes.t(), torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


HAS_ROWWISE = has_rowwise_product()
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


def kernel_of(name: str) -> LinearKernel[object]:
    kernel = load_kernel(CAPABILITIES[name].impl)
    assert isinstance(kernel, LinearKernel)
    assert kernel.name == name
    return kernel


def weight_of(scheme: Scheme, n: int = 48, k: int = 96, seed: int = 0) -> CanonicalWeight:
    values = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    weight = replace(oracle.quantize_weight(values, scheme.weight), scheme=scheme)
    tensors = dict(weight.tensors)
    if scheme.weight.is_integer:
        # oneDNN's products saturate on CPUs without VNNI: codes of 7 bits do not
        tensors["codes"] = (tensors["codes"] // 2).astype(np.int8)
    if scheme.activation is not None and not scheme.activation.dynamic:
        tensors["input_scale"] = np.float32([0.02]) if scheme.activation.is_integer else np.float32([0.006])
    return replace(weight, tensors=tensors)


def require_product(kernel: str, device: str) -> None:
    if device == "cpu" and kernel.startswith(("scaled_mm", "fp8_decoded")) and not HAS_ROWWISE:
        pytest.skip(f"torch {torch.__version__} has no fp8 product with scales per row on the CPU")
    if device == "cuda" and kernel.startswith("fp8_decoded"):
        from omniplat_cuda.kernels.int8_gemm import is_hopper

        if not is_hopper(torch.device("cuda", torch.cuda.current_device())):
            pytest.skip("no Hopper, or no Triton with its Gluon")


def layer_of(kernel: str, weight: CanonicalWeight, device: str, dtype: str = "bf16") -> QuantLinear:
    require_product(kernel, device)
    spec = LayerSpec("layer", "linear", weight.out_features, weight.in_features, weight.scheme, dtype=dtype)
    built = kernel_of(kernel)
    return QuantLinear(spec, built, built.prepare(to_torch(weight, device=torch.device(device)), spec))


def check(layer: QuantLinear, weight: CanonicalWeight, x: torch.Tensor) -> None:
    """Within what the declared accumulator, the re-encoding and the output's rounding allow of the oracle's layer."""
    y = layer(x)
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    assert y.shape == (*x.shape[:-1], weight.out_features)
    values = x.cpu().to(torch.float32).numpy().reshape(-1, weight.in_features)
    wanted = expected.linear(values, weight, CAPABILITIES[layer.kernel.name], DTYPES[x.dtype])
    found = y.cpu().to(torch.float64).numpy().reshape(wanted.y.shape)
    assert not (problem := excess(found, wanted.y, wanted.allowed)), str(problem)
