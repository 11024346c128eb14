"""bitsandbytes' weights on the cpu backend: the two tables of 4 bits, and LLM.int8 as weight-only arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.layer import LayerSpec
from omniplat.reference.kernels import DequantLinear, LlmInt8Linear
from omniplat.reference.spec import SPEC
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme


@pytest.mark.parametrize("scheme", ["nf4-b64/a16", "fp4bnb-b64/a16", "nf4-b128/a16"])
def test_every_code_of_the_table_is_decoded(scheme: str) -> None:
    random = np.random.default_rng(7)
    parsed = Scheme.parse(scheme)
    group = parsed.weight.group_size
    tensors = {
        "codes": random.integers(0, 256, (48, 128), dtype=np.uint8),
        "scale": random.uniform(0.1, 2, (48, 256 // group)).astype(np.float32),
    }
    weight = CanonicalWeight(parsed, 48, 256, tensors)
    x = random.standard_normal((5, 256)).astype(np.float32)
    _compare(DequantLinear(), weight, x, oracle.linear(x, weight))


def test_llm_int8_leaves_activations_alone() -> None:
    random = np.random.default_rng(8)
    tensors = {
        "codes": random.integers(-127, 128, (32, 64), dtype=np.int8),
        "scale": random.uniform(0.001, 0.1, (32, 1)).astype(np.float32),
    }
    weight = CanonicalWeight(Scheme.parse("int8-bnb/int8-bnb"), 32, 64, tensors)
    x = random.standard_normal((3, 64)).astype(np.float32)
    # a column far beyond LLM.int8's threshold for outliers
    x[:, 5] = 40
    _compare(LlmInt8Linear(), weight, x, oracle.linear(x, weight, activation=False))
    (capability,) = [c for c in SPEC.capabilities if c.impl.endswith(":LlmInt8Linear")]
    assert capability.executes == "a16"


def _compare(kernel: DequantLinear, weight: CanonicalWeight, x: np.ndarray, expected: np.ndarray) -> None:
    spec = LayerSpec("m", "linear", weight.out_features, weight.in_features, weight.scheme, dtype="f32")
    layer = QuantLinear(spec, kernel, kernel.prepare(to_torch(weight), spec), None)
    got = layer(torch.from_numpy(x)).double().numpy()
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
