"""NVIDIA GPUs: the operators of vLLM that omniplat's cuda backend calls.

Written from vLLM 0.30's sources. What torch and Triton bring is no vendor's library here: layers over those run the
forms that they have for CPUs.
"""

from __future__ import annotations

from omniplat.emulation.core import Vendor
from omniplat.emulation.cuda import marlin, scaled
from omniplat.emulation.cuda.schemas import SCHEMAS

VENDOR = Vendor(
    kind="cuda",
    library="vllm",
    version="0.30.0",
    known=("0.30.0",),
    loaded_as=("vllm._C_stable_libtorch",),
    schemas=SCHEMAS,
    operators={
        "_C::cutlass_scaled_mm": scaled.cutlass_scaled_mm,
        "_C::dynamic_per_token_scaled_fp8_quant": scaled.dynamic_per_token_scaled_fp8_quant,
        "_C::static_scaled_fp8_quant": scaled.static_scaled_fp8_quant,
        "_C::dynamic_scaled_int8_quant": scaled.dynamic_scaled_int8_quant,
        "_C::static_scaled_int8_quant": scaled.static_scaled_int8_quant,
        "_C::gptq_marlin_repack": marlin.gptq_marlin_repack,
        "_C::marlin_gemm": marlin.marlin_gemm,
    },
)
