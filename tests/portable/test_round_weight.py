"""Weights that are rounded where their layers will be: the oracle's arrays, byte for byte, however they are cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import omniplat
from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.modules import quantize
from omniplat.online import METHODS, parse_method
from omniplat.portable import round_weight
from omniplat.runtime.online import round_to_nearest
from omniplat.runtime.tensors import to_array
from omniplat.scheme import Scheme, parse_weight_id
from tests.support.triton import needs_cuda

DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
WEIGHTS = (
    *("fp8-tensor", "fp8-channel", "fp8-block128x128", "fp8-g128", "int8-tensor", "int8-channel", "int8-g32"),
    *("int4-channel", "int4-g32", "int4-g128", "mxfp8", "mxfp4", "mxfp4-dual", "nvfp4"),
)
FLOAT_RULES = ("", "absmax", "half-range", "absmax-clamped")
POWER_RULES = ("", "floor", "even", "even-m1", "ceil", "rceil")


def scheme_of(weight: str, rule: int) -> Scheme:
    quant = parse_weight_id(weight)
    rules = POWER_RULES if quant.scale_format == "e8m0" else FLOAT_RULES
    return Scheme(replace(quant, scale_rule=rules[rule % len(rules)]))


def values(rows: int, columns: int, seed: int, scale: float) -> torch.Tensor:
    """Gaussian, with groups of zeros and of numbers far below the others, ties, and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, columns, generator=generator)
    found[0, :128] = 0.0
    found[-1] = torch.randint(-16, 17, (columns,), generator=generator) / 4.0
    found[rows // 2, : columns // 2] *= 2.0**-20
    found[:, 1::7] = -0.0
    return found * scale


def joined(runs: list[tuple[int, CanonicalWeight]], scheme: Scheme) -> dict[str, np.ndarray]:
    """Arrays of the whole; runs lie one behind the other."""
    row = 0
    for start, weight in runs:
        assert (start, weight.scheme) == (row, scheme)
        row += weight.out_features
    return {role: np.concatenate([weight.tensors[role] for _, weight in runs]) for role in runs[0][1].tensors}


@pytest.mark.parametrize("device", DEVICES)
@given(
    weight=st.sampled_from(WEIGHTS),
    rule=st.integers(0, 5),
    rows=st.sampled_from([1, 3, 130, 257]),
    columns=st.sampled_from([512, 640, 1536]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    scale=st.sampled_from([1.0, 2.0**-7, 2.0**-100, 2.0**-130, 2.0**100]),
    runs=st.sampled_from([1, 5, 1 << 24]),
    seed=st.integers(0, 3),
)
def test_arrays_are_the_oracles(
    device: str, weight: str, rule: int, rows: int, columns: int, dtype: torch.dtype, scale: float, runs: int, seed: int
) -> None:
    scheme = scheme_of(weight, rule)
    held = values(rows, columns, seed, scale).clamp(-60000, 60000).to(dtype)
    assert not round_weight.why_not(scheme.weight)
    found = joined(list(round_weight.round_on_device(held.to(device), scheme, elements=runs * columns)), scheme)
    wanted = oracle.quantize_weight(to_array(held.float()), scheme.weight).tensors
    assert found.keys() == wanted.keys()
    for role, array in wanted.items():
        assert (found[role].dtype, found[role].shape) == (array.dtype, array.shape), role
        np.testing.assert_array_equal(as_bytes(found[role]), as_bytes(array), err_msg=role)


def as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"bitsandbytes"}))
def test_every_method_is_rounded_on_the_device(name: str) -> None:
    """But bitsandbytes', which rounds by itself."""
    for options in ({}, {"granularity": "channel"}, {"weight_block_size": [128, 128]}) if name == "fp8" else ({},):
        assert round_weight.why_not(parse_method({"method": name, **options}).weight) == ""


def test_other_rounding_is_left_to_the_oracle() -> None:
    quant = parse_weight_id("int8-channel")
    others = [replace(quant, rounding="floor"), replace(quant, symmetric=False), parse_weight_id("nf4-b64")]
    others += [replace(parse_weight_id(weight), scale_rule="absmax-reciprocal") for weight in ("fp8-tensor", "nvfp4")]
    for other in others:
        assert round_weight.why_not(other)


def test_devices_without_cuda_get_what_the_cpu_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert round_weight.rounding_on(torch.device("cpu")) is round_to_nearest
    assert round_weight.rounding_on(torch.device("cuda")) is not round_to_nearest
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert round_weight.rounding_on(torch.device("cuda")) is round_to_nearest


@needs_cuda
@pytest.mark.parametrize("name", sorted(set(METHODS) - {"bitsandbytes"}))
def test_a_model_gets_the_same_layers_as_from_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its weights lie there already or are brought."""
    torch.manual_seed(0)
    halves = [torch.nn.Sequential(torch.nn.Linear(512, 256, bias=True)).bfloat16() for _ in range(3)]
    for half in halves[1:]:
        half.load_state_dict(halves[0].state_dict())
    method = {"method": name, "num_bf16_fallback_layers": 0} if name == "mxfp4_dualscale" else name
    models = (halves[0].cuda(), halves[1], halves[2])
    for model in models:
        if model is halves[2]:
            monkeypatch.setattr(quantize, "rounding_on", lambda device: round_to_nearest)
        omniplat.quantize_model(model, method, "cuda", allow=("activation-change", "dequantize"), compile_for=())
    first, *others = (dict(model.named_buffers()) for model in models)
    assert first
    for other in others:
        assert other.keys() == first.keys()
        for key, buffer in first.items():
            assert torch.equal(other[key].cpu().view(torch.uint8), buffer.cpu().view(torch.uint8)), key
