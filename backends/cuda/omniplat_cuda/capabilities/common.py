"""Words that the capability tables share: requirements, architectures, weights, shape rules."""

from __future__ import annotations

#: The releases of Triton in whose Gluon kernels are written. They ran with 3.6 and 3.9; CI compiles them with each.
GLUON = "triton>=3.6,<3.10"
HUMMING = "humming-kernels>=0.1.10"
#: The first with `gemm_4bit`.
BITSANDBYTES = "bitsandbytes>=0.50"
FLASHINFER = "flashinfer-python>=0.6"
#: Its operators have been called as this one registers them. The backend's extra does not bring it.
VLLM = "vllm>=0.30,<0.31"

SM90 = ("sm90",)
SM100 = ("sm100", "sm103")
SM120 = ("sm120", "sm121")
BLACKWELL = (*SM100, "sm110", *SM120)
#: FP8 tensor cores.
SM89 = ("sm89", "sm90", *BLACKWELL)
#: bf16 arithmetic.
SM80 = ("sm80", "sm86", "sm87", *SM89)

HALF = ("bf16", "f16")

INTEGERS = ("int[2-8]-channel", "int[2-8]-g*", "uint[2-8]-channel", "uint[2-8]-g*")

#: FP8 units before Blackwell keep about 22 bits of a sum.
FP8_ACCUMULATOR = "fp22"
#: The same of sums of 128 products, which are then added up in f32.
FP8_PROMOTED = "fp22-by-128"

#: Rules for scales that the portable quantizers follow, the default first (`omniplat.oracle.scales`).
FLOAT_RULES = ("absmax", "half-range", "absmax-clamped", "absmax-reciprocal")
#: Of fp8 scales that are powers of two.
POWER_RULES = ("ceil", "rceil")
MX_RULES = ("floor", "even", "even-m1", "ceil", "rceil")
NEAREST = ("nearest-even",)
