"""MX weights on gfx942, which has no MX: what its FP8 units hold is what was stored, bit for bit where that is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from omniplat_rocm.spec import SPEC

from omniplat.canonical import CanonicalWeight
from omniplat.capability import Capability
from omniplat.conformance.canonical_file import plan_canonical
from omniplat.conformance.checks import Named
from omniplat.conformance.files import write_model
from omniplat.conformance.subject import Subject
from omniplat.conformance.weights import stack
from omniplat.device import Device
from omniplat.emulation import emulate
from omniplat.emulation.rocm.layouts import unshuffle_weight_bytes
from omniplat.errors import InvalidCheckpointError
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.oracle import dequantize
from omniplat.reencoding import rule_for
from omniplat.runtime.kernel import load_kernel
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme

N, K, EXPERTS = 32, 128, 2
NAMES = ("reencoded_mxfp8", "reencoded_mxfp4", "reencoded_moe_mxfp8_fnuz", "reencoded_moe_mxfp4")
CAPABILITIES = {name: next(item for item in SPEC.capabilities if item.name == name) for name in NAMES}
each = pytest.mark.parametrize("name", NAMES)


def weight_of(capability: Capability, rows: int, span: int, seed: int = 0) -> CanonicalWeight:
    """Every code but NaN's, negative zero among them; the last group of each row `span` binades below the first."""
    (source,) = capability.weights
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, K if source == "mxfp8" else K // 2), dtype=np.uint8)
    if source == "mxfp8":
        codes[(codes & 0x7F) == 0x7F] = 0x80
        codes[:, 0::32] = 0x7E  # every group has the largest number
    scale = np.full((rows, K // 32), 120, np.uint8)
    scale[:, -1] -= span
    scheme = Scheme.parse(f"{source}/{source}")
    return CanonicalWeight(scheme, rows, K, {"codes": codes, "scale": scale})


def held(name: str, weight: CanonicalWeight) -> torch.Tensor:
    """f32 [N, K], or [E, N, K]: what the buffers of a prepared layer mean as the device reads them."""
    capability = CAPABILITIES[name]
    kernel = load_kernel(capability.impl)
    if capability.op == "linear":
        spec = LayerSpec("layer", "linear", N, K, weight.scheme)
        tensors = kernel.prepare(to_torch(weight), spec).tensors
        return tensors["codes"].view(torch.float8_e4m3fnuz).to(torch.float32) * tensors["scale"].reshape(-1, 1)
    spec = LayerSpec("experts", "moe", K, K, weight.scheme, moe=MoeSpec(EXPERTS, K))
    w13 = stack([weight_of(capability, 2 * K, 0, seed) for seed in range(EXPERTS)])
    tensors = kernel.prepare(to_torch(w13), to_torch(weight), spec).tensors
    codes = unshuffle_weight_bytes(tensors["w2_codes"]).view(torch.float8_e4m3fnuz)
    return codes.to(torch.float32) * tensors["w2_scale"]


def stored(name: str, span: int) -> CanonicalWeight:
    capability = CAPABILITIES[name]
    if capability.op == "linear":
        return weight_of(capability, N, span)
    return stack([weight_of(capability, K, span, seed) for seed in range(EXPERTS)])


@each
def test_what_is_held_is_what_was_stored(name: str) -> None:
    """mxfp4 over the whole span that its rule allows; mxfp8 as far as no code falls below e4m3's smallest."""
    capability = CAPABILITIES[name]
    rule = rule_for(capability.weights[0], capability.via)
    weight = stored(name, rule.max_span if rule.exact else 0)
    with emulate("rocm:gfx942"):
        found = held(name, weight)
    assert bool(found.isfinite().all()), "negative zero is NaN in FNUZ"
    np.testing.assert_array_equal(found.numpy(), dequantize(weight).astype(np.float32))


@each
def test_one_binade_more_is_refused(name: str) -> None:
    capability = CAPABILITIES[name]
    rule = rule_for(capability.weights[0], capability.via)
    with emulate("rocm:gfx942"), pytest.raises(InvalidCheckpointError, match=f"span {rule.max_span + 1} binades"):
        held(name, stored(name, rule.max_span + 1))


@pytest.mark.parametrize(
    ("name", "executes", "note"),
    [
        ("reencoded_mxfp8", "mxfp8/fp8-token", "activation-regrouped"),
        ("reencoded_mxfp4", "mxfp4/mxfp4", ""),
        ("reencoded_moe_mxfp8_fnuz", "mxfp8/fp8-token", "activation-regrouped"),
        ("reencoded_moe_mxfp4", "mxfp4/fp8-token", "activation-upgraded"),
    ],
)
def test_a_plan_says_via_and_what_inputs_become(name: str, executes: str, note: str, tmp_path: Path) -> None:
    capability = CAPABILITIES[name]
    scheme = Scheme.parse(f"{capability.weights[0]}/{capability.weights[0]}")
    written = write_model(tmp_path, Named("", capability, scheme), experts=EXPERTS if capability.op == "moe" else 0)
    plan = plan_canonical(written, Subject(SPEC, Device("rocm", "gfx942")), capability).plan
    layers = [layer for layer in plan.layers if layer.op == capability.op and layer.status != "unquantized"]
    assert layers
    for layer in layers:
        assert (layer.status, layer.kernel, layer.via, layer.executes) == ("ok", name, "fp8-channel", executes)
    notes = {item.code for item in plan.findings if item.code.startswith("activation-")}
    assert notes == ({note} if note else set())
