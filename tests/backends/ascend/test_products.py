"""What single products of the backend hold of their operands, beyond the bounds that the conformance suite derives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from omniplat_ascend.kernels import layouts
from omniplat_ascend.kernels.experts import EXPERTS, Groups

from omniplat.emulation import Emulation
from omniplat.layer import LayerSpec
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import Scheme

Emulate = Callable[[str], Emulation]

E, N, K, M = 3, 24, 512, 6
COUNTS = (2, 0, 4)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def groups() -> Groups:
    counts = torch.tensor(COUNTS)
    return Groups(counts, torch.repeat_interleave(torch.arange(E), counts))


def int4(scale: torch.Tensor, weight_id: str) -> tuple[WeightTensors, torch.Tensor]:
    """A stack of int4 codes under `scale` [E, N, G], and its values in float64."""
    codes = torch.randint(-8, 8, (E, N, K), generator=generator(), dtype=torch.int8)
    packed = ((codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)).view(torch.uint8)
    values = codes.double() * scale.double().repeat_interleave(K // scale.shape[2], dim=2)
    weight = WeightTensors(Scheme.parse(f"{weight_id}/int8-token"), N, K, {"codes": packed, "scale": scale}, E)
    return weight, values


@pytest.mark.parametrize(("weight_id", "count"), [("int4-channel", 1), ("int4-g256", 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int4_by_int8_holds_rows_of_every_size(
    weight_id: str, count: int, dtype: torch.dtype, omniplat_emulate: Emulate
) -> None:
    """Rows of sizes from 2^-40 to 2^20, some of zeros: each sum is off by roundings of its halves to f16 alone."""
    sizes = torch.exp2(torch.linspace(-40, 20, N)).reshape(1, N, 1)
    scale = sizes * (torch.rand((E, N, count), generator=generator()) + 0.5)
    scale[1], scale[2, 3] = 0.0, 0.0
    weight, values = int4(scale, weight_id)
    x = torch.randn((M, K), generator=generator()).to(dtype)
    emulation = omniplat_emulate("npu:a2")
    held = layouts.int4_by_int8(weight)
    codes, token = EXPERTS["int4_a8"].quantize(x, "rint", dtype)
    assert token is not None
    inputs = codes.double()
    found = EXPERTS["int4_a8"].multiply((codes, token), held, groups(), dtype).double()
    expert = groups().expert
    exact = torch.einsum("mk,mnk->mn", inputs, values[expert])
    low = torch.remainder(inputs, 16)
    halves = torch.stack([inputs - low, low - 8])
    sums = torch.einsum("hmgk,mngk->hmng", halves.unflatten(2, (2, 256)), values[expert].unflatten(2, (2, 256)))
    all_of = torch.einsum("mk,mnk->mn", inputs.abs() + 8, values[expert].abs())
    # Each group is rounded, and so is each of two additions; the output once; the rest is in f32.
    allowed = 2.0**-11 * (2 * sums.abs().sum((0, 3)) + exact.abs()) + 2.0**-22 * all_of
    allowed = allowed * token.double().unsqueeze(1)
    assert bool(((found - exact * token.double().unsqueeze(1)).abs() <= allowed).all())
    assert not emulation.violations


def test_the_longest_sums_of_int4_by_int8_stay_within_f16(omniplat_emulate: Emulate) -> None:
    """Every input the largest, every weight the lowest: the longest K that the operator takes does not overflow."""
    depth = 18432
    lowest = torch.full((1, 8, depth // 2), 0x88, dtype=torch.uint8)
    scale = torch.full((1, 8, 1), 0.9)
    scheme = Scheme.parse("int4-channel/int8-token")
    weight = WeightTensors(scheme, 8, depth, {"codes": lowest, "scale": scale}, 1)
    omniplat_emulate("npu:a2")
    held = layouts.int4_by_int8(weight)
    x = torch.ones((2, depth), dtype=torch.bfloat16)
    rows = EXPERTS["int4_a8"].quantize(x, "rint", torch.bfloat16)
    one = Groups(torch.tensor([2]), torch.zeros(2, dtype=torch.int64))
    found = EXPERTS["int4_a8"].multiply(rows, held, one, torch.bfloat16).double()
    wanted = torch.full_like(found, -8 * 0.9 * depth)
    assert bool(found.isfinite().all())
    assert bool(((found - wanted) / wanted).abs().max() < 0.05)


def test_fp4_that_has_lost_its_format_is_cast_anew(omniplat_emulate: Emulate) -> None:
    """A copy of the prepared weight gives the same product, and what it is made of is what was stored."""
    codes = torch.randint(0, 256, (E, N, K // 2), dtype=torch.uint8, generator=generator())
    scale = torch.randint(118, 130, (E, N, K // 32), dtype=torch.uint8, generator=generator())
    weight = WeightTensors(Scheme.parse("mxfp4/a16"), N, K, {"codes": codes, "scale": scale}, E)
    x = torch.randn((M, K), generator=generator()).to(torch.bfloat16)
    emulation = omniplat_emulate("npu:a5")
    held = layouts.fp4_by_sixteen_bits(weight, LayerSpec("m", "moe", N, K, weight.scheme))
    product = EXPERTS["mxfp4_a16"]
    rows = product.quantize(x, "", torch.bfloat16)
    found = product.multiply(rows, held, groups(), torch.bfloat16)
    moved = {name: tensor.clone() for name, tensor in held.items()}
    assert torch.ops.npu.get_npu_format(moved["codes"]) != torch.ops.npu.get_npu_format(held["codes"])
    assert torch.equal(product.multiply(rows, moved, groups(), torch.bfloat16), found)
    assert not emulation.violations
