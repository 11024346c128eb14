"""The operators around experts: sorting rows, SwiGLU with its quantization, packing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from omniplat.emulation import VendorError, emulate
from omniplat.emulation.ascend.quantize import unpack_int4
from tests.emulation.ascend.calls import COUNTS, E, K, M, e8m0, f32, fp4, fp4_numbers, fp8, int4, int8, scaled

I2 = 64
IDS = torch.tensor([[2, 0], [1, 3], [3, 3], [0, 2]], dtype=torch.int32)
ROUTED: dict[str, Any] = {
    "expert_num": 4,
    "expert_tokens_num_type": 1,
    "expert_tokens_num_flag": True,
    "active_expert_range": [0, 3],
}


def test_rows_lie_by_expert_and_say_where_they_went() -> None:
    x = torch.arange(4.0).unsqueeze(1).expand(4, 8).contiguous()
    with emulate("npu:a2"):
        rows, where, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(x, IDS, **ROUTED)
        _, scattered, cumulative, _ = torch.ops.npu.npu_moe_init_routing_v2(
            x, IDS, **{**ROUTED, "row_idx_type": 1, "expert_tokens_num_type": 0}
        )
    assert counts.tolist() == [2, 1, 2]
    assert cumulative.tolist() == [2, 3, 5]
    assert rows[:5, 0].tolist() == [0.0, 3.0, 1.0, 0.0, 3.0]
    assert bool(rows[5:].isnan().all()), "what no expert gets is not written"
    assert where.tolist() == [3, 0, 2, -1, -1, -1, 1, 4]
    assert scattered[:5].tolist() == [1, 6, 2, 0, 7]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"expert_idx": IDS.to(torch.int64)}, "needed int32"),
        ({"expert_idx": IDS.reshape(-1)}, "matrices"),
        ({"expert_idx": IDS - 1}, "none of 4 experts"),
        ({"expert_num": 3}, "none of 3 experts"),
        ({"active_expert_range": [0, 5]}, "active_expert_range"),
        ({"active_expert_range": [2, 2]}, "active_expert_range"),
        ({"x": torch.zeros((4, 8), dtype=torch.uint8)}, "x cannot be"),
    ],
)
def test_wrong_routing_fails(changes: dict[str, Any], problem: str) -> None:
    arguments = {"x": torch.zeros(4, 8), "expert_idx": IDS, **ROUTED, **changes}
    with emulate("npu:a2"), pytest.raises(VendorError, match=problem):
        torch.ops.npu.npu_moe_init_routing_v2(**arguments)


def summed(mode: int, rows: torch.Tensor, where: torch.Tensor, weights: torch.Tensor, arch: str = "a2") -> torch.Tensor:
    with emulate(f"npu:{arch}"):
        found: torch.Tensor = torch.ops.npu.npu_moe_finalize_routing(
            rows, None, None, None, weights, where, None, drop_pad_mode=mode
        )
    return found


def test_rows_are_added_up_where_they_went() -> None:
    """In the order of tokens and in that of choices; a row that is not there counts as zeros, whatever it holds."""
    rows, weights = torch.randn(8, 6), torch.rand(4, 2)
    where = torch.tensor([[3, 0], [5, 7], [1, 6], [4, 2]], dtype=torch.int32)
    wanted = (rows[where.long()] * weights.unsqueeze(2)).sum(1)
    torch.testing.assert_close(summed(2, rows, where.flatten(), weights), wanted)
    torch.testing.assert_close(summed(0, rows, where.t().flatten(), weights), wanted)
    missing = where.clone()
    missing[1, 0] = missing[3, 1] = -1
    rows[0] = torch.nan
    kept = torch.where(missing.unsqueeze(2) < 0, 0.0, rows[missing.clamp(min=0).long()])
    wanted = (kept * weights.unsqueeze(2)).sum(1)
    for mode, order in ((3, missing), (1, missing.t())):
        found = summed(mode, rows.view(2, 4, 6), order.flatten(), weights)
        torch.testing.assert_close(found, wanted, equal_nan=True)
    assert int(torch.isfinite(wanted).all(1).sum()) == 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"drop_pad_mode": 4}, "none of 0 to 3"),
        ({"drop_pad_mode": 2}, "rows are"),
        ({"expanded_permuted_rows": torch.zeros((8, 6))}, "rows are"),
        ({"expanded_permuted_rows": torch.zeros((1, 8, 6))}, "1 experts for 2 choices"),
        ({"expanded_permuted_rows": torch.zeros((2, 4, 6), dtype=torch.int32)}, "cannot be"),
        ({"scales": torch.zeros((4, 2), dtype=torch.bfloat16)}, "scales is"),
        ({"scales": torch.zeros(8)}, "scales is"),
        ({"expanded_src_to_dst_row": torch.zeros(8, dtype=torch.int64)}, "needed int32"),
        ({"expanded_src_to_dst_row": torch.zeros((4, 2), dtype=torch.int32)}, "needed int32"),
        ({"expanded_src_to_dst_row": torch.full((8,), 8, dtype=torch.int32)}, "leaves"),
        ({"expanded_src_to_dst_row": torch.full((8,), -2, dtype=torch.int32)}, "leaves"),
    ],
)
def test_wrong_sums_fail(changes: dict[str, Any], problem: str) -> None:
    arguments: dict[str, Any] = {
        "expanded_permuted_rows": torch.zeros((2, 4, 6)),
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": torch.zeros((4, 2)),
        "expanded_src_to_dst_row": torch.zeros(8, dtype=torch.int32),
        "export_for_source_row": None,
        "drop_pad_mode": 3,
        **changes,
    }
    with emulate("npu:a2"), pytest.raises(VendorError, match=problem):
        torch.ops.npu.npu_moe_finalize_routing(**arguments)


@pytest.mark.parametrize("version", ["2.10.0.post4", "2.13.0"])
def test_a_number_of_choices_is_new(version: str) -> None:
    with emulate("npu:a2", version=version):
        schema = str(torch.ops.npu.npu_moe_finalize_routing.default._schema)
    assert ("int? k=1" in schema) is (version == "2.13.0")


def gated(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=1)
    return F.silu(gate) * up


def by_expert(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([part @ weight[e].t() for e, part in enumerate(torch.split(x, COUNTS))])


def int8_arguments() -> dict[str, Any]:
    return {
        "x": int8(M, K),
        "weight": [int8(E, I2, K).transpose(1, 2)],
        "weight_scale": [f32(E, I2) * 2.0**-8],
        "x_scale": f32(M) * 2.0**-8,
        "group_list": torch.tensor(COUNTS),
        "group_list_type": 1,
    }


def mx_arguments() -> dict[str, Any]:
    return {
        "x": fp4(M, K),
        "weight": [fp4(E, I2, K).transpose(1, 2)],
        "weight_scale": [e8m0(E, I2, 2, 2).transpose(1, 2)],
        "x_scale": e8m0(M, 2, 2),
        "group_list": torch.tensor(COUNTS).cumsum(0),
        "dequant_mode": 2,
        "quant_mode": 2,
        "quant_dtype": 296,
        "x_dtype": 296,
        "weight_dtype": 296,
        "weight_scale_dtype": 293,
        "x_scale_dtype": 293,
    }


def test_gate_comes_before_up_and_codes_are_their_rows_own() -> None:
    arguments = int8_arguments()
    with emulate("npu:a2"):
        codes, scale = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(**arguments)
    rows = torch.repeat_interleave(torch.arange(E), torch.tensor(COUNTS))
    weight = arguments["weight"][0].transpose(1, 2).double()
    both = by_expert(arguments["x"].double(), weight)
    both = both * arguments["weight_scale"][0].double()[rows] * arguments["x_scale"].double().unsqueeze(1)
    wanted = gated(both)
    np.testing.assert_allclose(scale.double().numpy(), wanted.abs().amax(1).numpy() / 127, rtol=1e-6)
    assert float((codes.double() * scale.double().unsqueeze(1) - wanted).abs().max()) <= float(scale.max()) * 0.501


def test_mx_experts_are_quantized_as_inputs_are() -> None:
    arguments = mx_arguments()
    with emulate("npu:a5"):
        codes, scale = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(**arguments)
        x = scaled(fp4_numbers(arguments["x"]), arguments["x_scale"])
        stack = arguments["weight"][0].transpose(1, 2)
        weight = scaled(fp4_numbers(stack.contiguous()), arguments["weight_scale"][0].transpose(1, 2).contiguous())
        hidden = gated(by_expert(x, weight)).float()
        again, scales = torch.ops.npu.npu_dynamic_mx_quant(hidden, dst_type=296)
    assert torch.equal(scale, scales)
    assert float((codes != again).double().mean()) < 0.02, "only ties may fall otherwise"


def test_what_no_group_covers_is_not_used() -> None:
    """The first rows are the same whatever lies behind them."""
    arguments = int8_arguments()
    arguments["group_list"] = torch.tensor((2, 0, 1))
    with emulate("npu:a2"):
        codes, scale = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(**arguments)
    assert bool(scale[3:].isnan().all())
    assert bool(scale[:3].isfinite().all())
    assert codes.shape == (M, I2 // 2)


@pytest.mark.parametrize(
    ("make", "arch", "changes", "problem"),
    [
        (int8_arguments, "a2", {"weight": int8_arguments()["weight"] * 2}, "list of 2"),
        (int8_arguments, "a2", {"weight_scale": [f32(E, I2).bfloat16()]}, "weight_scale is"),
        (int8_arguments, "a2", {"weight_scale": [f32(E, I2, 1)]}, "weight_scale is"),
        (int8_arguments, "a2", {"x_scale": f32(M, 1)}, "x_scale is"),
        (int8_arguments, "a2", {"quant_dtype": 292}, "not int8"),
        (int8_arguments, "a2", {"dequant_dtype": 15}, "for a5"),
        (int8_arguments, "a2", {"group_list": torch.tensor((2, 2, 2))}, "covers 6 of 5"),
        (int8_arguments, "a2", {"bias": torch.zeros(E, I2, dtype=torch.int32)}, "have to be None"),
        (int8_arguments, "a2", {"dequant_mode": 2, "quant_mode": 2}, "on a2"),
        (int8_arguments, "a2", {"x": fp8(M, K)}, "needed int8"),
        (mx_arguments, "a5", {"weight_dtype": None}, "together"),
        (mx_arguments, "a5", {"weight_scale": [e8m0(E, 2, I2, 2)]}, "transposed differently"),
        (mx_arguments, "a5", {"weight_scale_dtype": None}, "e8m0"),
        (mx_arguments, "a5", {"x_scale": e8m0(M, 4, 2)}, "x_scale is"),
        (mx_arguments, "a5", {"quant_dtype": 1}, "no MX format"),
        (mx_arguments, "a5", {"quant_mode": 0}, "dequant_mode and quant_mode"),
    ],
)
def test_wrong_fused_calls_fail(make: Any, arch: str, changes: dict[str, Any], problem: str) -> None:
    with emulate(f"npu:{arch}"), pytest.raises(VendorError, match=problem):
        torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(**{**make(), **changes})


@pytest.mark.parametrize(
    ("weight", "arch", "problem"),
    [
        (torch.full((2, 8), 8, dtype=torch.int32), "a2", "no int4"),
        (torch.full((2, 12), 1, dtype=torch.int32), "a2", "multiple of 8"),
        (torch.full((2, 8), 1, dtype=torch.int8), "a2", "the weight is"),
        (torch.full((16, 8), 1, dtype=torch.int32).t(), "a2", "contiguous"),
        (torch.full((2, 2, 8), 1, dtype=torch.int32), "a2", "3-dimensional"),
        (torch.full((2, 8), 0.5), "a2", "for a5"),
        (torch.full((2, 8), 0.7), "a5", "none of fp4"),
    ],
)
def test_wrong_packing_fails(weight: torch.Tensor, arch: str, problem: str) -> None:
    with emulate(f"npu:{arch}"), pytest.raises(VendorError, match=problem):
        torch.ops.npu.npu_convert_weight_to_int4pack(weight)


def test_packing_keeps_every_value() -> None:
    values = int4(6, 16)
    with emulate("npu:a2"):
        packed = torch.ops.npu.npu_convert_weight_to_int4pack(values.to(torch.int32))
    assert packed.shape == (6, 2)
    assert torch.equal(unpack_int4(packed), values)
    assert int(packed[0, 0]) & 0xF == int(values[0, 0]) & 0xF


def test_swiglu_takes_the_first_half_as_gate() -> None:
    x = torch.randn(3, 8).to(torch.bfloat16)
    with emulate("npu:a2"):
        found = torch.ops.npu.npu_swiglu(x)
        with pytest.raises(VendorError, match="no halves"):
            torch.ops.npu.npu_swiglu(x[:, :7])
    assert torch.equal(found, gated(x.float()).to(torch.bfloat16))
