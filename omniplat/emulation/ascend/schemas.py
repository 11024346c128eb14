"""Schemas of torch_npu's operators, as the library registers them (2.13.0; what differs in 2.10.0.post4 stands beside).

`tests/emulation/genuine.py` prints them from the vendor's wheel, and CI compares.
"""

from __future__ import annotations

from omniplat.emulation.schemas import OpSchema

_A5 = ("a5",)


def _npu(text: str, *, versions: str = "", archs: tuple[str, ...] = ("a2", "a3", "a5")) -> OpSchema:
    return OpSchema("npu", text, versions, archs)


SCHEMAS: tuple[OpSchema, ...] = (
    _npu(
        "get_npu_format(Tensor input) -> int",
    ),
    _npu(
        "npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None, int? input_dtype=None) -> Tensor",
    ),
    _npu(
        "npu_convert_weight_to_int4pack(Tensor weight, int inner_k_tiles=0) -> Tensor",
    ),
    _npu(
        "npu_trans_quant_param(Tensor scale, Tensor? offset=None, int? round_mode=0) -> Tensor",
    ),
    _npu(
        "npu_quantize(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int axis=1, bool "
        "div_mode=True) -> Tensor",
    ),
    _npu(
        "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, int? "
        'dst_type=None, str quant_mode="pertoken", float dst_type_max=0.) -> (Tensor, Tensor)',
    ),
    _npu(
        'npu_dynamic_block_quant(Tensor x, *, float min_scale=0., str round_mode="rint", int dst_type=1, int '
        "row_block_size=1, int col_block_size=128, float dst_type_max=0.) -> (Tensor y, Tensor scale)",
    ),
    _npu(
        "npu_kronecker_quant(Tensor x, Tensor kronecker_p1, Tensor kronecker_p2, float? clip_ratio=None, int? "
        "dst_dtype=None, float? dst_type_max=None) -> (Tensor out, Tensor quant_scale)",
    ),
    _npu(
        'npu_dynamic_mx_quant(Tensor input, *, int axis=-1, str round_mode="rint", int dst_type=296, int '
        "block_size=32, int? scale_alg=0, float dst_type_max=0.) -> (Tensor, Tensor)",
        versions="<2.13",
        archs=_A5,
    ),
    _npu(
        'npu_dynamic_mx_quant(Tensor input, *, int axis=-1, str round_mode="rint", int dst_type=296, int '
        "block_size=32, int? scale_alg=0, float dst_type_max=0., float max_low_bound=0.) -> (Tensor, "
        "Tensor)",
        versions=">=2.13",
        archs=_A5,
    ),
    _npu(
        "npu_dynamic_dual_level_mx_quant(Tensor input, *, Tensor? smooth_scale=None, str "
        'round_mode="rint") -> (Tensor, Tensor, Tensor)',
        archs=_A5,
    ),
    _npu(
        "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? "
        "pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, int? "
        "x2_dtype=None, int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, "
        "Tensor? y_scale=None) -> Tensor",
    ),
    _npu(
        "npu_weight_quant_batchmatmul(Tensor x, Tensor weight, Tensor antiquant_scale, Tensor? "
        "antiquant_offset=None, Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? bias=None, "
        "int antiquant_group_size=0, int inner_precise=0, int? weight_dtype=None) -> Tensor",
    ),
    _npu(
        "npu_dual_level_quant_matmul(Tensor x1, Tensor x2, Tensor x1_level0_scale, Tensor "
        "x2_level0_scale, Tensor x1_level1_scale, Tensor x2_level1_scale, *, Tensor? bias=None, int "
        "output_dtype=15) -> Tensor",
        archs=_A5,
    ),
    _npu(
        "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    ),
    _npu(
        "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
        "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
        "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
        "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? "
        "split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? "
        "tuning_config=None, int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? "
        "scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]",
    ),
    _npu(
        "npu_grouped_matmul_swiglu_quant_v2(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor "
        "x_scale, Tensor group_list, *, Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, "
        "Tensor? bias=None, int? dequant_mode=0, int? dequant_dtype=0, int? quant_mode=0, int? "
        "quant_dtype=1, int? group_list_type=0, int[]? tuning_config=None, int? x_dtype=None, int? "
        "weight_dtype=None, int? weight_scale_dtype=None, int? x_scale_dtype=None) -> (Tensor, Tensor)",
        versions="<2.13",
    ),
    _npu(
        "npu_grouped_matmul_swiglu_quant_v2(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor "
        "x_scale, Tensor group_list, *, Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, "
        "Tensor? bias=None, int? dequant_mode=0, int? dequant_dtype=6, int? quant_mode=0, int? "
        "quant_dtype=1, int? group_list_type=0, int[]? tuning_config=None, int? x_dtype=None, int? "
        "weight_dtype=None, int? weight_scale_dtype=None, int? x_scale_dtype=None) -> (Tensor, Tensor)",
        versions=">=2.13",
    ),
    _npu(
        "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
        "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int "
        "expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=-1, int[2] "
        "active_expert_range=[], int row_idx_type=0, int? x_dtype=None) -> (Tensor, Tensor, Tensor, "
        "Tensor)",
    ),
    _npu(
        "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, Tensor? "
        "scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0) -> Tensor",
        versions="<2.13",
    ),
    _npu(
        "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, Tensor? "
        "scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0, int? k=1) -> "
        "Tensor",
        versions=">=2.13",
    ),
)
