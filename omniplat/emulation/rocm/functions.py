"""Signatures of the functions of AITER that the rocm backend calls, as data: release by release, without annotations.

Read from the tags of ROCm/aiter, and compared with the genuine wheel by tests/emulation/genuine_python.py. A signature
without an upper bound is that of every newer release until a comparison shows otherwise.
"""

from __future__ import annotations

from omniplat.emulation.schemas import OpSchema

_FUSED_MOE = (
    "fused_moe(hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None, activation=ActivationType.Silu, "
    "quant_type=QuantType.No, doweight_stage1=False, w1_scale=None, w2_scale=None, a1_scale=None, a2_scale=None, "
    "block_size_M=None, num_local_tokens=None, moe_sorting_dispatch_policy=0, dtype=None, hidden_pad=0, "
    "intermediate_pad=0, bias1=None, bias2=None"
)
_GATE = "gate_mode=GateMode.SEPARATED.value"
_GEMM_A4W4 = "gemm_a4w4(A, B, A_scale, B_scale"
_SHUFFLE_WEIGHT = "shuffle_weight(x, layout=(16, 16), use_int4=False"
_QUANT_HIP = "(x, scale=None, quant_dtype=dtypes.fp4x2, shuffle=False, num_rows=None, num_rows_factor=1"

FUNCTIONS = (
    OpSchema("aiter", f"{_GEMM_A4W4}, out, bias=None, alpha=1.0, beta=0.0, bpreshuffle=True)", "<0.1.8"),
    OpSchema(
        "aiter",
        f"{_GEMM_A4W4}, bias=None, dtype=dtypes.bf16, alpha=1.0, beta=0.0, bpreshuffle=True)",
        ">=0.1.13,<0.1.17",
    ),
    OpSchema(
        "aiter",
        f"{_GEMM_A4W4}, bias=None, dtype=dtypes.bf16, alpha=1.0, beta=0.0, bpreshuffle=True, apreshuffle=False, "
        "global_A_scale=None, global_B_scale=None)",
        ">=0.1.17",
    ),
    OpSchema("aiter", "gemm_a8w8(XQ, WQ, x_scale, w_scale, bias=None, dtype=dtypes.bf16, splitK=None)"),
    OpSchema("aiter", "gemm_a8w8_bpreshuffle(XQ, WQ, x_scale, w_scale, bias=None, dtype=dtypes.bf16, check=False)"),
    OpSchema("aiter", "gemm_a8w8_blockscale(XQ, WQ, x_scale, w_scale, dtype=dtypes.bf16, isBpreshuffled=False)"),
    OpSchema("aiter", "get_hip_quant(qType)"),
    OpSchema("aiter", f"per_1x32_f4_quant_hip{_QUANT_HIP})"),
    OpSchema("aiter", f"per_1x32_mx_quant_hip{_QUANT_HIP}, scale_type=None)", ">=0.1.15"),
    OpSchema("aiter.fused_moe", f"{_FUSED_MOE})", "<0.1.8"),
    OpSchema("aiter.fused_moe", f"{_FUSED_MOE}, splitk=0)", ">=0.1.13,<0.1.14"),
    OpSchema("aiter.fused_moe", f"{_FUSED_MOE}, splitk=0, swiglu_limit=0.0, {_GATE})", ">=0.1.14,<0.1.17"),
    OpSchema("aiter.fused_moe", f"{_FUSED_MOE}, splitk=0, swiglu_limit=None, {_GATE})", ">=0.1.17,<0.1.19"),
    OpSchema(
        "aiter.fused_moe",
        f"{_FUSED_MOE}, splitk=0, swiglu_limit=None, beta=None, linear_beta=None, {_GATE})",
        ">=0.1.19,<0.1.20",
    ),
    OpSchema(
        "aiter.fused_moe",
        f"{_FUSED_MOE}, splitk=0, swiglu_limit=None, beta=None, linear_beta=None, {_GATE}, shared_w1=None, "
        "shared_w2=None, shared_w1_scale=None, shared_w2_scale=None, shared_expert_id=-1)",
        ">=0.1.20",
    ),
    OpSchema("aiter.ops.shuffle", f"{_SHUFFLE_WEIGHT})", "<0.1.14"),
    OpSchema("aiter.ops.shuffle", f"{_SHUFFLE_WEIGHT}, is_guinterleave=False, gate_up=False)", ">=0.1.14,<0.1.17"),
    OpSchema("aiter.ops.shuffle", f"{_SHUFFLE_WEIGHT}, is_guinterleave=False, gate_up=False, pad_k_to=0)", ">=0.1.17"),
    OpSchema("aiter.ops.shuffle", "shuffle_weight_a16w4(src, NLane, gate_up)"),
    OpSchema("aiter.ops.shuffle", "shuffle_scale_a16w4(src, experts_cnt, gate_up)"),
    OpSchema("aiter.ops.triton.quant", "dynamic_mxfp4_quant(x, scaling_mode='even')"),
    OpSchema(
        "aiter.ops.triton.gemm_afp4wfp4",
        "gemm_afp4wfp4(x, w, x_scales, w_scales, dtype=torch.bfloat16, y=None, config=None)",
        "<0.1.8",
    ),
    OpSchema(
        "aiter.ops.triton.gemm_afp4wfp4",
        "gemm_afp4wfp4(x, w, x_scales, w_scales, dtype=torch.bfloat16, y=None, config=None, skip_reduce=False)",
        ">=0.1.13",
    ),
    OpSchema(
        "aiter.ops.triton.gemm_a8wfp4", "gemm_a8wfp4(x, w, y, x_scales, w_scales, dtype=torch.bfloat16, config=None)"
    ),
    OpSchema("aiter.utility.fp4_utils", "e8m0_shuffle(scale)"),
)
