"""Every emulated product: right where the call is right, an error or a recorded violation where one thing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from omniplat.conformance.tolerances import UNITS, gamma
from omniplat.emulation import VendorError, emulate
from omniplat.emulation.ascend.layout import FRACTAL_NZ, npu_format
from omniplat.emulation.ascend.quantize import pack_int4
from tests.emulation.ascend.calls import CALLS, COUNTS, Call, E, K, M, N, e8m0, f32, fp4, fp8, int4, int8

Change = Callable[[Call], dict[str, Any]]


def arch_of(name: str) -> str:
    return {"int4": "a3"}.get(name, "a5" if "fp" in name or name == "dual" else "a2")


@pytest.mark.parametrize("name", CALLS)
def test_right_calls_compute_what_they_say(name: str) -> None:
    with emulate(f"npu:{arch_of(name)}") as emulation:
        call = CALLS[name]()
        assert call.arch == emulation.arch
        found = call.run()
    found = found[0] if isinstance(found, list) else found
    assert found.dtype == call.output
    wanted = call.expected.numpy()
    # Sums of exact products: f32 accumulation, a handful of scales, one rounding to the output.
    unit = {torch.bfloat16: UNITS["bf16"], torch.float16: UNITS["f16"]}.get(call.output, UNITS["f32"])
    allowed = gamma(1024 + 8, UNITS["f32"]) * np.abs(wanted).max() + unit * np.abs(wanted)
    assert (np.abs(found.double().numpy() - wanted) <= allowed).all()
    assert not emulation.violations


def view(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, transposed in memory the other way."""
    return tensor.transpose(-2, -1).contiguous().transpose(-2, -1)


