"""Ascend NPUs: torch_npu's operators."""

from collections.abc import Callable, Mapping
from typing import Any

from omniplat.emulation.ascend.grouped import grouped_matmul, grouped_matmul_swiglu_quant_v2, swiglu
from omniplat.emulation.ascend.layout import format_cast, get_npu_format
from omniplat.emulation.ascend.matmul import dual_level_quant_matmul, quant_matmul, weight_quant_batchmatmul
from omniplat.emulation.ascend.mx import dynamic_dual_level_mx_quant, dynamic_mx_quant
from omniplat.emulation.ascend.quantize import (
    convert_weight_to_int4pack,
    dynamic_block_quant,
    dynamic_quant,
    kronecker_quant,
    quantize,
    trans_quant_param,
)
from omniplat.emulation.ascend.routing import moe_finalize_routing, moe_init_routing_v2
from omniplat.emulation.ascend.schemas import SCHEMAS
from omniplat.emulation.core import Vendor

OPERATORS: Mapping[str, Callable[..., Any]] = {
    "npu::get_npu_format": get_npu_format,
    "npu::npu_format_cast": format_cast,
    "npu::npu_convert_weight_to_int4pack": convert_weight_to_int4pack,
    "npu::npu_trans_quant_param": trans_quant_param,
    "npu::npu_quantize": quantize,
    "npu::npu_dynamic_quant": dynamic_quant,
    "npu::npu_dynamic_block_quant": dynamic_block_quant,
    "npu::npu_kronecker_quant": kronecker_quant,
    "npu::npu_dynamic_mx_quant": dynamic_mx_quant,
    "npu::npu_dynamic_dual_level_mx_quant": dynamic_dual_level_mx_quant,
    "npu::npu_quant_matmul": quant_matmul,
    "npu::npu_weight_quant_batchmatmul": weight_quant_batchmatmul,
    "npu::npu_dual_level_quant_matmul": dual_level_quant_matmul,
    "npu::npu_swiglu": swiglu,
    "npu::npu_grouped_matmul": grouped_matmul,
    "npu::npu_grouped_matmul_swiglu_quant_v2": grouped_matmul_swiglu_quant_v2,
    "npu::npu_moe_init_routing_v2": moe_init_routing_v2,
    "npu::npu_moe_finalize_routing": moe_finalize_routing,
}

VENDOR = Vendor(
    kind="npu",
    library="torch-npu",
    version="2.13.0",
    known=("2.10.0.post4", "2.13.0"),
    loaded_as=("torch_npu",),
    schemas=SCHEMAS,
    operators=OPERATORS,
)
