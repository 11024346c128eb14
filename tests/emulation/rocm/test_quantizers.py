"""Emulated quantizers and layouts of AITER against bytes computed from its sources without omniplat's code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from omniplat.emulation import emulate
from omniplat.emulation.rocm.layouts import separate_gate_up, unshuffle_scale_bytes, unshuffle_weight_bytes
from omniplat.emulation.rocm.quantizers import mxfp4_scale, mxfp8

GOLDEN = load_file(Path(__file__).resolve().parents[2] / "data" / "emulation" / "vendor_quantizers.safetensors")
INPUT = GOLDEN["input"]


@pytest.mark.parametrize(
    ("version", "rule"),
    [("0.1.13.post1", "even"), ("0.1.14", "even"), ("0.1.16", "up"), ("0.1.18", "up"), ("0.1.19", "up")],
)
def test_the_rule_for_scales_changed_with_a_release(version: str, rule: str) -> None:
    with emulate("rocm:gfx950", version=version):
        import aiter

        codes, scale = aiter.get_hip_quant(aiter.QuantType.per_1x32)(INPUT)
    assert torch.equal(codes.view(torch.uint8), GOLDEN[f"aiter_{rule}.codes"])
    assert torch.equal(scale.view(torch.uint8), GOLDEN[f"aiter_{rule}.scale"])
    other = {"even": "up", "up": "even"}[rule]
    assert not torch.equal(scale.view(torch.uint8), GOLDEN[f"aiter_{other}.scale"]), "the data tells no rule"


@pytest.mark.parametrize("version", ["0.1.13.post1", "0.1.19"])
def test_tritons_rule_did_not_change(version: str) -> None:
    with emulate("rocm:gfx950", version=version):
        from aiter.ops.triton.quant import dynamic_mxfp4_quant

        codes, scale = dynamic_mxfp4_quant(INPUT)
    assert torch.equal(codes, GOLDEN["aiter_even.codes"])
    assert torch.equal(scale, GOLDEN["aiter_even.scale"])
    assert scale.stride() == (1, len(INPUT)), "scales lie column by column"


@pytest.mark.parametrize("columns", [4, 36, 48, 64, 100])
def test_triton_scales_a_last_group_that_is_not_whole(columns: int) -> None:
    """ceil(K/32) scales: those of the whole groups do not change, the last one is that of what is there."""
    x = INPUT[:, :columns].contiguous()
    whole = columns // 32 * 32
    with emulate("rocm:gfx950") as emulation:
        from aiter.ops.triton.quant import dynamic_mxfp4_quant

        codes, scale = dynamic_mxfp4_quant(x)
        padded_codes, padded_scale = dynamic_mxfp4_quant(torch.nn.functional.pad(x, (0, -columns % 32)))
    assert codes.shape == (len(x), columns // 2)
    assert scale.shape == (len(x), -(-columns // 32))
    assert torch.equal(codes[:, : whole // 2], GOLDEN["aiter_even.codes"][:, : whole // 2])
    assert torch.equal(scale[:, : whole // 32], GOLDEN["aiter_even.scale"][:, : whole // 32])
    assert torch.equal(codes, padded_codes[:, : columns // 2])
    assert torch.equal(scale, padded_scale)
    assert not emulation.violations


def test_what_is_not_finite_has_no_scale() -> None:
    amax = torch.tensor([torch.inf, torch.nan])
    for rule in ("ceil", "even"):
        assert mxfp4_scale(amax, rule).tolist() == [255, 255]


@pytest.mark.parametrize(("layout", "name"), [((16, 16), "16x16"), ((32, 16), "32x16")])
def test_shuffled_weights(layout: tuple[int, int], name: str) -> None:
    plain = GOLDEN["aiter_shuffle.input"]
    with emulate("rocm:gfx950"):
        from aiter.ops.shuffle import shuffle_weight

        shuffled = shuffle_weight(plain, layout)
    assert torch.equal(shuffled, GOLDEN[f"aiter_shuffle.{name}"])
    assert shuffled.is_shuffled
    assert not hasattr(shuffled.view(torch.int8), "is_shuffled")
    assert torch.equal(unshuffle_weight_bytes(shuffled, layout), plain)


@pytest.mark.parametrize(("gate_up", "name"), [(True, "gate_up"), (False, "down")])
def test_weights_and_scales_with_gate_and_up_in_turns(gate_up: bool, name: str) -> None:
    plain, scales = GOLDEN["aiter_a16w4.input"], GOLDEN["aiter_a16w4_scales.input"]
    with emulate("rocm:gfx950"):
        from aiter.ops.shuffle import shuffle_scale_a16w4, shuffle_weight_a16w4

        shuffled = shuffle_weight_a16w4(plain, 16, gate_up)
        shuffled_scales = shuffle_scale_a16w4(scales, len(plain), gate_up)
    assert torch.equal(shuffled, GOLDEN[f"aiter_a16w4.{name}"])
    assert torch.equal(shuffled_scales, GOLDEN[f"aiter_a16w4_scales.{name}"])
    assert shuffled.is_shuffled
    back = unshuffle_weight_bytes(shuffled)
    assert torch.equal(separate_gate_up(back) if gate_up else back, plain)


def test_mxfp8_of_experts() -> None:
    codes, scale = mxfp8(INPUT)
    assert torch.equal(codes.view(torch.uint8), GOLDEN["aiter_mxfp8.codes"])
    assert torch.equal(scale, GOLDEN["aiter_mxfp8.scale"])


def test_shuffled_scales_are_padded_with_what_nobody_wrote() -> None:
    plain = GOLDEN["aiter_scales.input"]
    with emulate("rocm:gfx950"):
        from aiter.utility.fp4_utils import e8m0_shuffle

        shuffled = e8m0_shuffle(plain)
    assert torch.equal(shuffled, GOLDEN["aiter_scales.shuffled"])
    assert torch.equal(unshuffle_scale_bytes(shuffled, *plain.shape), plain)
    assert int((shuffled == 255).sum()) == shuffled.numel() - plain.numel()