#: (call, what is wrong, the arguments that make it so, what the message says)
WRONG: tuple[tuple[str, str, Change, str], ...] = (
    ("int8", "K differs", lambda c: {"x2": int8(K + 8, N)}, "K is"),
    ("int8", "x1 not contiguous", lambda c: {"x1": view(c.arguments["x1"])}, "contiguous"),
    ("int8", "x2 neither", lambda c: {"x2": int8(K, 2 * N)[:, ::2]}, "neither contiguous"),
    ("int8", "operands of two dtypes", lambda c: {"x2": c.arguments["x2"].to(torch.int32)}, "x1 is"),
    ("int8", "scale [N, 1]", lambda c: {"scale": f32(N, 1)}, "scale is"),
    ("int8", "scale of another N", lambda c: {"scale": f32(N - 1)}, "scale is"),
    ("int8", "scale f16", lambda c: {"scale": f32(N).half()}, "scale cannot be"),
    ("int8", "pertoken [M, 1]", lambda c: {"pertoken_scale": f32(M, 1)}, "pertoken_scale is"),
    ("int8", "pertoken bf16", lambda c: {"pertoken_scale": f32(M).bfloat16()}, "pertoken_scale is"),
    ("int8", "bias f64", lambda c: {"bias": f32(N).double()}, "bias is"),
    ("int8", "bias f16 beside bf16", lambda c: {"bias": f32(N).half()}, "bias is"),
    ("int8", "output f32", lambda c: {"output_dtype": 6}, "output cannot be"),
    ("int8", "output of no dtype", lambda c: {"output_dtype": 999}, "is no dtype"),
    ("int8", "scale bf16 for f16", lambda c: {"scale": f32(N).bfloat16(), "output_dtype": 5, "bias": None}, "scale is"),
    ("int8", "groups", lambda c: {"group_sizes": [1, 1, 32]}, "group_sizes"),
    ("int8", "fp8 on a2", lambda c: {"x1": fp8(M, K), "x2": fp8(K, N), "bias": None}, "for a5"),
    ("int8", "axis too long", lambda c: {"x2": torch.zeros((K, 65536), dtype=torch.int8)}, "axis of 65536"),
    ("int4", "a bias", lambda c: {"bias": f32(N)}, "bias is"),
    ("int4", "x2 as it is stored", lambda c: {"x2": c.arguments["x2"].t()}, "K is"),
    ("int4", "scale bf16", lambda c: {"scale": f32(N).bfloat16()}, "scale is"),
    ("static", "a float bias", lambda c: {"bias": f32(N)}, "bias is"),
    ("static", "scale bf16", lambda c: {"output_dtype": 15, "scale": f32(N).half()}, "scale cannot be"),
    ("fp8", "scale bf16", lambda c: {"scale": f32(N).bfloat16()}, "scale is"),
    ("fp8", "operands of two dtypes", lambda c: {"x2": c.arguments["x2"].to(torch.float8_e5m2)}, "x1 is"),
    ("fp8-block", "scale as it is stored", lambda c: {"scale": c.arguments["scale"].t()}, "scale is"),
    ("fp8-block", "scale not transposed", lambda c: {"scale": c.arguments["scale"].contiguous()}, "transposed differ"),
    ("fp8-block", "weight not transposed", lambda c: {"x2": c.arguments["x2"].contiguous()}, "transposed differently"),
    ("fp8-block", "scale per row", lambda c: {"scale": f32(176)}, "scale is"),
    ("fp8-block", "scale bf16", lambda c: {"scale": c.arguments["scale"].bfloat16()}, "scale is"),
    ("fp8-block", "one scale per token", lambda c: {"pertoken_scale": f32(M)}, "pertoken_scale is"),
    ("fp8-block", "no token scale", lambda c: {"pertoken_scale": None}, "missing"),
    ("fp8-block", "a bias", lambda c: {"bias": f32(176)}, "takes no bias"),
    ("fp8-block", "groups of 64", lambda c: {"group_sizes": [1, 64, 64]}, "group_sizes is"),
    ("fp8-block", "no groups", lambda c: {"group_sizes": None}, "scale is"),
    ("fp8-block", "output int32", lambda c: {"output_dtype": 3}, "output cannot be"),
    ("mxfp8", "scale not transposed", lambda c: {"scale": c.arguments["scale"].contiguous()}, "transposed differently"),
    ("mxfp8", "weight not transposed", lambda c: {"x2": c.arguments["x2"].contiguous()}, "transposed differently"),
    ("mxfp8", "scale of [N, K/64, 2]", lambda c: {"scale": c.arguments["scale"].transpose(0, 1)}, "transposed"),
    ("mxfp8", "scales not in pairs", lambda c: {"pertoken_scale": e8m0(M, 4)}, "pairs"),
    ("mxfp8", "scale without its dtype", lambda c: {"scale_dtype": None}, "group_sizes"),
    ("mxfp8", "token scale without its dtype", lambda c: {"pertoken_scale_dtype": None}, "e8m0"),
    ("mxfp8", "no token scale", lambda c: {"pertoken_scale": None}, "missing"),
    ("mxfp8", "no groups", lambda c: {"group_sizes": None}, "group_sizes"),
    ("mxfp8", "weight-only groups", lambda c: {"group_sizes": [0, 0, 32]}, "group_sizes"),
    ("mxfp8", "bias bf16", lambda c: {"bias": f32(N).bfloat16()}, "bias is"),
    ("mxfp8", "uint8 codes", lambda c: {"x1": c.arguments["x1"].view(torch.uint8)}, "x1 is"),
    ("mxfp4", "x1 without its dtype", lambda c: {"x1_dtype": None}, "x1 is"),
    ("mxfp4", "x2 without its dtype", lambda c: {"x2_dtype": None}, "x1 is"),
    ("mxfp4", "unpacked codes", lambda c: {"x1": fp4(M, 2 * K)}, "K is"),
    ("mxfp4", "float8 carrier", lambda c: {"x1": fp8(M, K // 2)}, "lies in bytes"),
    ("mxfp4", "scale not transposed", lambda c: {"scale": c.arguments["scale"].contiguous()}, "transposed differently"),
    ("mxfp4-a8", "bias f32", lambda c: {"bias": f32(1, N)}, "bias is"),
    ("mxfp4-a8", "bias [N]", lambda c: {"bias": f32(N).bfloat16()}, "bias is"),
    ("mxfp4-a8", "weight not transposed", lambda c: _straight(c), "has to be transposed"),
    ("mxfp4-a8", "output f32", lambda c: {"output_dtype": 6, "bias": None}, "output cannot be"),
    ("dual", "no NZ", lambda c: {"x2": c.arguments["x2"].clone()}, "FRACTAL_NZ"),
    ("dual", "NZ lost by a copy", lambda c: {"x2": c.arguments["x2"].to("cpu", copy=True)}, "FRACTAL_NZ"),
    ("dual", "level 0 as quantized", lambda c: {"x2_level0_scale": f32(N, 2)}, "x2_level0_scale"),
    ("dual", "level 1 flat", lambda c: {"x2_level1_scale": e8m0(N, 32)}, "x2_level1_scale"),
    ("dual", "bias bf16", lambda c: {"bias": f32(N).bfloat16()}, "bias is"),
    ("dual", "output f32", lambda c: {"output_dtype": 6}, "output cannot be"),
    ("weight-only", "scale f32", lambda c: {"antiquant_scale": c.arguments["antiquant_scale"].float()}, "antiquant"),
    ("weight-only", "scale [N, G]", lambda c: {"antiquant_scale": view(c.arguments["antiquant_scale"]).t()}, "needed"),
    ("weight-only", "groups of 48", lambda c: {"antiquant_group_size": 48}, "groups of 48"),
    ("weight-only", "one group", lambda c: {"antiquant_group_size": K}, "groups of 128"),
    ("weight-only", "bias bf16", lambda c: {"bias": f32(N).bfloat16()}, "bias is"),
    ("weight-only", "x f32", lambda c: {"x": c.arguments["x"].float()}, "x is"),
    ("weight-only", "no rows", lambda c: {"x": c.arguments["x"][:0]}, "empty"),
    ("weight-only", "weight as it is stored", lambda c: {"weight": c.arguments["weight"].t()}, "K is"),
    ("weight-only", "offset f32", lambda c: {"antiquant_offset": torch.zeros(4, N)}, "antiquant_offset"),
    ("grouped-int8", "groups miss a row", lambda c: {"group_list": torch.tensor((2, 0, 2))}, "covers 4 of 5"),
    ("grouped-int8", "cumulative as counts", lambda c: {"group_list": torch.tensor((2, 2, 5))}, "covers 9 of 5"),
    ("grouped-int8", "int32 groups", lambda c: {"group_list": torch.tensor(COUNTS, dtype=torch.int32)}, "int32"),
    ("grouped-int8", "a group too many", lambda c: {"group_list": torch.tensor((2, 0, 2, 1))}, "for 3 weights"),
    ("grouped-int8", "two weights", lambda c: {"weight": c.arguments["weight"] * 2}, "list of 2"),
    ("grouped-int8", "fp8 named", lambda c: {"x_dtype": 292, "weight_dtype": 292}, "only fp4 is named"),
    ("grouped-int8", "int32 with scales", lambda c: {"scale": [f32(E, N)]}, "takes no scales"),
    ("grouped-int8-scaled", "f32 scale for bf16 on a2", lambda c: {"output_dtype": 15}, "for torch.bfloat16 on a2"),
    ("grouped-int8-scaled", "scale [E, N, 1]", lambda c: {"scale": [f32(E, N, 1)]}, "scale is"),
    ("grouped-mxfp4", "scale not transposed", lambda c: _contiguous(c, "scale"), "transposed differently"),
    ("grouped-mxfp4", "scale without its dtype", lambda c: {"scale_dtype": None}, "e8m0"),
    ("grouped-mxfp4", "bias bf16", lambda c: {"bias": [f32(E, N).bfloat16()]}, "bias is not"),
    ("grouped-mxfp4-a8", "scale in place of antiquant", lambda c: _as_scale(c), "antiquant_scale"),
    ("grouped-mxfp4-a8", "output f32", lambda c: {"output_dtype": 6}, "output cannot be"),
    ("grouped-mxfp4-a16", "no NZ", lambda c: {"weight": [c.arguments["weight"][0].clone()]}, "FRACTAL_NZ"),
    ("grouped-mxfp4-a16", "an offset", lambda c: {"antiquant_offset": c.arguments["antiquant_scale"]}, "no antiquant"),
    ("grouped-mxfp4-a16", "scale [E, N, G]", lambda c: {"antiquant_scale": [e8m0(E, N, 4)]}, "antiquant_scale is"),
    ("grouped-mxfp4-a16", "scale in pairs", lambda c: {"antiquant_scale": [e8m0(E, 2, N, 2)]}, "antiquant_scale is"),
    ("grouped-mxfp4-a16", "scale a view", lambda c: {"antiquant_scale": [e8m0(E, N, 4).transpose(1, 2)]}, "transposed"),
    ("grouped-mxfp4-a16", "scale bf16", lambda c: {"antiquant_scale": [f32(E, 4, N).bfloat16()]}, "needed uint8"),
    ("grouped-mxfp4-a16", "weight transposed", lambda c: _transposed_nz(c), "cannot be transposed"),
    ("grouped-mxfp4-a16", "output f16", lambda c: {"output_dtype": 5}, "output cannot be"),
    ("grouped-int4-a8", "no bias", lambda c: {"bias": None}, "needs a bias"),
    ("grouped-int4-a8", "bias f16", lambda c: {"bias": [f32(E, N).half()]}, "bias is"),
    ("grouped-int4-a8", "scale f32", lambda c: {"scale": [f32(E, 2, N)]}, "needed int64"),
    ("grouped-int4-a8", "one scale per column", lambda c: {"scale": [c.arguments["scale"][0][:, 0]]}, "needed int64"),
    ("grouped-int4-a8", "no scale per token", lambda c: {"per_token_scale": None}, "needs scale"),
    ("grouped-int4-a8", "token scale bf16", lambda c: {"per_token_scale": [f32(M).bfloat16()]}, "per_token_scale is"),
    ("grouped-int4-a8", "packed along K", lambda c: _packed_along_k(c), "cannot be transposed"),
    ("grouped-int4-a8", "K of half a group", lambda c: _half_a_group(c), "multiple of 256"),
    ("grouped-int4-a8", "output f32", lambda c: {"output_dtype": 6}, "output cannot be"),
    ("grouped-weight-only", "no offset on a2", lambda c: {"antiquant_offset": None}, "offset is missing"),
    ("grouped-weight-only", "scale f32", lambda c: {"antiquant_scale": [f32(E, 4, N)]}, "antiquant_scale is"),
    ("grouped-weight-only", "int8 in groups", lambda c: {"weight": [int8(E, K, N)]}, "one scale per column"),
)


def _straight(call: Call) -> dict[str, Any]:
    """Packed along N, as a weight that is not transposed would be."""
    return {"x2": fp4(K, N), "scale": call.arguments["scale"].contiguous()}


def _transposed_nz(call: Call) -> dict[str, Any]:
    packed = call.arguments["weight"][0]
    return {"weight": [torch.ops.npu.npu_format_cast(packed.transpose(1, 2).contiguous(), 29).transpose(1, 2)]}


def _packed_along_k(call: Call) -> dict[str, Any]:
    return {"weight": [pack_int4(torch.zeros((E, N, 512), dtype=torch.int8)).transpose(1, 2)]}


def _half_a_group(call: Call) -> dict[str, Any]:
    return {
        "x": [call.arguments["x"][0][:, :384].contiguous()],
        "weight": [call.arguments["weight"][0][:, :384].contiguous()],
    }


def _contiguous(call: Call, name: str) -> dict[str, Any]:
    return {name: [tensor.contiguous() for tensor in call.arguments[name]]}


def _as_scale(call: Call) -> dict[str, Any]:
    return {"scale": call.arguments["antiquant_scale"], "antiquant_scale": None, "scale_dtype": 293}


@pytest.mark.parametrize(("name", "wrong", "change", "problem"), WRONG, ids=[f"{n}: {w}" for n, w, _, _ in WRONG])
def test_wrong_calls_fail(name: str, wrong: str, change: Change, problem: str) -> None:
    with emulate(f"npu:{arch_of(name)}"):
        call = CALLS[name]()
        with pytest.raises(VendorError, match=problem):
            call.run(**change(call))


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_those_of_the_schema(name: str) -> None:
    """An unknown name, a missing tensor and a tensor for a number are the dispatcher's errors."""
    with emulate(f"npu:{arch_of(name)}"):
        call = CALLS[name]()
        first = "x" if "x" in call.arguments else "x1"
        for changed in ({**call.arguments, "transpose": True}, {k: v for k, v in call.arguments.items() if k != first}):
            with pytest.raises(RuntimeError, match=r"transpose|missing value|expected at most"):
                getattr(torch.ops.npu, call.op)(**changed)


@pytest.mark.parametrize("name", [name for name in CALLS if arch_of(name) == "a5"])
def test_a5_is_needed(name: str) -> None:
    with emulate("npu:a5"):
        call = CALLS[name]()
    with emulate("npu:a3"), pytest.raises(VendorError, match="a5"):
        call.run()


def test_what_would_be_silently_wrong_is_recorded() -> None:
    with emulate("npu:a5") as emulation:
        CALLS["fp8"]().run(bias=f32(N))
        CALLS["static"]().run(scale=torch.full((N,), 1.0 + 2.0**-12))
        x = torch.ones((2, 512), dtype=torch.bfloat16)
        torch.ops.npu.npu_dynamic_dual_level_mx_quant(x, smooth_scale=torch.ones(512, dtype=torch.bfloat16))
    rules = ["fp8-bias", "scale-cut", "smooth-scale"]
    assert [violation.rule for violation in emulation.violations] == rules


def test_f16_outputs_without_a_token_scale_lose_bits_of_the_scale() -> None:
    """As on the device: 19 bits are left of it. A scale that needs no more is no violation."""
    with emulate("npu:a2") as emulation:
        call = CALLS["static"]()
        whole = call.run()
        assert not emulation.violations
        assert torch.equal(whole, call.run(scale=torch.full((N,), (1.0 + 2.0**-12) * 2.0**-12)))
        assert [violation.rule for violation in emulation.violations] == ["scale-cut"]


def test_int4_by_int8_adds_groups_up_in_f16() -> None:
    """By the vendor's golden script, in NumPy: halves of inputs, each group rounded to f16, and what is overwritten."""
    x, weight = int8(M, 512), int4(E, 512, N)
    scale, token = f32(E, 2, N) * 2.0**-6, f32(M)
    dense = weight.float() * scale.repeat_interleave(256, dim=1)
    halves = np.stack([x.numpy() // 16, (x.numpy() & 15) - 8]).astype(np.int32)
    expert = np.repeat(np.arange(E), COUNTS)
    tiles = weight.numpy().astype(np.int32).reshape(E, 2, 256, N)[expert]
    sums = np.zeros((2, M, N), np.float16)
    for group in range(2):
        exact = np.einsum("hmk,mkn->hmn", halves[:, :, 256 * group : 256 * group + 256], tiles[:, group])
        sums = sums + (exact.astype(np.float32) * scale.numpy()[expert, group]).astype(np.float16)
    both = sums.astype(np.float32)
    assist = 8 * dense.sum(1)
    wanted = (both[0] * 16 + both[1] + assist.numpy()[expert]) * token.numpy()[:, None]
    given = x.clone()
    with emulate("npu:a3") as emulation:
        (found,) = torch.ops.npu.npu_grouped_matmul(
            [given], [pack_int4(weight)], bias=[assist], scale=[scale.view(torch.int32).to(torch.int64)],
            per_token_scale=[token], group_list=torch.tensor(COUNTS), group_type=0, split_item=2, group_list_type=1,
            output_dtype=torch.float16,
        )  # fmt: skip
    assert not emulation.violations
    np.testing.assert_array_equal(found.numpy(), wanted.astype(np.float16))
    assert not torch.equal(given, x), "the operator takes its inputs apart in place"


def test_int4_by_int8_is_silently_wrong_without_its_assistant() -> None:
    with emulate("npu:a2") as emulation:
        call = CALLS["grouped-int4-a8"]()
        right = call.arguments["bias"][0]
        call.run(bias=[torch.zeros_like(right)])
        CALLS["grouped-int4-a8"]().run(group_list_type=0, group_list=torch.tensor(COUNTS).cumsum(0))
    assert [violation.rule for violation in emulation.violations] == ["assist-bias", "counts-assumed"]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda t: t.t(), True),
        (lambda t: t.view(torch.uint8), True),
        (lambda t: t.clone(), False),
        (lambda t: t.t().contiguous(), False),
        (lambda t: t.to("cpu", copy=True), False),
    ],
    ids=["transposed view", "other dtype", "clone", "contiguous copy", "moved"],
)
def test_nz_belongs_to_the_storage(change: Callable[[torch.Tensor], torch.Tensor], kept: bool) -> None:
    with emulate("npu:a5"):
        tensor = torch.ops.npu.npu_format_cast(int8(16, 32), FRACTAL_NZ)
        assert torch.ops.npu.get_npu_format(tensor) == FRACTAL_NZ
        assert torch.equal(tensor, int8(16, 32))
        assert (npu_format(change(tensor)) == FRACTAL_NZ) is kept


@pytest.mark.parametrize(
    ("tensor", "arguments", "problem"),
    [
        (fp4(16, 32), {"acl_format": 29}, "customize_dtype"),
        (fp8(16, 32), {"acl_format": 29}, "customize_dtype"),
        (int8(16, 32), {"acl_format": 3}, "neither"),
        (int8(32), {"acl_format": 29}, "matrix"),
        (int8(16, 32).t(), {"acl_format": 29}, "contiguous"),
    ],
)
def test_format_casts_that_fail(tensor: torch.Tensor, arguments: dict[str, Any], problem: str) -> None:
    with emulate("npu:a5"), pytest.raises(VendorError, match=problem):
        torch.ops.npu.npu_format_cast(tensor, **arguments)
