"""Requirements, architectures and rules that the declarations share."""

from __future__ import annotations

AITER = "amd-aiter>=0.1.13"
#: fused_moe takes `swiglu_limit` from here on.
AITER_MOE = "amd-aiter>=0.1.14"
#: Here the rule by which the MXFP4 quantizer derives scales changed.
AITER_CEIL = "amd-aiter>=0.1.16"
AITER_EVEN = "amd-aiter>=0.1.13,<0.1.16"
#: fused_moe takes MXFP8 from here on, by kernels of FlyDSL, which that release asks for.
AITER_MXFP8 = "amd-aiter>=0.1.17"
FLYDSL = "flydsl>=0.2.2"
AITER_MOE_EVEN = "amd-aiter>=0.1.14,<0.1.16"
#: The sources that kernels and emulation were written from.
SOURCE = "https://github.com/ROCm/aiter/blob/e4048607a535ace3a2b51ded31b1c8c2d45c0879"

GFX942 = ("gfx942",)
GFX950 = ("gfx950",)
CDNA = (*GFX942, *GFX950)
HALF = ("bf16", "f16")
MODULES = "omniplat_rocm.kernels"
#: AITER's quantizers derive scales by rules of their own, which a plan notes. For e2m1 both names of "even" are one.
CEIL = ("ceil", "rceil")
EVEN = ("even", "even-m1")
NEAREST_EVEN = ("nearest-even",)
