"""Operators of vllm-xpu-kernels that are emulated, as torch prints them of the genuine library (0.1.16.2)."""

from __future__ import annotations

from omniplat.emulation.schemas import OpSchema

#: The grouped product reads weights of 4 and 8 bits on these; elsewhere it ignores their scales.
_XE2 = ("bmg", "lnl", "pvc")

SCHEMAS = (
    OpSchema(
        "_xpu_C",
        "fp8_gemm(Tensor A, Tensor B, ScalarType? out_dtype, Tensor? A_scale_, Tensor? B_scale_, Tensor? bias_) "
        "-> Tensor",
    ),
    OpSchema("_xpu_C", "fp8_gemm_w8a16(Tensor A, Tensor B, Tensor? B_scale_, Tensor? bias_) -> Tensor"),
    OpSchema(
        "_xpu_C",
        "fp4_gemm(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, ScalarType? out_dtype, Tensor? bias_) -> Tensor",
    ),
    OpSchema(
        "_xpu_C",
        "int4_gemm_w4a16(Tensor A, Tensor B, Tensor? bias, Tensor B_scale, Tensor B_zp, int group_size, "
        "Tensor? g_idx) -> Tensor",
    ),
    OpSchema(
        "_xpu_C",
        "int4_gemm_w4a8(Tensor A_, Tensor A_scale, Tensor A_zp, Tensor B, Tensor B_scale, Tensor B_zp, "
        "int group_size, Tensor? g_idx, Tensor? bias) -> Tensor",
    ),
    OpSchema(
        "_xpu_C",
        "cutlass_grouped_gemm_interface(Tensor ptr_A, Tensor? ptr_A_scale, Tensor ptr_B, Tensor? ptr_B_scale, "
        "Tensor? ptr_bias, Tensor ptr_D, Tensor rows_per_expert, int N, int K, int num_experts) -> Tensor",
        archs=_XE2,
    ),
    OpSchema(
        "_moe_C",
        "remap_hidden_states(Tensor hidden_states, Tensor? hidden_states_scales, Tensor remapped_hidden_states, "
        "Tensor? remapped_hidden_states_scales, Tensor? expert_map, Tensor rows_per_expert, "
        "Tensor unpermuted_row_to_permuted_row, Tensor topk_ids, int total_experts_num, int local_experts_num) -> ()",
    ),
    OpSchema(
        "_moe_C",
        "moe_gather(Tensor! output, Tensor moe_output, Tensor topk_weights, Tensor unpermuted_row_to_permuted_row, "
        "int num_experts) -> ()",
    ),
    OpSchema(
        "_C",
        "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
        "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, "
        "bool dummy_is_tma_aligned) -> ()",
    ),
    OpSchema(
        "_C",
        "per_token_group_quant_mxfp4(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps) "
        "-> ()",
    ),
    OpSchema(
        "_C",
        "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, (int, int)? group_shape=None) -> ()",
    ),
    OpSchema("_C", "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()"),
    OpSchema(
        "_C",
        "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    ),
    OpSchema("_C", "silu_and_mul(Tensor! result, Tensor input) -> ()"),
    OpSchema("_C", "gelu_and_mul(Tensor! out, Tensor input) -> ()"),
    OpSchema("_C", "gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()"),
)
