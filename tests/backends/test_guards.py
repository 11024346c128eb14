"""Weights that kernels of every backend refuse before they lay them out, and slots that contribute nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from omniplat.canonical import CanonicalWeight
from omniplat.capability import Capability
from omniplat.conformance.build import expert_layer, linear_layer
from omniplat.conformance.cases import Case, case_of
from omniplat.conformance.catalog import declared_weights
from omniplat.conformance.subject import Subject, find_subject
from omniplat.conformance.weights import random_weight, stack
from omniplat.emulation import emulate
from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.scheme import Scheme

DEVICES = {
    "cuda:sm90": "cuda", "npu:a5": "ascend", "rocm:gfx950": "rocm", "rocm:gfx942": "rocm", "xpu:bmg": "xpu",
}  # fmt: skip
#: Weights whose scales, or whose codes, can be NaN.
NAN = {"mxfp8": "scale", "mxfp4": "scale", "mxfp4-dual": "scale", "fp8-channel": "codes", "fp8-tensor": "codes"}


def poisoned(weight: CanonicalWeight, role: str) -> CanonicalWeight:
    """With a NaN in the last code or scale: the byte 255 is one in e8m0 and in e4m3."""
    array = np.array(weight.tensors[role])
    array.view(np.uint8).reshape(-1)[-1] = 255
    return replace(weight, tensors={**weight.tensors, role: array})


def scheme_of(capability: Capability, weight_id: str) -> Scheme:
    activation = capability.executes or capability.activations[0]
    return Scheme.parse(f"{weight_id}/{'a16' if '*' in activation else activation}")


def build(subject: Subject, case: Case, role: str) -> None:
    """Prepare a layer of the case whose (last) weight is poisoned."""
    rng, scheme = np.random.default_rng(0), case.scheme
    if case.capability.op == "linear":
        weight = poisoned(random_weight(scheme, case.n, case.k, rng), role)
        linear_layer(subject, case.capability, weight, case.dtype)
    else:
        shapes = ((2 * case.inner, case.k), (case.k, case.inner))
        w13, w2 = (stack([random_weight(scheme, n, k, rng) for _ in range(case.experts)]) for n, k in shapes)
        expert_layer(subject, case.capability, w13, poisoned(w2, role), case.dtype)


@pytest.mark.parametrize("weight_id", NAN)
@pytest.mark.parametrize("device", DEVICES)
def test_nan_is_refused_by_every_kernel(device: str, weight_id: str) -> None:
    with emulate(device) as emulation:
        subject = find_subject(DEVICES[device], emulated=emulation.device)
        for capability in subject.spec.capabilities:
            runs = not capability.archs or subject.device.arch in capability.archs
            if capability.impl and runs and declared_weights(capability, (weight_id,)):
                case = case_of(capability, scheme_of(capability, weight_id), n=64, k=512, inner=512)
                with pytest.raises(InvalidCheckpointError, match="NaN"):
                    build(subject, case, NAN[weight_id])


def written_out(weight: CanonicalWeight) -> CanonicalWeight:
    """The same with scales in f32 that are a byte each, powers of two."""
    scale = np.ldexp(1.0, weight.tensors["scale"].astype(int) - 127).astype(np.float32)
    scheme = replace(weight.scheme, weight=replace(weight.scheme.weight, scale_format="f32"))
    return replace(weight, scheme=scheme, tensors={**weight.tensors, "scale": scale})


@pytest.mark.parametrize("device", DEVICES)
def test_scales_of_blocks_may_be_powers_of_two_in_a_byte(device: str) -> None:
    """They are no numbers from 0 to 255: a layer computes what it does with the same scales in f32."""
    rng = np.random.default_rng(0)
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, ones = torch.arange(18, dtype=torch.int32).view(9, 2) % 8, torch.ones(9, 2)
    with emulate(device) as emulation:
        subject = find_subject(DEVICES[device], emulated=emulation.device)
        for capability in subject.spec.capabilities:
            runs = not capability.archs or subject.device.arch in capability.archs
            if not (capability.impl and runs and declared_weights(capability, ("fp8-block128x128",))):
                continue
            scheme = scheme_of(capability, "fp8-block128x128")
            scheme = replace(scheme, weight=replace(scheme.weight, scale_format="e8m0"))
            if capability.op == "linear":
                weight = random_weight(scheme, 256, 512, rng)
                found, wanted = (linear_layer(subject, capability, w, "bf16")(x) for w in (weight, written_out(weight)))
            else:
                shapes = ((512, 512), (512, 256))
                pair = [stack([random_weight(scheme, n, k, rng) for _ in range(8)]) for n, k in shapes]
                found, wanted = (
                    expert_layer(subject, capability, *weights, "bf16")(x, ids, ones)
                    for weights in (pair, map(written_out, pair))
                )
            assert bool(torch.isfinite(wanted).all()), capability.name
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=capability.name)


@pytest.mark.parametrize("device", ["cuda:sm90", "xpu:bmg", "rocm:gfx942"])
def test_unsigned_codes_need_a_zero_point(device: str) -> None:
    """Operators that would take another number for one that is not there are not given such weights."""
    scheme = Scheme.parse("uint4-g128/a16")
    with emulate(device) as emulation:
        subject = find_subject(DEVICES[device], emulated=emulation.device)
        weight = random_weight(scheme, 64, 512, np.random.default_rng(0))
        bare = replace(weight, tensors={role: a for role, a in weight.tensors.items() if role != "zero_point"})
        for capability in subject.spec.capabilities:
            runs = not capability.archs or subject.device.arch in capability.archs
            declares = capability.op == "linear" and declared_weights(capability, ("uint4-g128",))
            if capability.impl and runs and declares and capability.executes == "a16":
                linear_layer(subject, capability, weight, "bf16")
                with pytest.raises(UnsupportedCombinationError, match="zero point"):
                    linear_layer(subject, capability, bare, "bf16")


@pytest.mark.parametrize("device", DEVICES)
def test_a_slot_of_nobody_adds_nothing_to_what_overflowed(device: str) -> None:
    """Expert 0 overflows between its products. A slot that chooses nothing must not fetch that, not even times 0."""
    with emulate(device) as emulation:
        subject = find_subject(DEVICES[device], emulated=emulation.device)
        for capability in subject.spec.capabilities:
            runs = not capability.archs or subject.device.arch in capability.archs
            weight_id = next(iter(declared_weights(capability, ("int8-channel", "fp8-channel", "mxfp4", "mxfp8"))), "")
            if (
                capability.op != "moe"
                or not capability.impl
                or not runs
                or not weight_id
                or "f16" not in capability.dtypes
            ):
                continue
            rng, scheme = np.random.default_rng(0), scheme_of(capability, weight_id)
            case = case_of(capability, scheme, n=64, k=512, inner=512)
            w13, w2 = (
                stack([random_weight(scheme, n, k, rng) for _ in range(case.experts)])
                for n, k in ((2 * case.inner, case.k), (case.k, case.inner))
            )
            scale = np.array(w13.tensors["scale"])
            if scale.dtype == np.uint8:
                scale[0] = 140
            else:
                scale[0] = 64.0
            layer = expert_layer(subject, capability, replace(w13, tensors={**w13.tensors, "scale": scale}), w2, "f16")
            x = torch.randn(3, case.k, generator=torch.Generator().manual_seed(0)).to(torch.float16)
            weights = torch.full((3, 2), 0.5)
            alone = layer(x, torch.tensor([[1], [1], [1]], dtype=torch.int32), weights[:, :1])
            beside = layer(x, torch.tensor([[1, -1]] * 3, dtype=torch.int32), weights)
            assert bool(torch.isfinite(alone).all()), capability.name
            torch.testing.assert_close(beside, alone, msg=f"{capability.name} on {device}")
