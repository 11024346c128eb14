"""Intel GPUs: the operators of vllm-xpu-kernels that omniplat's xpu backend calls, and functions of auto-round-lib.

Kernels were read at 4543b580 (2026-08-21); the wheel whose schemas these are is newer. Both Xe2 architectures run the
same operators; others run none of them.
"""

from __future__ import annotations

from types import ModuleType

from omniplat.emulation.core import Emulation, Vendor
from omniplat.emulation.functions import stand_in
from omniplat.emulation.xpu import auto_round, experts, gemm, quantizers
from omniplat.emulation.xpu.schemas import SCHEMAS


def _auto_round_kernel(emulation: Emulation) -> ModuleType:
    module = ModuleType("auto_round_kernel")
    for schema in auto_round.FUNCTIONS:
        setattr(module, schema.name, stand_in(schema, getattr(auto_round, schema.name), emulation))
    return module


VENDOR = Vendor(
    kind="xpu",
    library="vllm-xpu-kernels",
    version="0.1.16.2",
    known=("0.1.16.2",),
    loaded_as=("vllm_xpu_kernels._C", "vllm_xpu_kernels._moe_C", "vllm_xpu_kernels._xpu_C"),
    schemas=SCHEMAS,
    operators={
        "_xpu_C::fp8_gemm": gemm.fp8_gemm,
        "_xpu_C::fp8_gemm_w8a16": gemm.fp8_gemm_w8a16,
        "_xpu_C::fp4_gemm": gemm.fp4_gemm,
        "_xpu_C::int4_gemm_w4a16": gemm.int4_gemm_w4a16,
        "_xpu_C::int4_gemm_w4a8": gemm.int4_gemm_w4a8,
        "_xpu_C::cutlass_grouped_gemm_interface": experts.cutlass_grouped_gemm_interface,
        "_moe_C::remap_hidden_states": experts.remap_hidden_states,
        "_moe_C::moe_gather": experts.moe_gather,
        "_C::per_token_group_fp8_quant": quantizers.per_token_group_fp8_quant,
        "_C::per_token_group_quant_mxfp4": quantizers.per_token_group_quant_mxfp4,
        "_C::static_scaled_fp8_quant": quantizers.static_scaled_fp8_quant,
        "_C::dynamic_scaled_fp8_quant": quantizers.dynamic_scaled_fp8_quant,
        "_C::dynamic_per_token_scaled_fp8_quant": quantizers.dynamic_per_token_scaled_fp8_quant,
        "_C::silu_and_mul": experts.silu_and_mul,
        "_C::gelu_and_mul": experts.gelu_and_mul,
        "_C::gelu_tanh_and_mul": experts.gelu_tanh_and_mul,
    },
    modules={"auto_round_kernel": _auto_round_kernel},
    functions=auto_round.FUNCTIONS,
)
